"""Decode with a quantized KV cache beside one of bfloat16: capacity, and speed at long contexts.

    python -m benchmarks.engine.kv_formats [--formats int8,k8v4,int4] [--contexts 2000,8000]
    python -m benchmarks.engine.kv_formats --model random-deepseek --output FILE

`random-deepseek` is a random model with latent attention (latent_model.py).

Each sequence's blocks lie scattered over its pool. For each context steps with both pools take
turns; the figure is the median of the ratios of each turn, with the quartiles beside it. The bound
is what reading memory alone would give: the bytes of weights and of KV with bfloat16, divided by
those with the format. Writes benchmarks/results/kv_formats.json.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.engine import latent_model
from tandem.common.config.engine import EngineConfig
from tandem.engine.cache.layout.kv_groups import model_layout
from tandem.engine.cache.layout.pool_memory import populate
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.config.model import ModelConfig
from tandem.models.folder import ModelFolder
from tandem.models.shape import num_parameters
from tandem.models.source import resolve
from tandem_bench.framework import (
    RESULTS,
    Report,
    in_turn,
    numbers,
    options,
    ratios,
    run_main,
    table,
    words,
)

PLAIN = "bfloat16"
WARM_UP = 3
STEPS = 3  # of a pool, before it is the other one's turn


@options
class Options:
    model: str = "smollm2"
    formats: str = "int8"
    contexts: str = "2000,8000"
    batch: int = 1
    threads: int = 1
    turns: int = 40
    output: Path = RESULTS / "kv_formats.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    is_random = options.model == latent_model.NAME
    folder = resolve(str(latent_model.latent_model()) if is_random else options.model)
    contexts = numbers(options.contexts)
    plain = Pool(folder, PLAIN, max(contexts), options.batch, options.threads)
    rows = []
    for kv_dtype in words(options.formats):
        other = Pool(folder, kv_dtype, max(contexts), options.batch, options.threads)
        rows += [compare(plain, other, context, options.turns) for context in contexts]
    report.write(model=options.model, threads=options.threads, rows=rows)
    print(
        table(
            "KV | batch | context | capacity | bf16, ms | ms | speed | quartiles | bound by bytes",
            (
                (
                    row["kv_dtype"],
                    row["batch"],
                    f"{row['context']:,}",
                    f"{row['capacity']:.2f}",
                    f"{row['plain_ms']:.2f}",
                    f"{row['ms']:.2f}",
                    f"{row['speed']:.3f}",
                    " to ".join(f"{quartile:.3f}" for quartile in row["quartiles"]),
                    f"{row['bound']:.2f}",
                )
                for row in rows
            ),
        )
    )


class Pool:
    """A model and its pool of one format, whose blocks hold the KV of random tokens."""

    def __init__(
        self, folder: ModelFolder, kv_dtype: str, context: int, batch: int, threads: int
    ) -> None:
        config = EngineConfig(
            model="",
            device="cpu",
            dtype="bfloat16",
            kv_dtype=kv_dtype,  # type: ignore[arg-type]
            num_threads=threads,
        )
        self.kv_dtype = kv_dtype
        self.batch = batch
        self._runner = ModelRunner(folder, config)
        size = config.block_size
        self._each = -(-context // size)
        self._runner.allocate(batch * self._each)
        populate(self._runner.kv.data_ptr(), self._runner.kv.nbytes).join()
        self._blocks = list(range(batch * self._each))
        Random(1).shuffle(self._blocks)
        layout = model_layout(folder.config, block_size=size, dtype=kv_dtype)
        self.token_bytes = layout.block_bytes / size
        decoder = self._runner.native
        assert decoder is not None, "this machine has no compiled kernels"
        self._decoder = decoder
        for first in range(0, context, 512):
            end = min(context, first + 512)
            tokens = Random(first).choices(range(100, 40_000), k=end - first)
            self._forward([SequenceSlice(tokens, end, table, False) for table in self._tables()])
        self.weight_bytes = 2.0 * _num_read(folder.config)

    def _tables(self) -> list[list[int]]:
        return [self._blocks[i * self._each : (i + 1) * self._each] for i in range(self.batch)]

    def _forward(self, slices: list[SequenceSlice]) -> None:
        self._decoder.forward(StepBatch(slices), self._runner.pools)

    def decode_s(self, context: int) -> float:
        """Returns the seconds of a step that decodes the last token of so many."""
        slices = [SequenceSlice([1000], context, table, True) for table in self._tables()]
        taken = []
        for _ in range(STEPS):
            began = time.perf_counter()
            self._forward(slices)
            taken.append(time.perf_counter() - began)
        return min(taken)


def _num_read(model: ModelConfig) -> int:
    """Returns how many parameters a step of one token reads."""
    experts = [layer.experts for layer in model.layers if layer.experts is not None]
    idle = sum((each.num - each.top_k) * 3 * each.inner for each in experts)
    embedding = 0 if model.tie_word_embeddings else model.vocab_size
    return num_parameters(model) - (idle + embedding) * model.hidden_size


def compare(plain: Pool, other: Pool, context: int, turns: int) -> dict[str, Any]:
    ways = {pool: partial(pool.decode_s, context) for pool in (plain, other)}
    taken = in_turn(ways, turns, warm_up=WARM_UP)
    speed = ratios(taken[plain], taken[other])
    kv = plain.batch * context
    bytes_read = [p.weight_bytes + kv * p.token_bytes for p in (plain, other)]
    return {
        "kv_dtype": other.kv_dtype,
        "batch": plain.batch,
        "context": context,
        "capacity": plain.token_bytes / other.token_bytes,
        "plain_ms": 1000 * statistics.median(taken[plain]),
        "ms": 1000 * statistics.median(taken[other]),
        "speed": speed.median,
        "quartiles": [speed.low, speed.high],
        "bound": bytes_read[0] / bytes_read[1],
    }


if __name__ == "__main__":
    run_main(main)
