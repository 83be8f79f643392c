"""A cluster of sleeping engines (`sleeping_engine.py`), its load and its size.

`tandem up` with Ray, Redis and a router runs as it does for everybody; only its workers' engines
sleep instead of computing.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.autoscaler.sleeping_engine import AUTOSCALE, GPU, GPUS, LOAD_S, MODULE
from benchmarks.shared.chats import Chat, Seen, ask
from benchmarks.shared.cluster import ROOT, Cluster, up
from benchmarks.shared.random_models import make_tiny_model
from benchmarks.shared.requests import client_of
from tandem.common.config.autoscale import AutoscaleConfig

SIZES_EVERY_S = 0.25
SMALLEST_DEADLINE_S = 900.0


def sizes_of(state: dict[str, Any]) -> dict[str, int]:
    """Returns the processes of each pool, which are paid for from start to end."""
    pools = state["pools"]
    return {role: len(pools.get(role, {}).get("agents", ())) for role in ("prefill", "decode")}


@dataclass
class SizeWatch:
    """Notes the size of the pools while it is entered."""

    cluster: Cluster
    worker_s: float = 0.0
    changes: list[tuple[float, int, int]] = field(default_factory=list)  # s, prefill, decode
    began: float = field(default_factory=time.perf_counter)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> SizeWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    async def until(self, size: tuple[int, int]) -> float:
        """Returns when the pools had this size, drained workers gone."""
        async with asyncio.timeout(SMALLEST_DEADLINE_S):
            while not self.changes or self.changes[-1][1:] != size:
                self._changed.clear()
                await self._changed.wait()
        return self.changes[-1][0]

    async def _watch(self) -> None:
        async with httpx.AsyncClient(timeout=10) as client:
            last_s = self.seconds()
            while True:
                reply = await client.get(f"{self.cluster.admin_url}/v1/cluster")
                sizes, now_s = sizes_of(reply.json()), self.seconds()
                self.worker_s += (now_s - last_s) * sum(sizes.values())
                last_s = now_s
                if not self.changes or self.changes[-1][1:] != tuple(sizes.values()):
                    self.changes.append((round(now_s, 1), sizes["prefill"], sizes["decode"]))
                    self._changed.set()
                await asyncio.sleep(SIZES_EVERY_S)


@contextmanager
def running(
    gpu: str,
    *,
    prefill: int,
    decode: int,
    ttft_limit_s: float,
    load_s: float = 0.0,
    autoscale: AutoscaleConfig | None = None,
) -> Iterator[Cluster]:
    """Runs a cluster of sleeping engines."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder)).path  # its KV is what travels
        options = ["--model", str(model), "--prefill", str(prefill), "--decode", str(decode)]
        options += ["--num-blocks", str(GPUS[gpu].kv_tokens // 16), "--dtype", "bfloat16"]
        options += ["--ttft-limit", str(ttft_limit_s)]
        environment = {GPU: gpu, LOAD_S: str(load_s)}
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'services'}:{ROOT / 'kernels'}"
        if autoscale is not None:
            environment[AUTOSCALE] = json.dumps(asdict(autoscale))
        with up(*options, environment=environment, program=("-m", MODULE)) as cluster:
            yield cluster


async def replay(cluster: Cluster, chats: Sequence[Chat], began: float) -> list[Seen]:
    """Sends each chat at its time, whether the cluster keeps up or not."""

    async def one(client: httpx.AsyncClient, chat: Chat) -> Seen:
        await asyncio.sleep(max(0.0, chat.at_s - (time.perf_counter() - began)))
        return await ask(client, chat, began=began)

    async with client_of(cluster.url) as client:
        return list(await asyncio.gather(*(one(client, chat) for chat in chats)))


async def first_token_from_zero(cluster: Cluster, chat: Chat) -> dict[str, float]:
    """Sends a chat to empty pools. Returns its TTFT, and the start of the decode worker: from its
    process to its record as ready."""
    asking = asyncio.create_task(replay(cluster, [chat], time.perf_counter()))
    sent_at = time.time()
    spawned_at = ready_at = 0.0
    async with httpx.AsyncClient(timeout=10) as client:
        while not ready_at and not asking.done():
            state = (await client.get(f"{cluster.admin_url}/v1/cluster")).json()
            agents = state["pools"].get("decode", {}).get("agents", ())
            running = [a["since"] for a in agents if a["state"] == "running"]
            spawned_at = spawned_at or min(running, default=0.0)
            workers = [w for w in state["workers"] if w["role"] == "decode"]
            if any(w["state"] == "ready" for w in workers):
                ready_at = time.time()
            await asyncio.sleep(0.02)
    (seen,) = await asking
    assert seen.status == 200, seen
    assert not seen.error, seen
    start_s = (ready_at or time.time()) - spawned_at
    return {
        "ttft_s": seen.ttft_s,
        "until_process_s": spawned_at - sent_at,
        "start_s": start_s,
        "more_s": seen.ttft_s - start_s,
    }
