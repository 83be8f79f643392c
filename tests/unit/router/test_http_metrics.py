"""Calls of the public HTTP API in the router's metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import Response, StreamingResponse

from tandem.router.metrics.http import HttpMetrics
from tandem.router.metrics.router import Metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def client(metrics: Metrics) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.add_middleware(HttpMetrics, metrics=metrics, uncounted=("/health",))

    @app.get("/v1/requests/{name}")
    async def request(name: str) -> Response:
        return Response(name)

    @app.get("/stream")
    async def stream() -> Response:
        return StreamingResponse(iter(["a", "b"]))

    @app.get("/bug")
    async def bug() -> Response:
        raise RuntimeError("bug")

    @app.get("/health")
    async def health() -> Response:
        return Response()

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


def counted(metrics: Metrics) -> dict[tuple[str, str, str], float]:
    return {
        (s.labels["method"], s.labels["handler"], s.labels["status"]): s.value
        for family in metrics.http_requests.collect()
        for s in family.samples
        if s.name.endswith("_total")
    }


async def test_calls_count_by_route_and_class_of_status(
    client: httpx.AsyncClient, metrics: Metrics
) -> None:
    for path in ("/v1/requests/a", "/v1/requests/b", "/stream", "/bug", "/nowhere/1", "/health"):
        await client.get(path)
    await client.request("DELETE", "/stream")
    await client.request("BREW", "/nowhere/2")
    assert counted(metrics) == {
        ("GET", "/v1/requests/{name}", "2xx"): 2,
        ("GET", "/stream", "2xx"): 1,
        ("GET", "/bug", "5xx"): 1,
        ("GET", "none", "4xx"): 1,
        ("DELETE", "/stream", "4xx"): 1,
        ("other", "none", "4xx"): 1,
    }
