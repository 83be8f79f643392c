"""Counts the calls of the public HTTP API by route and status, and measures their duration."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.router.metrics.router import Metrics

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_CLIENT_GONE = 499  # status, as in nginx, of a call whose client disconnected before the answer


class HttpMetrics:
    """ASGI middleware that counts calls and measures their duration.

    A call ends when the last byte of the answer was sent. Labels have only values from fixed lists
    (such as the paths of routes), so clients cannot create new time series.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, uncounted: tuple[str, ...]) -> None:
        """Calls of the paths in `uncounted`, such as health probes, are not counted."""
        self._app = app
        self._metrics = metrics
        self._uncounted = uncounted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._uncounted:
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        status = _CLIENT_GONE

        async def send_seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        except Exception:
            status = 500
            raise
        finally:
            self._count(scope, status, time.monotonic() - began_s)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        handler = getattr(scope.get("route"), "path", "none")
        labels = {"method": method, "handler": handler}
        self._metrics.http_requests.labels(**labels, status=f"{status // 100}xx").inc()
        self._metrics.http_request_duration_s.labels(**labels).observe(seconds)
