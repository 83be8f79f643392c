"""Middleware that handles every call of the public HTTP API before the API key is checked.

HEAD          A HEAD call is answered like a GET, and the server omits the body.
x-request-id  Every response has this header (for Anthropic's clients also `request-id`). The value
              is the client's own id, or a new id if the client sent none. Operators find the record
              of a request by this value. Clients may use an id twice, because the router also has
              an internal id for each request.
CORS          Web pages of `--cors-origins` may call the routes that need a user's key. A browser
              first sends a preflight (OPTIONS), which has no key and is therefore answered here.
              The routes for operators, metrics and keys allow no web page of another origin.
connection    A router that is shutting down closes each connection after the response, so that the
              client connects to another router.
"""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.api.anthropic.errors import is_anthropic
from tandem.api.http.guard import public_need
from tandem.common.config.router import RouterConfig
from tandem.router.placement.reasons import PLACEMENT_HEADER
from tandem.router.request.models import Models
from tandem.router.request.request import REQUEST_ID_HEADER, read_client_id

# response headers that scripts of web pages may read, in addition to those that CORS always allows
_IDS = (REQUEST_ID_HEADER, "request-id")
_EXPOSED = (*_IDS, "retry-after", "server-timing", "warning", PLACEMENT_HEADER)


class Front:
    """ASGI middleware that runs before the access checks of PublicGuard. It stores `request_id` and
    `client_id` in the state of the call's ASGI scope."""

    def __init__(self, app: ASGIApp, config: RouterConfig, models: Models) -> None:
        self._app = self._shared = app
        self._models = models
        if config.cors_origins:
            self._shared = CORSMiddleware(
                app,
                allow_origins=config.cors_origins,
                allow_methods=("GET", "HEAD", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=_EXPOSED,
                # Browsers ask for this if a public page calls a router in a private network.
                allow_private_network=True,
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
                if self._models.first.end_reason:
                    headers["connection"] = "close"
            await send(message)

        if scope["method"] == "HEAD":
            # The server omits the body if the original scope says HEAD. So the app gets a changed
            # copy.
            scope = {**scope, "method": "GET"}
        app = self._shared if public_need(scope["path"]) == "user" else self._app
        await app(scope, receive, send_named)
