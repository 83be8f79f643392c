"""Measures how long a GPU would wait for the host between decode steps.

    python -m benchmarks.engine.launched_ahead [--steps 200]

The engine runs on a device that computes nothing: a pass takes 3 ms with 8 sequences and 10 ms with
256, a sampling 0.1 ms, both in the order in which they were started. The host does all that it does
for the Triton kernels except launches: it writes the inputs of each step and packs the parameters
of the samplings. "idle" is the time per step in which the device has nothing to do; "host" is the
CPU time of the engine's thread without its waits. Both are measured with and without launching
passes ahead, in turn. Medians over the steps, in ms. Writes benchmarks/results/launched_ahead.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tandem.common.config.engine import EngineConfig
from tandem.common.sampling_params import SamplingParams
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.engine import Engine
from tandem.engine.executor.triton.inputs import DecodeRows, StepShape
from tandem.engine.scheduler.batch import StepBatch
from tandem.engine.types import Mode, SequenceSpec
from tandem_bench.framework import RESULTS, Report, options, run_main, table
from tandem_kernels.sampling import Draw
from tandem_kernels.triton.sampling import packed

CASES = ((8, 512, 3e-3), (64, 2048, 5e-3), (256, 1024, 10e-3))  # sequences, context, seconds
SAMPLING_S = 1e-4
BLOCK_SIZE = 16
WARM_UP = 20


@options
class Options:
    steps: int = 200
    rounds: int = 3
    output: Path = RESULTS / "launched_ahead.json"


class Device:
    """A device that takes time and computes nothing."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.idle_s = 0.0
        self.waited_s = 0.0

    def start(self, seconds: float) -> float:
        """Starts work after all earlier work. Returns the time at which it ends."""
        now = time.perf_counter()
        self.idle_s += max(0.0, now - self.free_at)
        self.free_at = max(now, self.free_at) + seconds
        return self.free_at

    def wait(self, until: float) -> None:
        began = time.thread_time()
        while (now := time.perf_counter()) < until:
            if until - now > 3e-4:
                time.sleep(until - now - 2e-4)
        self.waited_s += time.thread_time() - began


class DeviceTokens:
    def __init__(self, device: Device, ready_at: float, token_ids: list[int]) -> None:
        self._device = device
        self._ready_at = ready_at
        self._token_ids = token_ids

    def wait(self) -> list[int]:
        self._device.wait(self._ready_at)
        return self._token_ids


class DeviceRunner:
    """A runner on the device, with the host's part of a Triton step."""

    dtype_name = kv_dtype_name = "bfloat16"
    numerics_name = "fast"
    kernels_name = "stand-in"
    num_pools = 1
    shards_logits = False
    why_no_budgets = ""
    why_no_speculation = ""
    draft = None
    vocab_size = 128_000
    max_model_len = 8192
    tokens_per_step = 1 << 20  # the first step computes all prompts

    def __init__(self, num_seqs: int, pass_s: float, launches_ahead: bool) -> None:
        self.launches_ahead = launches_ahead
        self.device = Device()
        self._pass_s = pass_s
        width = self.max_model_len // BLOCK_SIZE
        shape = StepShape(num_seqs, num_seqs, num_seqs, num_seqs, width)
        self._rows = DecodeRows(torch.zeros(sum(shape.sizes), dtype=torch.int32), shape)
        self._num_seqs = num_seqs

    def layout(self, num_blocks: int = 1) -> KvLayout:
        return KvLayout.of_one(BlockLayout(num_blocks, 1, 1, BLOCK_SIZE, 8, "bfloat16"))

    def with_pool_size(self, config: EngineConfig, step_tokens: int) -> EngineConfig:
        return config

    def allocate(self, num_blocks: int) -> None:
        self.kv = torch.zeros(1, dtype=torch.uint8)

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        assert not copies

    def store_states(self, copies: Sequence[tuple[int, int, int]]) -> None:
        assert not copies

    def forward(self, batch: StepBatch, on_kv_written: Callable[[], object] | None) -> torch.Tensor:
        assert on_kv_written is None
        if batch.num_tokens == len(batch.slices) == self._num_seqs:
            self._rows.write(batch.slices, BLOCK_SIZE)
        self.device.start(self._pass_s)
        return torch.empty(0)

    def start_sampling(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> DeviceTokens:
        packed(draws)
        return DeviceTokens(self.device, self.device.start(SAMPLING_S), [5] * len(draws))

    def synchronize(self) -> None:
        self.device.wait(self.device.free_at)


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    rows: list[dict[str, Any]] = []
    for num_seqs, context, pass_s in CASES:
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(options.rounds):
            for is_ahead in found:
                found[is_ahead].append(measure(num_seqs, context, pass_s, is_ahead, options.steps))
        for is_ahead, each in found.items():
            rows.append(
                {
                    "sequences": num_seqs,
                    "context": context,
                    "pass_ms": 1e3 * pass_s,
                    "launched_ahead": is_ahead,
                    "idle_ms": round(1e3 * statistics.median(idle for idle, _ in each), 3),
                    "host_ms": round(1e3 * statistics.median(host for _, host in each), 3),
                }
            )
    report.write(rows=rows)
    print(
        table(
            "sequences | context | a pass | launched ahead | host | the device is idle",
            [
                (
                    row["sequences"],
                    row["context"],
                    f"{row['pass_ms']:g} ms",
                    "yes" if row["launched_ahead"] else "no",
                    f"{row['host_ms']:.2f} ms",
                    f"{row['idle_ms']:.2f} ms",
                )
                for row in rows
            ],
        )
    )


def measure(
    num_seqs: int, context: int, pass_s: float, is_ahead: bool, steps: int
) -> tuple[float, float]:
    """Returns the medians, over the steps, of the seconds in which the device is idle and of those
    in which the host works."""
    runner = DeviceRunner(num_seqs, pass_s, is_ahead)
    num_blocks = num_seqs * (context + 2 * (steps + WARM_UP)) // BLOCK_SIZE
    config = EngineConfig(
        model="stand-in",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=num_seqs,
        itl_target_s=0.0,
    )
    engine = Engine(config, runner, "stand-in")  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=2 * (steps + WARM_UP))
    for number in range(num_seqs):
        prompt = [number + 10] * context
        engine.add(SequenceSpec(str(number), prompt, context, Mode.LOCAL, sampling))
    taken = []
    while len(taken) < WARM_UP + steps:
        idle_s, waited_s = runner.device.idle_s, runner.device.waited_s
        began = time.thread_time()
        report = engine.step()
        host_s = time.thread_time() - began - (runner.device.waited_s - waited_s)
        if report.num_decode_tokens == num_seqs:
            taken.append((runner.device.idle_s - idle_s, host_s))
    idles, hosts = zip(*taken[WARM_UP:], strict=True)
    return statistics.median(idles), statistics.median(hosts)


if __name__ == "__main__":
    run_main(main)
