"""Ranks whose KV pools are apart, as on GPUs. Rank 1 is a thread of this process, on the CPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.cache.layout.pool_bytes import pool_bytes
from tandem.engine.executor import rank_program
from tandem.engine.executor import runner as runner_module
from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.rank_program import Member
from tandem.engine.executor.ranks import messages
from tandem.engine.executor.runner import ModelRunner, choose_device
from tandem.engine.scheduler.batch import StepBatch
from tandem.errors import ConfigError, InternalError
from tandem.models.folder import ModelFolder
from tandem_kernels.native.library import RankEnded
from tests.step_batches import mixed_steps, place
from tests.unit.engine.executor.test_ranks import CHUNKS, PROMPTS, runner_of, tiny

INVARIANT = {"kernels": "torch", "numerics": "invariant", "ranks_own_pools": True}


class ThreadAsMember:
    """In place of `Members`."""

    def __init__(self, folder: ModelFolder, config: EngineConfig, pool_fd: int, *_: object) -> None:
        self.memory = RankMemory.create(config.tensor_parallel)
        self._pipe, self._others = Pipe()
        _, unused = Pipe()
        fd = os.dup(unused.fileno())
        settings = messages.Settings(folder, config, 1, self.memory.fd, pool_fd, fd, None)
        self._pipe.send(settings)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait_until_loaded(self) -> None:
        assert self._pipe.recv() == messages.Loaded()

    def check(self) -> None:
        assert self._thread.is_alive()

    def close(self) -> None:
        self.memory.break_up()
        self._thread.join()

    def _serve(self) -> None:
        member = Member(self._others)
        self.runner = member._runner
        try:
            member.run()
        except RankEnded:
            return


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModelRunner]]:
    """Creates the runner of rank 0, whose pool is apart from rank 1's."""
    for module in (runner_module, rank_program):  # the thread would stay pinned in other tests
        monkeypatch.setattr(module, "pin_to_share", lambda *_: None)
    monkeypatch.setattr(runner_module, "Members", ThreadAsMember)
    monkeypatch.setattr(Member, "_load_adapters", lambda _: None)
    made: list[ModelRunner] = []

    def make(folder: ModelFolder, **settings: Any) -> ModelRunner:
        made.append(runner_of(folder, 2, **settings))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_each_rank_has_a_pool_with_its_own_heads(
    num_kv_heads: int, apart: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    folder = tiny("llama", tmp_path, num_kv_heads)
    alone = runner_of(folder, 1, **INVARIANT)
    two = apart(folder, **INVARIANT)
    assert two.layout() == alone.layout()
    steps = [mixed_steps(runner, PROMPTS, CHUNKS, seed=7) for runner in (alone, two)]
    for (_, _, one), (_, _, other) in zip(*steps, strict=True):
        assert torch.equal(one, other)
    member = two._members.runner  # type: ignore[union-attr]
    share = 1 if num_kv_heads == 1 else 2
    assert two.kv.nbytes == member.kv.nbytes == alone.kv.nbytes // share


@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_whole_blocks_are_read_from_and_written_to_all_ranks(
    num_kv_heads: int, apart: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    """The bytes are those of one rank's pool, so a peer needs not know how many ranks there are."""
    folder = tiny("llama", tmp_path, num_kv_heads)
    alone, two = runner_of(folder, 1, **INVARIANT), apart(folder, **INVARIANT)
    for runner in (alone, two):
        list(mixed_steps(runner, PROMPTS, CHUNKS, seed=7))
    whole = pool_bytes(alone.kv, alone.whole_layout)
    used = [block for block in range(alone.whole_layout.num_blocks) if any(whole.read([block]))]
    assert len(used) > 3
    assert bytes(two.blocks.read(used)) == bytes(whole.read(used))
    two.blocks.write([used[1], used[0]], whole.read(used[:2]))  # exchanges the two blocks
    found = two.blocks.read(used[:2])
    assert bytes(found) == bytes(whole.read([used[1], used[0]]))
    with pytest.raises(InternalError, match="2 KV blocks have"):
        two.blocks.write(used[:2], bytes(found)[1:])


def test_blocks_are_copied_on_all_ranks(apart: Callable[..., ModelRunner], tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    found = []
    for runner in (runner_of(folder, 1, **INVARIANT), apart(folder, **INVARIANT)):
        (sequence,) = place(runner, [PROMPTS[2]])  # 5 tokens in 1 block of 4
        runner.forward(StepBatch([sequence.take(4)]))
        (block,) = sequence.block_table
        copy = next(other for other in range(4) if other != block)
        runner.copy_blocks([(block, copy, 0)])
        runner.pools[0].memory[block].zero_()
        sequence.block_table[0] = copy
        found.append(runner.forward(StepBatch([sequence.take(1)])).clone())
    assert torch.equal(*found)


class Plan:
    """In place of `GpuMemory`: `left` bytes are left for the pool."""

    scratch_bytes = 1 << 20

    def __init__(self, left: int) -> None:
        self.left = left

    def explains(self, _: str) -> AbstractContextManager[None]:
        return nullcontext()

    def measure(self, record: Callable[[], object], run_step: Callable[[], object]) -> None:
        record()
        run_step()

    def with_pool_size(self, config: EngineConfig, _: int) -> EngineConfig:
        return replace(config, kv_bytes_max=self.left)

    def end(self) -> None: ...


@pytest.mark.parametrize("left", [(500, 300), (300, 500)])
def test_the_pools_are_as_large_as_the_fullest_gpu_allows(
    left: tuple[int, int], apart: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    runner = apart(tiny("llama", tmp_path), max_num_seqs=3, **INVARIANT)
    member = runner._members.runner  # type: ignore[union-attr]
    runner._gpu, member._gpu = map(Plan, left)  # type: ignore[assignment]
    config = EngineConfig(model="", tensor_parallel=2)
    assert runner.with_pool_size(config, step_tokens=40).kv_bytes_max == 300


def test_tiers_of_pools_that_are_apart_are_refused(
    apart: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"KV tiers \(host\) cannot be used with"):
        apart(tiny("llama", tmp_path), kv_host_bytes=1 << 20, **INVARIANT)


class TestDevice:
    @pytest.fixture(autouse=True)
    def gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)

    def test_each_rank_has_the_gpu_with_its_number(self) -> None:
        config = EngineConfig(model="", device="cuda", tensor_parallel=2)
        assert [choose_device(config, rank).index for rank in (0, 1)] == [0, 1]

    def test_too_few_gpus_are_refused(self) -> None:
        config = EngineConfig(model="", device="cuda", tensor_parallel=4)
        with pytest.raises(ConfigError, match="4, but this process has only 2 GPUs"):
            choose_device(config)

    def test_ranks_share_a_gpu_if_the_settings_say_so(self) -> None:
        config = EngineConfig(model="", device="cuda", tensor_parallel=4, ranks_share_gpu=True)
        assert [choose_device(config, rank).index for rank in range(4)] == [0] * 4

    def test_one_rank_has_the_current_gpu(self) -> None:
        assert choose_device(EngineConfig(model="", device="auto")) == torch.device("cuda")
