"""Ranks whose KV pools are apart, as on GPUs. Rank 1 is a thread of this process, on the CPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.common.cached_tokens import CachedTokens
from tandem.common.config.engine import EngineConfig
from tandem.common.perf_model.step_time import StepTimeModel
from tandem.engine.cache.layout import state_layout
from tandem.engine.cache.layout.pool_bytes import pool_bytes
from tandem.engine.engine import Engine
from tandem.engine.executor import rank_program
from tandem.engine.executor import runner as runner_module
from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.rank_program import Member
from tandem.engine.executor.ranks import messages
from tandem.engine.executor.runner import ModelRunner, choose_device
from tandem.engine.scheduler.batch import StepBatch
from tandem.engine.tiers import make_tiers
from tandem.engine.tiers.object_store import lookups
from tandem.engine.tiers.tier import LoadRate
from tandem.engine.types import Mode
from tandem.errors import ConfigError, InternalError
from tandem.models.folder import ModelFolder
from tandem_kernels.native.library import RankEnded
from tests.engine_driver import drive_all, make_spec
from tests.model_engines import make_model_engine
from tests.step_batches import mixed_steps, place
from tests.tiny_models import make_tiny_model
from tests.unit.engine.executor.test_ranks import CHUNKS, PROMPTS, runner_of, tiny
from tests.unit.engine.tiers.test_tiers import run as answer

INVARIANT = {"kernels": "torch", "numerics": "invariant", "ranks_own_pools": True}


class ThreadAsMember:
    """In place of `Members`."""

    def __init__(self, folder: ModelFolder, config: EngineConfig, pool_fd: int, *_: object) -> None:
        self.memory = RankMemory.create(config.tensor_parallel)
        self._pipe, self._others = Pipe()
        tier_pipe, others_tier = Pipe()
        self.tier_pipes = [tier_pipe]
        self.tier_memory_fd = os.memfd_create("tiers")
        fds = [os.dup(fd) for fd in (others_tier.fileno(), self.tier_memory_fd)]
        _, unused = Pipe()
        settings = messages.Settings(
            folder,
            config,
            1,
            self.memory.fd,
            pool_fd,
            os.dup(unused.fileno()),
            None,
            tier_memory_fd=fds[1],
            tier_fd=fds[0],
        )
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


def test_blocks_with_heads_and_keys_of_indexers_are_not_divided(tmp_path: Path) -> None:
    folder = tiny("minimax-m3", tmp_path)
    with pytest.raises(ConfigError, match=r"is 2; it must be 1 .* the keys of indexers"):
        runner_of(folder, 2, **INVARIANT)


@pytest.mark.parametrize(
    ("family", "num_kv_heads"),
    [("llama", 4), ("llama", 1), ("qwen3-next", 1), ("glm5", 1), ("deepseek-v4", 1)],
)
def test_whole_blocks_are_read_from_and_written_to_all_ranks(
    family: str,
    num_kv_heads: int,
    apart: Callable[..., ModelRunner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bytes are those of one rank's pool, so a peer needs not know how many ranks there are."""
    monkeypatch.setattr(state_layout, "PIECE_BYTES_MAX", 8000)  # slots of 9 pieces
    folder = tiny(family, tmp_path, num_kv_heads)
    alone, two = runner_of(folder, 1, **INVARIANT), apart(folder, **INVARIANT)
    for runner in (alone, two):
        list(mixed_steps(runner, PROMPTS, CHUNKS, seed=7))
    whole = pool_bytes(alone.kv, alone.whole_layout)
    used = [block for block in range(alone.whole_layout.num_blocks) if any(whole.read([block]))]
    assert len(used) > 3
    assert bytes(two.blocks.read(used)) == bytes(whole.read(used))
    for pair in (used[:2], used[-2:]):
        two.blocks.write(pair[::-1], whole.read(pair))  # exchanges the two blocks
        found = two.blocks.read(pair)
        assert bytes(found) == bytes(whole.read(pair[::-1]))
    two.blocks.write(used, whole.read(used))
    assert bytes(two.blocks.read(used)) == bytes(whole.read(used))
    found = two.blocks.read(used[:2])
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


