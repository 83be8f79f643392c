"""Builds `/openapi.json`: FastAPI's document, with the schemas of request bodies.

Tandem's routes read and parse request bodies themselves, to limit size and time. So FastAPI does
not know the schemas of the bodies, and this module adds them.
"""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="name of the invalid field")
    code: str
    retry_after_s: int | None = Field(None, description="present only if a retry may help")


class ErrorReply(BaseModel):
    """The body of every error of every route, as `api/http/errors.py` builds it."""

    error: ErrorDetail


def body_route(*bodies: type[BaseModel]) -> dict[str, Any]:
    """Builds the arguments of a FastAPI route decorator, for a route that takes one of `bodies`."""
    references = [{"$ref": _REF.format(model=body.__name__)} for body in bodies]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    content = {"application/json": {"schema": schema}}
    return {"openapi_extra": {"requestBody": {"content": content, "required": True}}}


def generation_route(*bodies: type[BaseModel]) -> dict[str, Any]:
    """Builds the arguments of a FastAPI route decorator, for a route that takes one of `bodies` and
    may answer with a stream."""
    return {
        **body_route(*bodies),
        "responses": {200: {"description": "The answer", "content": {"text/event-stream": {}}}},
    }


def add_schemas(app: FastAPI, *bodies: type[BaseModel]) -> None:
    """Adds the schemas of the bodies, and of all models that they use, to the app's document."""
    _, schemas = models_json_schema([(b, "validation") for b in bodies], ref_template=_REF)
    document_routes = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            components = document_routes().setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas["$defs"])
        return document_routes()

    app.openapi = openapi  # type: ignore[method-assign]
