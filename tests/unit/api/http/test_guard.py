"""The calls that the guard admits to a router that listens on more than loopback."""

from __future__ import annotations

import pytest
from starlette.types import Message, Receive, Scope, Send

from tandem.api.http.guard import AdminGuard, PublicGuard, RequestGuard
from tandem.common.config.admin import AdminOptions
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import RouterConfig
from tandem.net.security.access import Access, is_loopback
from tandem.net.security.audit_trail import AuditTrail
from tandem.net.security.key_ring import KeyRing
from tandem.net.store.client import connect


async def status(
    guard: type[RequestGuard], bound: str, reached: str, host: str, path: str, allowed: str = ""
) -> int:
    """`bound`: the router's own host; `reached`: the address that the connection came in over."""
    config = RouterConfig(
        cluster=ClusterConfig("c", "redis://localhost", "token"),
        model="m",
        served_model_name="m",
        host=bound,
        admin=AdminOptions(host=bound),
        allowed_hosts=(allowed,),
    )
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("the guard reads no body")

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "server": (reached, 8000),
        "client": ("192.0.2.1", 1),
        "headers": [(b"host", host.encode())],
    }
    ring = KeyRing()
    ring.synced_at = 0.0
    access = Access(ring, is_loopback=is_loopback(bound), allows_anonymous=True)
    trail = AuditTrail(connect("redis://localhost"), "c", router_id="r")
    await guard(app, config, access, trail)(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("guard", "bound", "reached", "host", "path", "expected"),
    [
        (AdminGuard, "0.0.0.0", "10.1.2.3", "tandem.prod.svc:8002", "/v1/cluster", 200),  # a pod
        (PublicGuard, "0.0.0.0", "10.1.2.3", "10.1.2.3:8000", "/ready", 200),  # a probe
        (AdminGuard, "0.0.0.0", "127.0.0.1", "localhost:9000", "/v1/cluster", 200),  # a forward
        (PublicGuard, "0.0.0.0", "127.0.0.1", "tandem.svc", "/v1/completions", 200),  # a sidecar
        (AdminGuard, "0.0.0.0", "127.0.0.1", "evil.example", "/v1/cluster/workers", 403),
        (AdminGuard, "::", "::ffff:127.0.0.1", "evil.example", "/", 403),
        (PublicGuard, "localhost", "127.0.0.1", "evil.example", "/health", 403),
        (PublicGuard, "::1", "::1", "evil.example", "/health", 403),
        (AdminGuard, "::1", "::1", "[::1]:8002", "/v1/cluster", 200),
        (AdminGuard, "127.0.0.1", "127.0.0.1", "proxy.example", "/v1/cluster", 200),  # allowed
        (PublicGuard, "127.0.0.1", "127.0.0.1", "localhost", "/v1/cluster", 404),
        (PublicGuard, "0.0.0.0", "10.1.2.3", "10.1.2.3:8000", "/", 404),
    ],
)
async def test_hosts(
    guard: type[RequestGuard], bound: str, reached: str, host: str, path: str, expected: int
) -> None:
    assert await status(guard, bound, reached, host, path, allowed="proxy.example") == expected
