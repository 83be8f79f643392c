"""Error responses in the format of the API that was called: Anthropic's, Ollama's or OpenAI's.

Once a stream has started, an error is sent as the last event of the stream. Tandem does not send
`[DONE]` after the error as vLLM does, because `[DONE]` means that the answer is complete. OpenAI's
clients stop reading at the error event.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from tandem.api.anthropic import errors as anthropic
from tandem.api.http.body import TOO_DEEP
from tandem.api.ollama import errors as ollama
from tandem.api.openai import errors as openai
from tandem.errors import BadRequest, InternalError, TandemError


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: TandemError, scope: Scope | None = None) -> Response:
    """Builds the response to a failed call. If `scope` is None, the response has OpenAI's
    format."""
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_whole_s)
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"  # required by RFC 6750
    if error.http_status in (408, 413):
        headers["connection"] = "close"
    if scope is not None and anthropic.is_anthropic(scope):
        return JsonResponse(anthropic.error_body(error), anthropic.status_of(error), headers)
    if scope is not None and ollama.is_ollama(scope):
        return JsonResponse(ollama.error_body(error), error.http_status, headers)
    return JsonResponse(openai.error_body(error), error.http_status, headers)


def hidden(error: Exception) -> InternalError:
    """Returns what a client gets to see of a bug: only the type of the exception."""
    return InternalError(
        f"an internal error of the router ({type(error).__name__}); the router's log shows "
        "the cause"
    )


def install_handlers(app: FastAPI) -> None:
    """Installs exception handlers, so that all errors have the same format."""

    async def on_tandem(request: Request, error: Exception) -> Response:
        assert isinstance(error, TandemError)
        return error_response(error, request.scope)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code
        headers = dict(error.headers or {})
        if status == 405:
            headers["Allow"] = ", ".join(_allowed_methods(request))
        code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
        plain_error: Callable[[int, str, str], dict[str, Any]] = openai.plain_error
        if anthropic.is_anthropic(request.scope):
            plain_error = anthropic.plain_error
        elif ollama.is_ollama(request.scope):
            plain_error = ollama.plain_error
        message = _not_served(request) if status == 404 else str(error.detail)
        return JsonResponse(plain_error(status, message, code), status, headers)

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # the client has disconnected

    async def on_depth(request: Request, _: Exception) -> Response:
        # Parsers and encoders call themselves for each level of a body.
        return error_response(BadRequest(TOO_DEEP), request.scope)

    async def on_bug(request: Request, error: Exception) -> Response:
        # Starlette raises the exception again after this response, and the server then logs it.
        return error_response(hidden(error), request.scope)

    app.add_exception_handler(TandemError, on_tandem)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_gone)
    app.add_exception_handler(RecursionError, on_depth)
    app.add_exception_handler(Exception, on_bug)


def _not_served(request: Request) -> str:
    """Builds the message for an unknown path. A client may have added /v1 twice or not at all, or
    slashes. If the path without this mistake is served, the message suggests it."""
    path: str = request.scope["path"]
    if ollama.is_ollama(request.scope):
        return (
            f"the path {path[:80]!r} is not served here. --ollama-api serves a part of Ollama's API"
        )
    plain = re.sub("/{2,}", "/", path).rstrip("/")
    others = (plain, plain.removeprefix("/v1") if plain.startswith("/v1/v1/") else f"/v1{plain}")
    for meant in others:
        scope = {**request.scope, "path": meant}
        if meant != path and any(r.matches(scope)[0] is not Match.NONE for r in request.app.routes):
            return f"the path {path[:80]!r} is not served here; use {meant[:80]}"
    return f"the path {path[:80]!r} is not served here"


def _allowed_methods(request: Request) -> list[str]:
    """Returns the HTTP methods of all routes with the request's path. Starlette's own error for a
    wrong method names the methods of only one of these routes."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found | {"HEAD"} if "GET" in found else found)
