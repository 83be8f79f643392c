"""The admin HTTP API: the cluster, API keys, the audit trail, metrics and the page `/`."""

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from tandem.api.admin.adapters import add_adapter_routes
from tandem.api.admin.chat import add_chat_route
from tandem.api.admin.cluster import add_cluster_routes
from tandem.api.admin.keys import add_key_routes
from tandem.api.admin.page_feed import LIVE_PATH, LiveStream, PageFeed
from tandem.api.admin.page_files import add_page_routes
from tandem.api.http.errors import JsonResponse, install_handlers
from tandem.api.http.guard import AdminGuard
from tandem.api.routes.health import add_health_routes
from tandem.common.config.router import RouterConfig
from tandem.errors import BadRequest
from tandem.net.security.access import Access
from tandem.net.security.audit_trail import ENTRIES_MAX, AuditTrail
from tandem.net.security.key_service import KeyService
from tandem.router.index.audit import IndexAudit
from tandem.router.metrics.router import Metrics
from tandem.router.metrics.vllm_names import VllmMetrics
from tandem.router.request.generator import Generator
from tandem.router.scaling.adapters import AdapterControl
from tandem.router.scaling.control import ClusterControl


def make_admin_app(
    config: RouterConfig,
    generator: Generator,
    control: ClusterControl,
    metrics: Metrics,
    audit: IndexAudit,
    access: Access,
    keys: KeyService,
    trail: AuditTrail,
    feed: PageFeed,
) -> FastAPI:
    app = FastAPI(
        title="Tandem, for operators",
        redirect_slashes=False,
        docs_url=None,  # these two pages would run scripts of another site
        redoc_url=None,
    )
    install_handlers(app)
    app.add_middleware(AdminGuard, config=config, access=access, trail=trail)
    add_health_routes(app, generator)
    add_cluster_routes(app, config, generator, control, audit)
    add_key_routes(app, config, keys, trail)
    add_adapter_routes(app, config, AdapterControl(control, generator, trail))
    add_chat_route(app, config, generator)
    add_page_routes(app)

    @app.get(LIVE_PATH)
    async def live() -> Response:
        """Streams what the page shows, as server-sent events: all of it, then what changes."""
        return LiveStream(feed)

    @app.get("/v1/cluster/audit")
    async def entries(request: Request) -> Response:
        """Returns the last changes and refused calls at all routers, the newest first."""
        return JsonResponse({"entries": await trail.read(_limit(request))})

    @app.get("/v1/cluster/events")
    async def events(request: Request) -> Response:
        """Returns the last events and changes at all routers, the newest first."""
        found = await control.view.events.read(_limit(request), trail)
        return JsonResponse({"events": found})

    @app.get("/metrics")
    async def prometheus(request: Request) -> Response:
        """Returns the router's metrics; with `?names=vllm` under vLLM's names."""
        match request.query_params.get("names", "tandem"):
            case "tandem":
                text = generate_latest(metrics.registry)
            case "vllm":
                workers = [worker.record for worker in control.view.known()]
                named = VllmMetrics(metrics.registry, workers, generator.served_name)
                text = generate_latest(named)
            case _:
                raise BadRequest("names must be tandem or vllm", param="names")
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return app


def _limit(request: Request) -> int:
    """Returns the number of entries that a call asks for. Raises BadRequest."""
    limit = request.query_params.get("limit", "100")
    if not (limit.isdecimal() and 1 <= int(limit) <= ENTRIES_MAX):
        raise BadRequest(f"limit must be a number from 1 to {ENTRIES_MAX}", param="limit")
    return int(limit)
