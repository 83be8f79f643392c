"""Middleware that handles every call of the public HTTP API before access is checked.

HEAD          A HEAD call is answered like a GET; the server omits the body.
x-request-id  Every response has this header. The value is the client's own id if the client sent
              one, else a new id. The record of a request can be found by this id. The router also
              has an internal id for each request, so clients may reuse their ids. Anthropic's
              clients read `request-id` instead.
CORS          Web pages of `--cors-origins` may call the routes that need a user's key. CORS
              preflights have no key, so they are answered here, before the access check.
              Operators' routes, metrics and keys never allow calls of another origin.
connection    A router that is shutting down closes each connection after its response, so that
              clients reconnect to another router.
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

# response headers that web pages may read in addition to the headers that CORS always allows
_IDS = (REQUEST_ID_HEADER, "request-id")
_EXPOSED = (*_IDS, "retry-after", "server-timing", "warning", PLACEMENT_HEADER)


class Front:
    """ASGI middleware that runs before the access checks of PublicGuard. It sets `request_id` and
    `client_id` in the request's state."""

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
            # The scope is copied, because the server needs the original method.
            scope = {**scope, "method": "GET"}
        app = self._shared if public_need(scope["path"]) == "user" else self._app
        await app(scope, receive, send_named)
