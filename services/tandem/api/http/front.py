"""The front of the HTTP API: what holds for every call, before the guard looks at it.

HEAD          A call of the method HEAD is answered as a GET; the server leaves the body out.
x-request-id  Every answer has one. A client that sends its own gets it back and finds the request
              by it; the router has an id of its own for each request, so two clients may use one.
              Anthropic's clients read it as request-id.
CORS          Browsers let pages of the origins in `--cors-origins` call the routes that a user's
              key may call. A preflight carries no key, so it is answered here, before the guard.
              Operators' routes, metrics and keys never allow another origin.
connection    The answers of a router that leaves close their connections, so that clients that keep
              connections connect to another router.
"""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.api.anthropic.errors import is_anthropic
from tandem.api.http.guard import public_need
from tandem.common.config.router import RouterConfig
from tandem.router.placement.reasons import PLACEMENT_HEADER
from tandem.router.request.generator import Generator
from tandem.router.request.request import REQUEST_ID_HEADER, read_client_id

# Beside those that a page may always read.
_IDS = (REQUEST_ID_HEADER, "request-id")
_EXPOSED = (*_IDS, "retry-after", "server-timing", "warning", PLACEMENT_HEADER)


class Front:
    """ASGI middleware around the guard. Sets `request_id` and `client_id` of a request's state."""

    def __init__(self, app: ASGIApp, config: RouterConfig, generator: Generator) -> None:
        self._app = self._shared = app
        self._generator = generator
        if config.cors_origins:
            self._shared = CORSMiddleware(
                app,
                allow_origins=config.cors_origins,
                allow_methods=("GET", "HEAD", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=_EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = read_client_id(Headers(scope=scope).getlist(REQUEST_ID_HEADER))
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, client_id=client_id)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = client_id or request_id
                if is_anthropic(scope):
                    headers["request-id"] = client_id or request_id
                if self._generator.end_reason:
                    headers["connection"] = "close"
            await send(message)

        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the server looks at the original
        app = self._shared if public_need(scope["path"]) == "user" else self._app
        await app(scope, receive, send_named)
