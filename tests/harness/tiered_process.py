"""A real engine process with a small pool and storage tiers, and prompts for it."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.common.worker_load import WorkerLoad
from tandem.engine.types import EngineStats, NewTokens, TierStats
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.messages import Add, Event, Report
from tandem.worker.engine_process.program import ENGINE_MODULE, start_program
from tests.engine_driver import make_spec

DEADLINE_S = 240.0
PROMPTS = [[(n * 7 + i * 13) % 60 + 2 for i in range(70)] for n in range(8)]


class Process:
    """An engine process with a pool of 16 blocks, in which two of the prompts fit."""

    def __init__(
        self,
        model: str,
        folder: Path | None,
        *,
        disk_bytes: int = 1 << 34,
        engine_module: str = ENGINE_MODULE,
        **settings: str,
    ) -> None:
        """`settings` are additional engine settings. By default the tiers store all blocks."""
        settings.setdefault("kv_tier_policy", "lru")
        self._engine_module = engine_module
        self._config = WorkerConfig(
            role="decode",
            cluster=ClusterConfig(cluster_id="c", redis_url="redis://localhost", token="t"),
            engine=EngineConfig(
                model=model,
                device="cpu",
                num_blocks=16,
                kv_disk_path="" if folder is None else str(folder),
                kv_disk_bytes=disk_bytes,
                **settings,  # type: ignore[arg-type]
            ),
            transfer=TransferConfig(),
            worker_id="w",
        )
        self._ends: dict[str, asyncio.Future[NewTokens]] = {}
        self._token_ids: dict[str, list[int]] = {}
        self._reports: asyncio.Queue[EngineStats] = asyncio.Queue()
        self.load = WorkerLoad()
        self.stats = EngineStats()

    async def start(self) -> None:
        program = await start_program(self._engine_module)
        self._link = EngineLink(self._config, "1", self._on_event, program)
        try:
            ready = await self._link.start()
        except BaseException:
            # otherwise its sockets would block the garbage collection of their context
            await self._link.stop()
            raise
        self.sizes = [size for _, size in ready.spans.pools]  # bytes of a block in each KV group

    @property
    def tier(self) -> TierStats:
        return self.stats.tiers[0]

    async def answer(self, name: str, prompt: list[int]) -> tuple[list[int], int]:
        """Generates an answer. Returns its tokens and the number of cached prompt tokens. Raises
        ConnectionError if the process is killed."""
        end = self._ends[name] = asyncio.get_running_loop().create_future()
        self._token_ids[name] = []
        self._link.send(Add(make_spec(name, prompt)))
        num_cached = (await end).num_cached_tokens
        return self._token_ids[name], num_cached

    async def wait_for_writes(self, num_blocks: int) -> None:
        while (await self._reports.get()).tiers[0].blocks_written < num_blocks:
            pass

    async def check_idle(self) -> None:
        """Checks that all pools are intact and nothing is held."""
        assert await self._link.check_integrity() == ""
        while self.stats.blocks_leaving:
            assert await self._link.check_integrity() == ""
        load = self.load
        held = load.num_running, load.num_waiting, load.num_pulls, load.num_leases
        assert held == (0, 0, 0, 0)
        assert (load.blocks_used, load.blocks_quarantined) == (0, 0)

    def limit_files(self, num_bytes: int) -> None:
        """Limits the size of files that the process may write."""
        assert self._link._process is not None
        limit = (num_bytes, resource.RLIM_INFINITY)
        resource.prlimit(self._link._process.pid, resource.RLIMIT_FSIZE, limit)

    async def kill(self) -> None:
        for end in list(self._ends.values()):
            if not end.done():
                end.set_exception(ConnectionError("the process is killed"))
        self._link.kill("the test kills it")
        await self._link.stop()

    async def stop(self) -> None:
        await self._link.stop()

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, Report):
            return
        self.load = event.step.load
        self.stats = event.step.stats
        self._reports.put_nowait(self.stats)
        assert not event.step.failed
        for new in event.step.new_tokens:
            self._token_ids[new.sequence_id] += new.token_ids
            end = self._ends[new.sequence_id]
            if new.finish_reason and not end.done():
                end.set_result(new)
