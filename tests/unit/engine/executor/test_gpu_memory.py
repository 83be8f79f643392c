"""The plan of a GPU's memory, on a stand-in for torch.cuda: order, numbers, turns and messages."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.executor import gpu_memory
from tandem.engine.executor import runner as runner_module
from tandem.engine.executor.gpu_memory import GpuMemory, is_out_of_memory
from tandem.engine.executor.largest_step import largest_step
from tandem.engine.executor.runner import ModelRunner
from tandem.errors import ConfigError
from tests.tiny_models import make_tiny_model

MB = 1_000_000
CUDA = torch.device("cuda")


class Card:
    """A GPU of which each part of a worker takes memory. `calls` has what was called, in order."""

    def __init__(self, total: int = 1000 * MB, others: int = 0) -> None:
        self.total, self.others = total, others
        self.used = self.cached = self.peak = 0
        self.calls: list[str] = []

    def take(self, num_bytes: int, what: str = "") -> None:
        """Allocates memory, as a load or a capture does."""
        if what:
            self.calls.append(what)
        if self.others + self.used + num_bytes > self.total:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        self.used += num_bytes
        self.peak = max(self.peak, self.reserved)

    def pass_through(self, num_bytes: int, what: str) -> None:
        """Allocates memory and frees it again, as a step does. torch keeps it in its cache."""
        self.take(num_bytes, what)
        self.used -= num_bytes
        self.cached = max(self.cached, num_bytes)

    @property
    def reserved(self) -> int:
        return self.used + self.cached

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        def free() -> tuple[int, int]:
            return self.total - self.others - self.reserved, self.total

        def empty() -> None:
            self.cached = 0

        def reset() -> None:
            self.peak = self.reserved

        properties = SimpleNamespace(uuid="0a1b", multi_processor_count=4)
        stand_ins: dict[str, Callable[..., Any]] = {
            "mem_get_info": lambda _=None: free(),
            "empty_cache": empty,
            "synchronize": lambda _=None: None,
            "memory_reserved": lambda _=None: self.reserved,
            "max_memory_reserved": lambda _=None: self.peak,
            "reset_peak_memory_stats": lambda _=None: reset(),
            "get_device_properties": lambda _: properties,
            "get_device_capability": lambda _: (9, 0),
            "is_available": lambda: True,
        }
        for name, stand_in in stand_ins.items():
            patch.setattr(torch.cuda, name, stand_in)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    card.stand_in(monkeypatch)
    return card


def gpu(folder: Path, **settings: Any) -> GpuMemory:
    return GpuMemory(CUDA, EngineConfig(model="", **settings), folder)


def measured(plan: GpuMemory, card: Card, *, pool_bytes: int = 0) -> GpuMemory:
    """Has 200 MB of weights, 30 MB of graphs and 50 MB of the largest step measured."""
    plan.begin(190 * MB, pool_bytes)
    card.take(200 * MB, "weights")
    plan.weights_loaded()
    scratch = plan.scratch_bytes
    card.take(scratch, "scratch")
    plan.measure(
        lambda: card.take(30 * MB, "graphs"), lambda: card.pass_through(50 * MB, "largest step")
    )
    card.used -= scratch + 30 * MB
    return plan


class TestPlan:
    def test_the_pool_gets_what_the_measured_parts_leave(self, card: Card, tmp_path: Path) -> None:
        plan = measured(gpu(tmp_path), card)
        config = plan.with_pool_size(EngineConfig(model=""), 0)
        assert card.calls == ["weights", "scratch", "graphs", "largest step", "largest step"]
        assert config.kv_bytes_max == (900 - 200 - 30 - 50) * MB
        assert plan.parts == gpu_memory.Parts(200 * MB, 50 * MB, 30 * MB, 620 * MB)

    def test_the_scratch_pool_is_a_quarter_of_what_the_weights_leave(
        self, card: Card, tmp_path: Path
    ) -> None:
        plan = gpu(tmp_path)
        plan.begin(190 * MB, 0)
        card.take(200 * MB)
        plan.weights_loaded()
        assert plan.scratch_bytes == 175 * MB

    def test_memory_that_only_tuning_needs_is_not_part_of_a_step(
        self, card: Card, tmp_path: Path
    ) -> None:
        plan = gpu(tmp_path)
        plan.begin(0, 0)
        plan.weights_loaded()
        steps = iter([300, 40])
        plan.measure(lambda: None, lambda: card.pass_through(next(steps) * MB, "step"))
        assert (plan.parts.graphs, plan.parts.step) == (0, 40 * MB)

    def test_kernels_that_the_first_step_loads_count_beside_the_graphs(
        self, card: Card, tmp_path: Path
    ) -> None:
        plan = gpu(tmp_path)
        plan.begin(0, 0)
        plan.weights_loaded()
        loads = iter([7, 0])
        plan.measure(lambda: card.take(30 * MB), lambda: card.take(next(loads) * MB))
        assert (plan.parts.graphs, plan.parts.step) == (37 * MB, 0)

    def test_a_share_is_of_the_total_memory_whatever_other_workers_use(
        self, card: Card, tmp_path: Path
    ) -> None:
        card.others = 450 * MB
        plan = measured(gpu(tmp_path, gpu_memory_utilization=0.45), card)
        assert plan.with_pool_size(EngineConfig(model=""), 0).kv_bytes_max == 170 * MB

    def test_where_others_leave_less_than_the_share_the_plan_takes_less(
        self, card: Card, tmp_path: Path
    ) -> None:
        card.others = 500 * MB
        plan = measured(gpu(tmp_path), card)
        assert plan.with_pool_size(EngineConfig(model=""), 0).kv_bytes_max == (490 - 280) * MB

    @pytest.mark.parametrize("settings", [{"kv_bytes_max": 700 * MB}, {"num_blocks": 7}])
    def test_a_given_size_is_obeyed_beyond_the_share(
        self, settings: dict[str, int], card: Card, tmp_path: Path
    ) -> None:
        plan = measured(gpu(tmp_path, **settings), card, pool_bytes=700 * MB)
        config = EngineConfig(model="", **settings)
        assert plan.with_pool_size(config, 700 * MB) is config
        assert plan.parts.pool == 700 * MB

    def test_a_given_size_that_the_measured_parts_leave_no_room_for_is_refused(
        self, card: Card, tmp_path: Path
    ) -> None:
        plan = measured(gpu(tmp_path, kv_bytes_max=730 * MB), card, pool_bytes=730 * MB)
        with pytest.raises(ConfigError) as refused:
            plan.with_pool_size(EngineConfig(model="", kv_bytes_max=730 * MB), 730 * MB)
        assert refused.value.message == (
            "the GPU has too little memory for this worker, which may use 1,000,000,000 bytes: "
            "weights 200,000,000 bytes, largest step 50,000,000 bytes, CUDA graphs 30,000,000 "
            "bytes, KV pool 730,000,000 bytes; gpu-memory-utilization 0.9 of 1,000,000,000 bytes, "
            "1,000,000,000 bytes were free; lower --kv-memory 730000000, --max-tokens-per-step or "
            "--max-num-seqs"
        )

    def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
        self, card: Card, tmp_path: Path
    ) -> None:
        card.others = 600 * MB
        with pytest.raises(ConfigError) as refused:
            gpu(tmp_path).begin(395 * MB, 0)
        assert "may use 390,000,000 bytes: weights 395,000,000 bytes" in refused.value.message
        assert refused.value.message.endswith(
            "restart the peers of that worker, which keep its KV pool mapped"
        )
        gpu(tmp_path, kv_bytes_max=200 * MB).begin(199 * MB, 200 * MB)

    @pytest.mark.parametrize(
        ("share", "others", "remedy"),
        [
            (0.9, 0, "; choose a smaller or a quantized model"),
            (0.45, 0, "; start fewer workers on this GPU, raise --gpu-memory-utilization, or "),
            (0.45, 600 * MB, "; end other programs on this GPU, or choose a smaller"),
        ],
    )
    def test_the_remedy_follows_from_what_takes_the_memory(
        self, share: float, others: int, remedy: str, card: Card, tmp_path: Path
    ) -> None:
        card.others = others
        with pytest.raises(ConfigError) as refused:
            gpu(tmp_path, gpu_memory_utilization=share).begin(1000 * MB, 0)
        assert remedy in refused.value.message


class TestOutOfMemory:
    def test_the_message_lists_the_parts_and_what_to_lower(
        self, card: Card, tmp_path: Path
    ) -> None:
        plan = measured(gpu(tmp_path), card)
        plan.with_pool_size(EngineConfig(model=""), 0)
        card.others = 300 * MB
        with pytest.raises(ConfigError) as refused, plan.explains("the KV pool was allocated"):
            card.take(620 * MB)
        assert refused.value.message == (
            "the GPU's memory ran out while the KV pool was allocated: weights 200,000,000 bytes, "
            "largest step 50,000,000 bytes, CUDA graphs 30,000,000 bytes, KV pool 620,000,000 "
            "bytes; gpu-memory-utilization 0.9 of 1,000,000,000 bytes, 1,000,000,000 bytes were "
            "free; lower --gpu-memory-utilization; or lower --max-tokens-per-step or "
            "--max-num-seqs, or choose a smaller or a quantized model"
        )
        assert isinstance(refused.value.__cause__, torch.cuda.OutOfMemoryError)

    @pytest.mark.parametrize(
        ("error", "is_it"),
        [
            (torch.cuda.OutOfMemoryError("CUDA out of memory"), True),
            (RuntimeError("Triton Error [CUDA]: out of memory"), True),
            (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublas"), True),
            (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
            (ValueError("CUDA out of memory"), False),
        ],
    )
    def test_errors_that_say_so(self, error: Exception, is_it: bool) -> None:
        assert is_out_of_memory(error) == is_it

    def test_other_errors_pass_and_the_next_worker_may_start(
        self, card: Card, tmp_path: Path
    ) -> None:
        plan = gpu(tmp_path)
        plan.begin(0, 0)
        with pytest.raises(RuntimeError, match="illegal"), plan.explains("a step was measured"):
            raise RuntimeError("an illegal memory access")
        gpu(tmp_path).begin(0, 0)


class Clock:
    """The time of a card that others leave after 20 s."""

    def __init__(self, card: Card, free_at_s: float = 20.0) -> None:
        self.now, self.card, self.free_at_s = 0.0, card, free_at_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.free_at_s:
            self.card.others = 0


class TestKilledWorker:
    @pytest.mark.parametrize("pool_bytes", [0, 700 * MB])
    def test_its_memory_is_waited_for_with_one_line(
        self,
        pool_bytes: int,
        card: Card,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        clock = Clock(card)
        monkeypatch.setattr(gpu_memory, "time", clock)
        card.others = 800 * MB
        plan = gpu(tmp_path, kv_bytes_max=pool_bytes or None)
        plan.begin(100 * MB, pool_bytes, 60)
        assert 20 <= clock.now < 21
        assert plan._free_at_start == 1000 * MB
        (record,) = caplog.records
        assert "0.2 of 1.0 GB are free. The worker waits up to 60 s" in record.getMessage()

    def test_after_the_limit_the_worker_takes_what_is_free_or_is_refused(
        self, card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(card, free_at_s=1e9)
        monkeypatch.setattr(gpu_memory, "time", clock)
        card.others = 800 * MB
        plan = gpu(tmp_path)
        plan.begin(100 * MB, 0, 60)
        assert 60 <= clock.now < 61
        plan.release()
        with pytest.raises(ConfigError, match="restart the peers of that worker, which keep"):
            gpu(tmp_path, kv_bytes_max=700 * MB).begin(100 * MB, 700 * MB, 60)

    @pytest.mark.parametrize(("pool_bytes", "wait_s"), [(990 * MB, 60.0), (700 * MB, 0.0)])
    def test_what_never_fits_and_programs_without_a_limit_are_refused_at_once(
        self,
        pool_bytes: int,
        wait_s: float,
        card: Card,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        clock = Clock(card)
        monkeypatch.setattr(gpu_memory, "time", clock)
        card.others = 800 * MB
        with pytest.raises(ConfigError) as refused:
            gpu(tmp_path, kv_bytes_max=pool_bytes).begin(100 * MB, pool_bytes, wait_s)
        assert clock.now == 0
        assert ("mapped" in refused.value.message) == (pool_bytes < 900 * MB)


class TestTurns:
    def test_a_worker_waits_until_the_one_before_has_its_graphs(
        self, card: Card, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        first, second = gpu(tmp_path), gpu(tmp_path)
        first.begin(0, 0)
        has_begun = threading.Event()

        def start() -> None:
            second.begin(0, 0)
            has_begun.set()

        thread = threading.Thread(target=start, daemon=True)
        thread.start()
        assert not has_begun.wait(0.5)
        card.take(450 * MB)
        first.end()
        assert has_begun.wait(10)
        thread.join()
        assert second._free_at_start == 550 * MB
        assert f"waiting until process {os.getpid()} has started on this GPU" in caplog.text
        assert "550,000,000 bytes are still free" in caplog.text

    def test_a_forked_process_does_not_keep_the_lock(self, card: Card, tmp_path: Path) -> None:
        first = gpu(tmp_path)
        first.begin(0, 0)
        assert first._lock is not None
        copy = os.dup(first._lock.fileno())  # as in a forked process
        first.end()
        gpu(tmp_path).begin(0, 0)
        os.close(copy)

    def test_a_killed_worker_holds_up_nobody(self, card: Card, tmp_path: Path) -> None:
        path = tmp_path / f"tandem-{os.getuid()}-gpu-0a1b.lock"
        code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(); input()"
        holder = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ConfigError, match="has been starting on this GPU for more than"):
            _impatient(tmp_path)
        holder.kill()
        holder.wait()
        holder.stdout.close()
        gpu(tmp_path).begin(0, 0)

    def test_a_lock_file_that_cannot_be_opened_is_named(self, card: Card, tmp_path: Path) -> None:
        (tmp_path / f"tandem-{os.getuid()}-gpu-0a1b.lock").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=r"gpu-0a1b\.lock for worker starts .* set TMPDIR"):
            gpu(tmp_path).begin(0, 0)


def _impatient(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_memory, "_TURN_S_MAX", 0.01)
        patch.setattr(gpu_memory, "_LOOK_S", 0.02)
        gpu(folder).begin(0, 0)


class TestLargestStep:
    def test_it_has_all_tokens_and_sequences(self) -> None:
        batch, num_blocks = largest_step(
            100, 4, max_model_len=60, block_size=16, blocks_max=100, num_groups=2
        )
        assert [s.num_tokens for s in batch.slices] == [60, 38, 1, 1]
        assert [s.context_len for s in batch.slices] == [60, 38, 48, 48]
        assert [s.num_logits for s in batch.slices] == [1] * 4
        tables = [s.block_table for s in batch.slices]
        assert [block for table in tables for block in table] == list(range(num_blocks))
        assert num_blocks == 4 + 3 + 3 + 3
        assert [s.other_tables for s in batch.slices] == [[table] for table in tables]

    def test_each_sequence_has_one_slot_of_a_state_group(self) -> None:
        batch, num_blocks = largest_step(
            100, 4, max_model_len=60, block_size=16, blocks_max=100, num_groups=3, state_groups=(2,)
        )
        assert num_blocks == 4 + 3 + 3 + 3
        assert [s.other_tables for s in batch.slices] == [
            [piece.block_table, [number]] for number, piece in enumerate(batch.slices)
        ]

    @pytest.mark.parametrize("tokens", [1, 2, 3, 64, 513])
    @pytest.mark.parametrize("seqs", [1, 2, 64])
    @pytest.mark.parametrize("max_model_len", [1, 7, 4096])
    @pytest.mark.parametrize("blocks_max", [0, 5000])
    def test_any_limits_give_a_step_that_a_runner_can_compute(
        self, tokens: int, seqs: int, max_model_len: int, blocks_max: int
    ) -> None:
        batch, num_blocks = largest_step(
            tokens,
            seqs,
            max_model_len=max_model_len,
            block_size=16,
            blocks_max=blocks_max,
            num_groups=1,
        )
        assert batch.num_tokens == min(tokens, len(batch.slices) * max_model_len)
        assert len(batch.slices) == min(seqs, max(1, tokens - 1))
        for piece in batch.slices:
            assert piece.num_tokens <= piece.context_len <= max_model_len
            assert len(piece.block_table) * 16 >= piece.context_len
            assert max(piece.block_table) < num_blocks


class TestRunner:
    @pytest.fixture
    def on_card(
        self, card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., ModelRunner]:
        """Makes a runner that takes the CPU for a GPU once its weights are loaded."""
        monkeypatch.setattr(gpu_memory.tempfile, "gettempdir", lambda: str(tmp_path))
        load = runner_module.load_weights

        def load_weights(*arguments: Any, device: torch.device, **named: Any) -> Any:
            assert device.type == "cuda"
            card.take(200 * MB, "weights")
            return load(*arguments, device=torch.device("cpu"), **named)

        monkeypatch.setattr(runner_module, "load_weights", load_weights)

        def make(family: str = "gemma3", **settings: Any) -> ModelRunner:
            folder, _ = make_tiny_model(family, tmp_path / "model")
            config = EngineConfig(
                model=str(folder.path), device="cuda", kernels="torch", **settings
            )
            runner = ModelRunner(folder, config)
            runner.device = torch.device("cpu")
            self.config, self.fingerprint = config, folder.fingerprint
            return runner

        return make

    def test_weights_then_the_largest_step_then_the_pool_then_the_next_worker(
        self,
        on_card: Callable[..., ModelRunner],
        card: Card,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        card.total = 200 * MB + 10 * MB
        runner = on_card(max_num_seqs=5, max_tokens_per_step=90, gpu_memory_utilization=1.0)
        pools, forward = runner._make_pools, runner._large.forward

        def make_pools(layout: Any) -> Any:
            card.calls.append("pool")
            return pools(layout)

        def run(batch: Any, *rest: Any) -> torch.Tensor:
            card.pass_through(2 * MB, f"{batch.num_tokens} tokens of {len(batch.slices)}")
            return forward(batch, *rest)

        monkeypatch.setattr(runner, "_make_pools", make_pools)
        monkeypatch.setattr(runner._large, "forward", run)
        engine = Engine(self.config, runner, self.fingerprint)
        step = "90 tokens of 5"
        assert card.calls == ["weights", "pool", step, step, "pool"]
        left = 10 * MB - 2 * MB - int(0.01 * 210 * MB)
        assert left - engine.layout.block_bytes < engine.layout.pool_bytes <= left
        engine.close()
        gpu(tmp_path).begin(0, 0)  # the lock is free

    def test_the_scratch_pool_has_a_slot_for_each_sequence(
        self, on_card: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = on_card("qwen3-next", max_num_seqs=5, max_tokens_per_step=90, max_model_len=400)
        pools = runner._make_pools
        sizes: list[list[int]] = []

        def make_pools(layout: Any) -> Any:
            sizes.append(layout.sizes)
            return pools(layout)

        monkeypatch.setattr(runner, "_make_pools", make_pools)
        runner.with_pool_size(self.config, 90)
        ((num_blocks, num_slots),) = sizes
        assert num_slots == 5
        assert num_blocks > 25  # the contexts are as long as max_model_len

    @pytest.mark.parametrize(
        ("given", "num_blocks"), [({"num_blocks": 9}, 9), ({"kv_bytes_max": 1 << 20}, None)]
    )
    def test_a_given_pool_is_obeyed(
        self, on_card: Callable[..., ModelRunner], given: dict[str, int], num_blocks: int | None
    ) -> None:
        runner = on_card(**given)
        engine = Engine(self.config, runner, self.fingerprint)
        expected = (num_blocks or 0) * runner.layout().block_bytes or 1 << 20
        assert expected * 0.9 < engine.layout.pool_bytes <= expected
        engine.close()

    @pytest.mark.parametrize("kind", ["load", "step", "pool"])
    def test_out_of_memory_is_an_error_of_the_settings(
        self,
        on_card: Callable[..., ModelRunner],
        card: Card,
        monkeypatch: pytest.MonkeyPatch,
        kind: str,
    ) -> None:
        doing = {"load": "the weights were loaded", "step": "a step was measured"}
        if kind == "load":
            card.total = 150 * MB
            with pytest.raises(
                ConfigError, match=f"ran out while {doing[kind]}: weights not known"
            ):
                on_card()
            return
        runner = on_card()

        def raise_it(*_: Any, **__: Any) -> Any:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

        if kind == "step":
            monkeypatch.setattr(runner._large, "forward", raise_it)
            with pytest.raises(
                ConfigError, match=r"a step was measured: weights 200,000,000 bytes"
            ):
                runner.with_pool_size(self.config, 64)
            return
        runner.with_pool_size(self.config, 64)
        monkeypatch.setattr(runner, "_make_pools", raise_it)
        with pytest.raises(ConfigError, match=r"the KV pool was allocated: weights 200,000,000"):
            runner.allocate(4, 4)


def test_graphs_are_recorded_once_to_be_measured_and_once_over_the_pool(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Triton kernels run in the interpreter."""
    pytest.importorskip("triton")
    folder, _ = make_tiny_model("llama", tmp_path / "model")
    config = EngineConfig(
        model=str(folder.path), device="cpu", kernels="triton", dtype="float32", max_num_seqs=2
    )
    runner = ModelRunner(folder, config)
    runner._gpu = plan = gpu(tmp_path)
    plan.begin(0, 0)
    plan.weights_loaded()
    triton = runner._triton
    assert triton is not None
    prepare, run, drop = triton.prepare, triton._run_mixed, triton.drop_graphs

    def record(pools: Any) -> None:
        assert plan._lock is not None  # no other worker tunes kernels at the same time
        card.take(30 * MB, f"record over {pools[0].layout.num_blocks} blocks")
        prepare(pools)

    def run_step(batch: Any, *rest: Any, **named: Any) -> Any:
        card.pass_through(50 * MB, f"step of {batch.num_tokens} tokens")
        return run(batch, *rest, **named)

    def drop_graphs() -> None:
        card.used -= 30 * MB
        card.calls.append("drop")
        drop()

    monkeypatch.setattr(triton, "prepare", record)
    monkeypatch.setattr(triton, "_run_mixed", run_step)
    monkeypatch.setattr(triton, "drop_graphs", drop_graphs)
    monkeypatch.setattr(GpuMemory, "scratch_bytes", 0)
    planned = runner.with_pool_size(config, 20)
    assert planned.kv_bytes_max == (900 - 30 - 50) * MB
    assert card.used == 0
    runner.allocate(9)
    step = "step of 20 tokens"
    assert card.calls == ["record over 3 blocks", step, step, "drop", "record over 9 blocks"]
    assert not runner.pools[0].memory.any()
    assert plan._lock is None
