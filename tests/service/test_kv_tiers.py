"""A real engine process with a tier on disk that is killed, and what the next one finds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tandem.config.cluster import ClusterConfig
from tandem.config.engine import EngineConfig
from tandem.config.transfer import TransferConfig
from tandem.config.worker import WorkerConfig
from tandem.engine.types import EngineLoad, NewTokens
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.messages import Add, Event, Report
from tests.engine_driver import make_spec
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.service

DEADLINE_S = 240.0
PROMPTS = [[(n * 7 + i * 13) % 60 + 2 for i in range(70)] for n in range(8)]


class Process:
    """An engine process with a pool of 16 blocks, in which two of the prompts fit."""

    def __init__(self, model: Path, folder: Path | None) -> None:
        self._config = WorkerConfig(
            role="decode",
            cluster=ClusterConfig(cluster_id="c", redis_url="redis://localhost", token="t"),
            engine=EngineConfig(
                model=str(model),
                device="cpu",
                num_blocks=16,
                kv_disk_path="" if folder is None else str(folder),
            ),
            transfer=TransferConfig(),
            worker_id="w",
        )
        self._ends: dict[str, asyncio.Future[NewTokens]] = {}
        self._token_ids: dict[str, list[int]] = {}
        self._loads: asyncio.Queue[EngineLoad] = asyncio.Queue()

    async def start(self) -> None:
        self._link = EngineLink(self._config, "1", self._on_event)
        await self._link.start()

    async def answer(self, name: str, prompt: list[int]) -> tuple[list[int], int]:
        """Returns the tokens that follow, and how many tokens of the prompt were cached."""
        self._ends[name] = asyncio.get_running_loop().create_future()
        self._token_ids[name] = []
        self._link.send(Add(make_spec(name, prompt)))
        end = await self._ends[name]
        return self._token_ids[name], end.num_cached_tokens

    async def wait_for_writes(self, num_blocks: int) -> None:
        while (await self._loads.get()).tiers[0].blocks_written < num_blocks:
            pass

    async def whole(self) -> None:
        assert await self._link.check_integrity() == ""

    async def kill(self) -> None:
        self._link.kill("the test kills it")
        await self._link.stop()

    async def stop(self) -> None:
        await self._link.stop()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Report):
            self._loads.put_nowait(event.report.load)
            for new in event.report.new_tokens:
                self._token_ids[new.sequence_id] += new.token_ids
                if new.finish_reason:
                    self._ends[new.sequence_id].set_result(new)


async def test_a_killed_engines_blocks_are_found_by_the_next(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "kv"
    make_tiny_model("llama", model)
    async with asyncio.timeout(DEADLINE_S):
        plain = Process(model, None)
        await plain.start()
        expected = [(await plain.answer(str(n), p))[0] for n, p in enumerate(PROMPTS)]
        await plain.stop()
        first = Process(model, folder)
        await first.start()
        for number, prompt in enumerate(PROMPTS):
            assert (await first.answer(str(number), prompt))[0] == expected[number]
        await first.wait_for_writes(20)
        await first.kill()
        second = Process(model, folder)
        await second.start()
        found = [await second.answer(str(n), p) for n, p in enumerate(PROMPTS)]
        await second.whole()
        await second.stop()
    assert [tokens for tokens, _ in found] == expected
    assert sum(num_cached for _, num_cached in found) > 0  # how many depends on measured rates
