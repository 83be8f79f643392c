"""Decode of one sequence at long contexts: several threads beside one, for few KV heads.

    python -m benchmarks.engine.attention_threads [--threads 2] [--contexts 8000,16000]
        [--kv-heads 1,3,9] [--dtype bfloat16]

The model is a Llama with random weights and the sizes of SmolLM2-135M, but for its number of KV
heads. The pool is filled with random numbers, and the blocks of a sequence lie scattered over it.
Steps with one thread and with several take turns; the figures are the medians of the ratios of each
turn, for the stage of attention and for the whole step. Both must compute the same logits. Writes
benchmarks/results/attention_threads.json.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from benchmarks.shared.random_models import make_llama
from tandem.common.config.engine import EngineConfig
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
from tandem_kernels.native.library import Stage

STEPS = 3  # of a number of threads, before it is the other one's turn


@options
class Options:
    threads: int = 2
    contexts: str = "8000,16000"
    kv_heads: str = "1,3,9"
    dtype: str = "bfloat16"
    layers: int = 30
    turns: int = 15
    output: Path = RESULTS / "attention_threads.json"


class Taken(NamedTuple):
    """The seconds of a step, and of its attention."""

    step_s: float
    attention_s: float


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    contexts = numbers(options.contexts)
    rows = []
    for num in numbers(options.kv_heads):
        with tempfile.TemporaryDirectory() as path:
            folder = make_llama(
                Path(path),
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=options.layers,
                num_attention_heads=9,
                num_key_value_heads=num,
                max_position_embeddings=max(contexts) + 1,
                tie_word_embeddings=True,
            )
            one, several = (
                Sequence(folder, options.dtype, threads, max(contexts))
                for threads in (1, options.threads)
            )
            for context in contexts:
                assert torch.equal(one.logits(context), several.logits(context))
                rows.append({"kv_heads": num} | compare(one, several, context, options.turns))
    report.write(threads=options.threads, dtype=options.dtype, rows=rows)
    names = ("attention_one_ms", "attention_ms", "step_one_ms", "step_ms")
    print(
        table(
            "KV heads | context | attention, 1 thread, ms | several | speed | step, 1 thread, ms | "
            "several | speed",
            (
                (
                    row["kv_heads"],
                    f"{row['context']:,}",
                    *(f"{row[name]:.2f}" for name in names[:2]),
                    f"{row['attention_speed']:.2f}",
                    *(f"{row[name]:.2f}" for name in names[2:]),
                    f"{row['step_speed']:.2f}",
                )
                for row in rows
            ),
        )
    )


class Sequence:
    """A runner whose pool has the KV of one sequence."""

    def __init__(
        self,
        folder: ModelFolder,
        dtype: str,
        threads: int,
        context: int,
        *,
        block_size: int = 16,
        scattered: bool = True,
        pool_fd: int | None = None,
    ) -> None:
        """`context` is the largest context. Its blocks are `scattered` over the pool, or lie in
        their order. The pool is in the memfd `pool_fd`, as a worker's is; None: it is in memory of
        this process alone."""
        config = EngineConfig(
            model="",
            device="cpu",
            dtype=dtype,  # type: ignore[arg-type]
            num_threads=threads,
            block_size=block_size,
        )
        self._runner = ModelRunner(folder, config, pool_fd=pool_fd)
        decoder = self._runner.native
        assert decoder is not None, "this machine has no compiled kernels"
        self._decoder = decoder
        num_blocks = -(-context // config.block_size)
        self._runner.allocate(num_blocks)
        generator = torch.Generator().manual_seed(1)
        kv = self._runner.kv.view(getattr(torch, dtype))
        kv.normal_(generator=generator)
        self._blocks = list(range(num_blocks))
        if scattered:
            Random(1).shuffle(self._blocks)

    def logits(self, context: int) -> torch.Tensor:
        """Returns the logits of the last token of so many."""
        piece = SequenceSlice([1000], context, self._blocks, True)
        return self._decoder.forward(StepBatch([piece]), self._runner.pools).clone()

    def decode(self, context: int) -> Taken:
        """Returns the times of the fastest of some steps."""
        taken = []
        for _ in range(STEPS):
            self._decoder.take_stages()
            began = time.perf_counter()
            self.logits(context)
            step_s = time.perf_counter() - began
            taken.append(Taken(step_s, self._decoder.take_stages()[Stage.ATTENTION]))
        return min(taken)


def compare(one: Sequence, several: Sequence, context: int, turns: int) -> dict[str, Any]:
    ways = {each: partial(each.decode, context) for each in (one, several)}
    taken = in_turn(ways, turns, warm_up=2)
    row: dict[str, Any] = {"context": context}
    for name in ("attention", "step"):
        first, second = (
            [getattr(each, f"{name}_s") for each in taken[way]] for way in (one, several)
        )
        speed = ratios(first, second)
        row |= {
            f"{name}_one_ms": round(1e3 * statistics.median(first), 3),
            f"{name}_ms": round(1e3 * statistics.median(second), 3),
            f"{name}_speed": round(speed.median, 3),
            f"{name}_quartiles": [round(speed.low, 3), round(speed.high, 3)],
        }
    return row


if __name__ == "__main__":
    run_main(main)
