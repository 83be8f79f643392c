"""Routes that list the served models, in the format of OpenAI's or Anthropic's API."""

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tandem.api.anthropic.errors import MODELS_PATH, is_anthropic
from tandem.api.http.errors import JsonResponse
from tandem.common.adapter import Adapter
from tandem.errors import NoWorkers
from tandem.router.admission.tenants import limits_of
from tandem.router.request.generator import Generator, LoadedModel
from tandem.router.request.models import Models


def add_model_routes(app: FastAPI, models: Models) -> None:
    """Adds the routes under /v1/models. The format is Anthropic's if the header `anthropic-version`
    is present, else OpenAI's."""

    def bodies(request: Request, generator: Generator, model: LoadedModel) -> list[dict[str, Any]]:
        """Describes a model and its adapters, without those that the API key may not use."""
        name = generator.served_name
        max_model_len = generator.max_model_len
        if is_anthropic(request.scope):
            base = anthropic_model(name, model.created_s, max_model_len)
            others = [
                anthropic_model(a.name, a.added_at, max_model_len) for a in generator.adapters
            ]
        else:
            base = openai_model(model, name, max_model_len)
            others = [openai_adapter(base, adapter) for adapter in generator.adapters]
        allowed = models.names(generator, limits_of(request.state.key))
        return [each for each in (base, *others) if each["id"] in allowed]

    @app.get(MODELS_PATH)
    async def list_models(request: Request) -> Response:
        """Lists the served models and their adapters."""
        data = [
            body
            for generator in models
            if generator.model is not None
            for body in bodies(request, generator, generator.model)
        ]
        if not is_anthropic(request.scope):
            return JsonResponse({"object": "list", "data": data})
        ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        page = {"data": data, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
        return JsonResponse(page)

    @app.get(f"{MODELS_PATH}/{{model:path}}")
    async def model(model: str, request: Request) -> Response:
        """Describes one model or adapter."""
        if not model:
            raise HTTPException(404)  # the list's path with a slash at its end
        generator = models.of(model, limits_of(request.state.key))
        if generator.model is None:
            raise NoWorkers("the model is not loaded yet", retry_after_s=1.0)
        generator.adapter(model)
        name = generator.name_of(model)
        found = bodies(request, generator, generator.model)
        return JsonResponse(next(each for each in found if each["id"] == name))


def openai_model(model: LoadedModel, name: str, max_model_len: int) -> dict[str, Any]:
    """Formats the model for OpenAI's API, with vLLM's additions and Tandem's."""
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "tandem",
        "root": model.folder.name,
        "parent": None,
        "max_model_len": max_model_len,
        "sampling_defaults": dict(model.sampling),
        "tasks": list(model.tasks),
        "embedding": _embedding(model) if "embed" in model.tasks else None,
    }


def _embedding(model: LoadedModel) -> dict[str, Any]:
    config = model.folder.config
    pooling = "last" if config.encoder is None else config.encoder.pooling
    return {"pooling": pooling, "normalized": True, "dimensions": config.hidden_size}


def openai_adapter(base: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
    """Formats a LoRA adapter as vLLM does, but without the path of the adapter's folder."""
    own = {"id": adapter.name, "root": adapter.name, "parent": base["id"]}
    return {**base, **own, "created": int(adapter.added_at)}


def anthropic_model(name: str, created_s: float, max_model_len: int) -> dict[str, Any]:
    """Formats a model or an adapter for Anthropic's API."""
    created = datetime.fromtimestamp(created_s, UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }
