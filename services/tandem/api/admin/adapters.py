"""HTTP routes that load and unload LoRA adapters, compatible with vLLM's."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from tandem.api.http.body import read_json_object
from tandem.api.http.guard import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH, caller
from tandem.common.config.router import RouterConfig
from tandem.errors import BadRequest
from tandem.router.scaling.adapters import AdapterControl

# vLLM's clients send the field `lora_int_id`, a number that vLLM's engine gives an adapter. Tandem
# accepts and ignores this field.
_LOAD = {"lora_name": str, "lora_path": str, "load_inplace": bool}
_UNLOAD = {"lora_name": str, "lora_int_id": int}
_TYPES: dict[type, str] = {str: "a string", bool: "true or false", int: "an integer"}


def add_adapter_routes(app: FastAPI, config: RouterConfig, control: AdapterControl) -> None:
    """Adds `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter` to the app."""

    @app.post(LOAD_ADAPTER_PATH)
    async def load(request: Request) -> Response:
        """Starts to serve an adapter. The answer is plain text, as in vLLM."""
        body = _checked(await read_json_object(request, config), _LOAD)
        name = body.get("lora_name")
        path = body.get("lora_path")
        if not name or not path:
            raise BadRequest(
                "Both 'lora_name' and 'lora_path' must be provided.",
                param="lora_path" if name else "lora_name",
            )
        loaded = await control.load(
            name,
            path,
            in_place=body.get("load_inplace", False),
            who=caller(request.scope),
        )
        lines = [f"Success: LoRA adapter '{name}' added successfully."]
        lines += [
            (f"Not loaded on {worker}: {why}") for worker, why in sorted(loaded.refused.items())
        ]
        return PlainTextResponse("\n".join(lines))

    @app.post(UNLOAD_ADAPTER_PATH)
    async def unload(request: Request) -> Response:
        """Stops serving an adapter. Requests that use it continue."""
        body = _checked(await read_json_object(request, config), _UNLOAD)
        if not (name := body.get("lora_name")):
            raise BadRequest("'lora_name' must be provided.", param="lora_name")
        await control.unload(name, who=caller(request.scope))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _checked(body: dict[str, Any], allowed: dict[str, type]) -> dict[str, Any]:
    """Checks the names and types of the body's fields, and returns the fields that are not null.
    Raises BadRequest for an unknown field or a wrong type."""
    for name, value in body.items():
        if name not in allowed:
            raise BadRequest(
                f"the body has the unknown field {name[:80]!r}; allowed are {', '.join(allowed)}",
                param=name[:80],
            )
        if value is not None and type(value) is not allowed[name]:
            raise BadRequest(f"{name} must be {_TYPES[allowed[name]]}", param=name)
    return {name: value for name, value in body.items() if value is not None}
