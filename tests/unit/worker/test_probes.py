"""The probes' answers over HTTP, with an event loop that turns and with one that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import httpx
import pytest

from tandem.common.worker_load import WorkerLoad
from tandem.net.bounded_server import CALLS_AT_ONCE
from tandem.worker.metrics import probes
from tandem.worker.metrics.probes import Probes
from tandem.worker.metrics.worker import WorkerMetrics


class Served:
    """Probes on a real port, with a state that tests set and the engine's questions."""

    def __init__(self) -> None:
        self.state = "ready"
        self.asked: asyncio.Queue[None] = asyncio.Queue()
        self.probes = Probes(lambda: self.state, lambda: self.asked.put_nowait(None))
        metrics = WorkerMetrics(worker_id="p0", role="prefill")
        port = metrics.serve("127.0.0.1", 0, WorkerLoad, dict, self.probes)
        self.address = ("127.0.0.1", port)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}")

    def get(self, path: str) -> tuple[int, str]:
        reply = self._client.get(path)
        return reply.status_code, reply.text


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setattr(probes, "_TURN_S", 0.01)
    monkeypatch.setattr(probes, "ASK_INTERVAL_S", 0.03)
    return Served()


def test_a_worker_that_drains_is_healthy_and_not_ready(served: Served) -> None:
    assert served.get("/ready") == (200, "ok\n")
    served.state = "draining"
    assert served.get("/ready") == (503, "the worker is draining\n")
    assert served.get("/health") == (200, "ok\n")
    assert "tandem_blocks_used" in served.get("/metrics")[1]


def test_silent_connections_cost_no_thread(served: Served) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as opened:
        for _ in range(300):
            sock = opened.enter_context(socket.create_connection(served.address, timeout=5))
            sock.sendall(b"GET /health HTTP/1.1\r\n")
        give_up_at = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.TransportError):
                assert served.get("/ready") == (200, "ok\n")
                break
            assert time.monotonic() < give_up_at
        assert threading.active_count() - before <= CALLS_AT_ONCE


async def test_a_loop_that_stands_still_is_seen(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "LOOP_HANG_S", 0.2)
    turning = asyncio.create_task(served.probes.turn_for_ever())
    for _ in range(3):
        await asyncio.sleep(0.15)
        assert served.probes.unhealthy_reason() == ""
    turning.cancel()
    await asyncio.sleep(0.3)
    status, reason = served.get("/health")
    assert status == 503
    assert reason.startswith("the event loop has been blocked")


async def test_an_idle_engine_is_asked_now_and_then(served: Served) -> None:
    turning = asyncio.create_task(served.probes.turn_for_ever())
    async with asyncio.timeout(5):
        for _ in range(3):
            await served.asked.get()
    turning.cancel()
