"""The calls that the guard admits to a router that listens on more than loopback."""

from __future__ import annotations

import pytest
from starlette.types import Message, Receive, Scope, Send

from tandem.config.cluster import ClusterConfig
from tandem.config.router import RouterConfig
from tandem.router.api.http.guard import RequestGuard
from tandem.security.access import Access, is_loopback
from tandem.security.key_ring import KeyRing


async def status(bound: str, reached: str, host: str, path: str, allowed: str = "") -> int:
    """`bound`: the router's own host; `reached`: the address that the connection came in over."""
    config = RouterConfig(
        cluster=ClusterConfig("c", "redis://localhost", "token"),
        model="m",
        served_model_name="m",
        host=bound,
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
    await RequestGuard(app, config, access)(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("bound", "reached", "host", "path", "expected"),
    [
        ("0.0.0.0", "10.1.2.3", "tandem.prod.svc:8000", "/v1/cluster", 200),  # in a cluster
        ("0.0.0.0", "10.1.2.3", "10.1.2.3:8000", "/ready", 200),  # a probe
        ("0.0.0.0", "127.0.0.1", "localhost:9000", "/v1/cluster", 200),  # kubectl port-forward
        ("0.0.0.0", "127.0.0.1", "tandem.prod.svc", "/v1/completions", 200),  # a sidecar
        ("0.0.0.0", "127.0.0.1", "evil.example", "/v1/cluster/workers", 403),
        ("::", "::ffff:127.0.0.1", "evil.example", "/", 403),
        ("localhost", "127.0.0.1", "evil.example", "/health", 403),
        ("::1", "::1", "evil.example", "/health", 403),
        ("::1", "::1", "[::1]:8000", "/v1/cluster", 200),
        ("127.0.0.1", "127.0.0.1", "proxy.example", "/v1/cluster", 200),  # an allowed name
    ],
)
async def test_hosts(bound: str, reached: str, host: str, path: str, expected: int) -> None:
    assert await status(bound, reached, host, path, allowed="proxy.example") == expected