@pytest.fixture
def _loads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads do not depend on how busy the machine is."""
    monkeypatch.setattr(LoadRate, "observe", lambda *_: None)
    monkeypatch.setattr(StepTimeModel, "prefill_rate", None)
    monkeypatch.setattr("tandem.engine.tiers.tiers.STALL_S", 600.0)
    monkeypatch.setattr("tandem.engine.tiers.writes.HUNG_S", 600.0)


@contextmanager
def engine_of(folder: ModelFolder, num_ranks: int, **settings: Any) -> Iterator[Engine]:
    """An engine with 12 blocks of 8 tokens in each KV group."""
    settings = {"block_size": 8, "num_blocks": 12, "kv_tier_policy": "lru"} | settings
    engine, runner = make_model_engine(folder, tensor_parallel=num_ranks, **INVARIANT | settings)
    try:
        yield engine
        engine.close()
    finally:
        runner.close()


TIERS: dict[str, dict[str, Any]] = {
    "host": {"kv_host_bytes": 4 << 20},
    "disk": {"kv_disk_path": "PATH", "kv_disk_bytes": 4 << 20},
    "store": {"kv_store_url": "s3://bucket/kv"},
}
# A prompt takes 8 of the 12 blocks.
ASKED = [[(13 * i + start) % 200 for i in range(57)] for start in (1, 2, 3, 1)]


@pytest.mark.usefixtures("apart", "_loads_are_worth_it")
@pytest.mark.parametrize(
    ("family", "num_kv_heads", "tier"),
    [("llama", 4, "host"), ("gemma3", 1, "host"), ("llama", 1, "disk")],
)
def test_blocks_that_left_the_pools_of_all_ranks_come_back(
    family: str, num_kv_heads: int, tier: str, tmp_path: Path
) -> None:
    folder = tiny(family, tmp_path / "model", num_kv_heads)
    given = {name: str(tmp_path) if v == "PATH" else v for name, v in TIERS[tier].items()}
    with engine_of(folder, 1) as engine:
        expected = answer(engine, *ASKED)
    with engine_of(folder, 2, **given) as engine:
        found = answer(engine, *ASKED)
    assert found.token_ids == expected.token_ids
    assert found.ends["3"].cached == CachedTokens(**{tier: 56})


@pytest.mark.usefixtures("apart", "_loads_are_worth_it")
@pytest.mark.parametrize(
    ("family", "num_kv_heads", "tier", "degrees"),
    [("llama", 4, "disk", (2, 1)), ("gemma3", 1, "disk", (1, 2)), ("llama", 4, "store", (1, 2))],
)
def test_a_block_in_a_tier_does_not_depend_on_the_number_of_ranks(
    family: str,
    num_kv_heads: int,
    tier: str,
    degrees: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine loads what an engine with another number of ranks has written."""
    if tier == "store":
        store = pytest.importorskip("obstore").store.MemoryStore()
        monkeypatch.setattr(make_tiers, "open_store", lambda *_, **__: store)
        monkeypatch.setattr(lookups, "WAIT_SHARE", 1e9)
        monkeypatch.setattr(lookups, "WAIT_S_MAX", 600.0)
    folder = tiny(family, tmp_path / "model", num_kv_heads)
    given = {name: str(tmp_path) if v == "PATH" else v for name, v in TIERS[tier].items()}
    found = []
    for degree in degrees:
        with engine_of(folder, degree, **given) as engine:
            found.append(answer(engine, ASKED[0]))
    assert found[0].token_ids == found[1].token_ids
    assert found[0].ends["0"].cached == CachedTokens()
    assert found[1].ends["0"].cached == CachedTokens(**{tier: 56})


@pytest.mark.usefixtures("apart")
@pytest.mark.timeout(60)
def test_states_of_a_prompt_for_a_peer_are_copied_on_all_ranks(tmp_path: Path) -> None:
    """The copies are made between two steps. Within a step, the ranks would wait for each other."""
    folder, _ = make_tiny_model("qwen3-next", tmp_path, num_attention_heads=8)
    first_tokens = []
    for num_ranks in (1, 2):
        with engine_of(folder, num_ranks, num_blocks=40) as engine:
            lease = drive_all(engine, make_spec("a", ASKED[0] * 2, mode=Mode.PREFILL_ONLY))
            engine.remove("a")
        (prefilled,) = [one for report in lease.reports for one in report.prefilled]
        first_tokens.append(prefilled.first_token_id)
    assert first_tokens[0] == first_tokens[1]


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
