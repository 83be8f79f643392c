"""Steps of several ranks beside those of one process with as many threads (--tensor-parallel).

    python -m benchmarks.engine.tensor_parallel [--ranks 2] [--batches 1,8,32] [--prefill 512]

The model is a Llama with random weights: 24 layers, hidden size 1,024, 16 query heads and 8 KV
heads, in bfloat16. Both ways compute the same bits, and take turns. The figure is the median of the
ratios of each turn, with the quartiles beside it. Writes benchmarks/results/tensor_parallel.json.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.shared.random_models import make_llama
from tandem.common.config.engine import EngineConfig
from tandem.engine.cache.layout.pool_memory import create_shared, populate
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.folder import ModelFolder
from tandem_bench.framework import (
    RESULTS,
    Report,
    in_turn,
    numbers,
    options,
    ratios,
    run_main,
    table,
)

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
CONTEXT = 512  # tokens of each sequence that decodes
WARM_UP = 2


@options
class Options:
    ranks: int = 2
    batches: str = "1,8,32"
    prefill: int = 512
    turns: int = 15
    output: Path = RESULTS / "tensor_parallel.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    batches = numbers(options.batches)
    with tempfile.TemporaryDirectory() as path:
        folder = make_llama(Path(path), **SIZES)
        alone = Ranks(folder, 1, options.ranks, max(batches))
        several = Ranks(folder, options.ranks, 1, max(batches))
        steps = [(f"decode {batch}", partial(decode_s, batch=batch)) for batch in batches]
        steps.append((f"prefill {options.prefill}", partial(prefill_s, num=options.prefill)))
        rows = [compare(name, step, alone, several, options.turns) for name, step in steps]
        several.close()
    report.write(ranks=options.ranks, rows=rows)
    print(
        table(
            f"step | 1 x {options.ranks} threads, ms | {options.ranks} x 1 thread, ms | speed | "
            "quartiles",
            (
                (
                    row["step"],
                    f"{row['alone_ms']:.1f}",
                    f"{row['ms']:.1f}",
                    f"{row['speed']:.3f}",
                    " to ".join(f"{quartile:.3f}" for quartile in row["quartiles"]),
                )
                for row in rows
            ),
        )
    )


class Ranks:
    """A runner, and sequences with `CONTEXT` tokens each."""

    def __init__(self, folder: ModelFolder, num: int, threads: int, most: int) -> None:
        config = EngineConfig(
            model="",
            device="cpu",
            dtype="bfloat16",
            num_threads=threads,
            tensor_parallel=num,
        )
        # The pool is in shared memory, as it is in a worker.
        self._runner = ModelRunner(folder, config, pool_fd=create_shared())
        self._each = -(-(CONTEXT + 1) // config.block_size)
        self._runner.allocate(most * self._each)
        populate(self._runner.kv.data_ptr(), self._runner.kv.nbytes).join()
        self._blocks = list(range(most * self._each))
        Random(1).shuffle(self._blocks)
        self.close = self._runner.close

    def step_s(self, num_sequences: int, num_tokens: int, context: int) -> float:
        """Returns the seconds of a step with the last `num_tokens` tokens of each sequence."""
        tokens = Random(num_tokens).choices(range(100, 40_000), k=num_tokens)
        slices = [
            SequenceSlice(
                tokens, context, self._blocks[i * self._each : (i + 1) * self._each], True
            )
            for i in range(num_sequences)
        ]
        began = time.perf_counter()
        self._runner.forward(StepBatch(slices))
        return time.perf_counter() - began


def decode_s(ranks: Ranks, *, batch: int) -> float:
    return min(ranks.step_s(batch, 1, CONTEXT) for _ in range(3))


def prefill_s(ranks: Ranks, *, num: int) -> float:
    return ranks.step_s(1, num, num)


def compare(name: str, step: Any, alone: Ranks, several: Ranks, turns: int) -> dict[str, Any]:
    taken = in_turn(
        {each: partial(step, each) for each in (alone, several)}, turns, warm_up=WARM_UP
    )
    speed = ratios(taken[alone], taken[several])
    return {
        "step": name,
        "alone_ms": 1000 * statistics.median(taken[alone]),
        "ms": 1000 * statistics.median(taken[several]),
        "speed": speed.median,
        "quartiles": [speed.low, speed.high],
    }


if __name__ == "__main__":
    run_main(main)
