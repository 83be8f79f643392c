"""Health probes, served on the public and the admin HTTP port."""

from fastapi import FastAPI
from starlette.responses import Response

from tandem.api.http.errors import JsonResponse, error_response
from tandem.errors import NoWorkers
from tandem.router.request.models import Models


def add_health_routes(app: FastAPI, models: Models) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Answers 200 while the process runs. /ready says whether it serves requests."""
        return JsonResponse({"status": "ok"})

    @app.get("/started")
    async def started() -> Response:
        """Answers 200 when all models are loaded. Requests may still have to wait for workers."""
        if any(generator.model is None for generator in models):
            return error_response(NoWorkers(models.not_ready_reason(), retry_after_s=1.0))
        return JsonResponse({"status": "started"})

    @app.get("/ready")
    async def ready() -> Response:
        """Answers 200 while requests are served, else 503 with the reason."""
        if reason := models.not_ready_reason():
            return error_response(NoWorkers(reason, retry_after_s=1.0))
        return JsonResponse({"status": "ready"})

    @app.get("/ping")
    @app.post("/ping", include_in_schema=False)
    async def ping() -> Response:
        """Answers as /ready does. SageMaker calls this path."""
        return await ready()
