"""Routes that name the served model, in the form of OpenAI's API or of Anthropic's."""

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.errors import ModelNotFound
from tandem.router.api.anthropic.errors import MODELS_PATH, is_anthropic
from tandem.router.api.http.errors import JsonResponse
from tandem.router.api.openai.embeddings import POOLING
from tandem.router.request.generator import Generator, LoadedModel


def add_model_routes(app: FastAPI, generator: Generator) -> None:
    """Adds /v1/models. A header tells which API a client knows."""

    def body(request: Request, model: LoadedModel) -> dict[str, Any]:
        make = anthropic_model if is_anthropic(request.scope) else openai_model
        return make(model, generator.served_name, generator.max_model_len)

    @app.get(MODELS_PATH)
    async def models(request: Request) -> Response:
        data = [body(request, generator.model)] if generator.model is not None else []
        if not is_anthropic(request.scope):
            return JsonResponse({"object": "list", "data": data})
        ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        page = {"data": data, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
        return JsonResponse(page)

    @app.get(f"{MODELS_PATH}/{{model:path}}")
    async def model(model: str, request: Request) -> Response:
        if generator.model is None or model != generator.served_name:
            raise ModelNotFound(
                f"the model {model[:80]!r} is not served here; {generator.served_name!r} is",
                param="model",
            )
        return JsonResponse(body(request, generator.model))


def openai_model(model: LoadedModel, name: str, max_model_len: int) -> dict[str, Any]:
    """Returns the model as OpenAI's API describes it, with vLLM's additions and ours."""
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "tandem",
        "root": model.folder.name,
        "parent": None,
        "max_model_len": max_model_len,
        "embedding": {**POOLING, "dimensions": model.folder.config.hidden_size},
    }


def anthropic_model(model: LoadedModel, name: str, max_model_len: int) -> dict[str, Any]:
    """Returns the model as Anthropic's API describes it."""
    created = datetime.fromtimestamp(model.created_s, UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }
