"""Two workers of one process, each with its engine: one has prompts, the other pulls over a link.

They serve benchmarks/tiers/prices.py. The link's bandwidth is the option --transfer-bandwidth of
the worker that pulls, so it is started anew for each. `PeerBench`: the other one has the prompt's
first blocks. `PeerTierBench`: it has them in a tier (slow_engine.py) and not in its pool.
`DecodeBench`: the other one is a prefill worker that has the prompt, and the worker that is asked
has it in a tier, which may be slower or faster than the link.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

from benchmarks.shared.requests import random_prompt
from benchmarks.tiers.slow_engine import BYTES_PER_S, STAYS
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import ClusterConfig, Role
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.common.worker_load import WorkerLoad
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.engine_process.program import start_program
from tandem.worker.lifecycle.servicer import Servicer
from tandem.worker.lifecycle.worker import Worker
from tandem.worker.prefill.prefix_choice import ConnectedHolder

BLOCK = 16
DEADLINE_S = 120.0
TIER_BYTES = 1 << 30
_PULLS = "tandem.worker.prefill.prefix_pull"
_START = "tandem.worker.engine_process.link.start_program"


class Running:
    """A worker and a router's stream to it, in this process."""

    def __init__(self, config: WorkerConfig) -> None:
        self.worker = Worker(config, Servicer)
        self._task = asyncio.create_task(self.worker.run())
        self._commands: asyncio.Queue[pb.DecodeCommand] = asyncio.Queue()
        self._token_ids: dict[str, list[int]] = {}
        self._wanted: dict[str, int] = {}
        self._made: dict[str, asyncio.Future[None]] = {}  # all tokens that were asked for
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._numbers = itertools.count()

    async def start(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.worker.state != "ready":
                assert not self._task.done(), self._task.exception()
                await asyncio.sleep(0.05)
        self._router = asyncio.create_task(self._route())

    async def ask(
        self, token_ids: list[int], num_tokens: int = 1, **more: Any
    ) -> tuple[float, int]:
        """Returns the milliseconds to the last of so many tokens, and that token."""
        loop = asyncio.get_running_loop()
        name = f"{self.worker.config.worker_id}-{next(self._numbers)}"
        made = self._made[name] = loop.create_future()
        self._token_ids[name], self._wanted[name] = [], num_tokens
        ended = self._ended[name] = loop.create_future()
        submit = pb.SubmitSequence(
            request_id=name,
            input=pb.SequenceInput(
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids),
                sampling=pb.Sampling(top_p=1.0),
                max_tokens=num_tokens,
            ),
            **more,
        )
        start = time.perf_counter()
        self._commands.put_nowait(pb.DecodeCommand(submit=submit))
        async with asyncio.timeout(DEADLINE_S):
            await made
            took_ms = 1e3 * (time.perf_counter() - start)
            await ended
        return took_ms, self._token_ids[name][-1]

    @property
    def identity(self) -> dict[str, str]:
        worker = self.worker
        return {
            "worker_id": worker.config.worker_id,
            "epoch": worker.epoch,
            "address": worker._address,
        }

    async def connect(self, peer: Running) -> None:
        """Has it read from a peer, which is else passed over, and connected beside."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.worker.rates.pairs:
                await self.worker.peers.get(**peer.identity)

    async def stop(self) -> None:
        self._router.cancel()
        self.worker.stop(0.0)
        await self._task

    async def _route(self) -> None:
        async def read() -> AsyncIterator[pb.DecodeCommand]:
            while True:
                yield await self._commands.get()

        async for message in self.worker.decode.serve(read(), WorkerLoad()):
            for update in message.sequences:
                name, made = update.request_id, self._made[update.request_id]
                self._token_ids[name] += update.token_ids
                if len(self._token_ids[name]) == self._wanted[name] and not made.done():
                    made.set_result(None)
                if update.finish_reason:
                    assert update.finish_reason == "length", update
                    self._ended[name].set_result(None)


@dataclass
class PeerBench:
    """A prompt is asked of a worker that has nothing of it, and a peer has it."""

    ways: ClassVar = ("soonest", "load", "compute")
    runner: asyncio.Runner
    redis: EmbeddedRedis
    num_blocks: int
    threads: int
    peer: Running | None = None
    asked: Running | None = None

    def start(self) -> None:
        self.peer = self._start("peer", TransferConfig(prefill_at="local"))

    def throttle(self, bytes_per_s: float) -> None:
        """Starts the worker that is asked anew, with such a link."""
        self._replace("asked", TransferConfig(prefill_at="local", bytes_per_s=bytes_per_s))

    def prepare(self, prompt: list[int]) -> None:
        """Has the peer compute the prompt."""
        assert self.peer is not None
        self.runner.run(self.peer.ask(prompt))

    def ask(self, prompt: list[int], way: str) -> tuple[float, int]:
        with _forced(way):
            return self.runner.run(self._ask(prompt, way))

    def close(self) -> None:
        for running in (self.asked, self.peer):
            if running is not None:
                self.runner.run(running.stop())

    async def _ask(self, prompt: list[int], way: str) -> tuple[float, int]:
        assert self.peer is not None
        assert self.asked is not None
        await self.asked.worker.link.reset_prefix_cache()
        num_blocks = (len(prompt) - 1) // BLOCK
        holder = pb.PrefixHolder(num_blocks=num_blocks, **self.peer.identity)
        return await self.asked.ask(prompt, prefix_holders=[holder] if way != "compute" else [])

    def _replace(self, worker_id: str, transfer: TransferConfig, **engine: Any) -> None:
        if self.asked is not None:
            self.runner.run(self.asked.stop())
        self.asked = self._start(worker_id, transfer, **engine)
        assert self.peer is not None
        self.runner.run(self.asked.connect(self.peer))

    def _start(
        self, worker_id: str, transfer: TransferConfig, role: Role = "decode", **engine: Any
    ) -> Running:
        settings = {"num_blocks": self.num_blocks, "num_threads": self.threads, **engine}
        config = WorkerConfig(
            role=role,
            cluster=ClusterConfig("prices", self.redis.url, "token"),
            engine=EngineConfig(model="smollm2", device="cpu", **settings),
            transfer=transfer,
            worker_id=worker_id,
        )

        async def start() -> Running:
            running = Running(config)
            await running.start()
            return running

        return self.runner.run(start())


class PeerTierBench(PeerBench):
    """A prompt is asked of a worker that has nothing of it, and a tier of a peer has it. The
    bandwidth is that of the tier."""

    tier: ClassVar[dict[str, Any]]

    def start(self) -> None:
        """Does nothing: `throttle` starts both."""

    def throttle(self, bytes_per_s: float) -> None:
        """Starts both workers anew, with such a tier."""
        self.close()
        self.asked = None
        os.environ |= {BYTES_PER_S: str(bytes_per_s), STAYS: "1"}
        with patch(_START, partial(start_program, "benchmarks.tiers.slow_engine")):
            local = TransferConfig(prefill_at="local")
            # Loads for peers take at most half of a pool.
            size = {"num_blocks": 2 * self.num_blocks}
            self.peer = self._start("peer", local, kv_tier_policy="lru", **self.tier, **size)
        del os.environ[STAYS]
        self._replace("asked", local)

    def prepare(self, prompt: list[int]) -> None:
        """Has the peer compute the prompt and write it to its tier."""
        assert self.peer is not None
        held = self._num_in_tier() + (len(prompt) - 1) // BLOCK
        super().prepare(prompt)
        self.runner.run(self._written(held))

    async def _written(self, num_blocks: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self._num_in_tier() < num_blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def _num_in_tier(self) -> int:
        assert self.peer is not None
        return sum(tier.blocks_held for tier in self.peer.worker._metrics.tiers)

    async def _ask(self, prompt: list[int], way: str) -> tuple[float, int]:
        assert self.peer is not None
        assert self.asked is not None
        await self.peer.worker.link.reset_prefix_cache()
        await self.asked.worker.link.reset_prefix_cache()
        num_blocks = (len(prompt) - 1) // BLOCK
        rates = self.peer.worker.rates.worker
        load_s = rates.load_queue_s + rates.tiers[0].seconds(num_blocks, rates.block_bytes)
        holder = pb.PrefixHolder(num_blocks=num_blocks, load_s=load_s, **self.peer.identity)
        return await self.asked.ask(prompt, prefix_holders=[holder] if way != "compute" else [])


class PeerHostBench(PeerTierBench):
    tier: ClassVar = {"kv_host_bytes": TIER_BYTES}


class PeerDiskBench(PeerTierBench):
    def throttle(self, bytes_per_s: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            # The worker keeps its files open after the folder is gone.
            self.tier = {"kv_disk_path": folder, "kv_disk_bytes": TIER_BYTES}
            super().throttle(bytes_per_s)


class DecodeBench(PeerBench):
    """A prompt is asked of a decode worker that has it in its tier, and a prefill worker has it in
    its pool: it comes from the tier, or from the prefill worker, whichever is sooner. The second
    token is measured, as the first one of the prefill worker does not wait for the link."""

    ways: ClassVar = ("soonest", "load", "elsewhere")

    def start(self) -> None:
        self.peer = self._start("peer", TransferConfig(), role="prefill")

    def throttle_both(self, tier_bytes_per_s: float, bytes_per_s: float) -> None:
        """Starts the decode worker anew, with such a tier and such a link."""
        module = "benchmarks.tiers.slow_engine"
        os.environ[BYTES_PER_S] = str(tier_bytes_per_s)
        with patch(_START, partial(start_program, module)):
            tier = {"kv_host_bytes": TIER_BYTES, "kv_tier_policy": "lru"}
            self._replace("asked", TransferConfig(bytes_per_s=bytes_per_s), **tier)

    def prepare(self, prompt: list[int]) -> None:
        """Has both compute the prompt, the prefill worker for the other one."""
        for way in ("elsewhere", "load", "elsewhere"):
            self.ask(prompt, way)

    async def _ask(self, prompt: list[int], way: str) -> tuple[float, int]:
        assert self.peer is not None
        assert self.asked is not None
        if way == "elsewhere":  # and nowhere else: the tiers forget it, too
            await self.asked.worker.link.reset_prefix_cache()
        else:  # it leaves the pool, and is in the tier
            rng = Random()
            for _ in range(2):
                await self.asked.ask(random_prompt(rng, self.num_blocks * BLOCK // 2))
        cached = (len(prompt) - 1) // BLOCK
        peer = pb.PrefillCandidate(cached_blocks=cached, **self.peer.identity)
        candidates = [peer] if way != "load" else []
        return await self.asked.ask(prompt, 2, prefill_candidates=candidates)


@contextmanager
def peer_bench(
    num_blocks: int, threads: int, kind: type[PeerBench] = PeerBench
) -> Iterator[PeerBench]:
    """Runs both workers."""
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        bench = kind(stack.enter_context(asyncio.Runner()), redis, num_blocks, threads)
        stack.callback(bench.close)
        bench.start()
        yield bench


@contextmanager
def _forced(way: str) -> Iterator[None]:
    if way != "load":
        yield
        return
    with (
        patch(f"{_PULLS}.holders_worth_using", _all_with_more),
        patch(f"{_PULLS}.PrefixPuller._load_s_max", lambda *_: DEADLINE_S),
        patch(f"{_PULLS}._DEADLINE_MIN_S", DEADLINE_S),
    ):
        yield


def _all_with_more(
    holders: Iterable[ConnectedHolder], *, block_size: int, num_cached_blocks: int, **_: Any
) -> list[ConnectedHolder]:
    return [each for each in holders if each.num_tokens > num_cached_blocks * block_size]
