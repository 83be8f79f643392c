"""Decode attention of one sequence at long contexts, for several block sizes.

    python -m benchmarks.engine.block_sizes [--sizes 16,32,64,128] [--contexts 2000,8000]
        [--layers 12]

In a block, the keys of one layer and KV head follow each other, and then the values. With blocks of
16 tokens, bf16 and 64 numbers a head, these are runs of 4 KiB. The benchmark compares:

N, scattered   blocks of N tokens, scattered over the pool
N, in order    the same blocks, in the order of their addresses
one            one block for the whole context. No layout of the pool has longer runs.
private        the pool is in memory of the process, which has huge pages if the system allows them.
               In all other kinds it is in a memfd, as a worker's is.

The model is a Llama with random weights, the heads of SmolLM2-135M and small other matrices. Steps
of all kinds take turns, with one thread. The times are CPU times, which other programs change less
than they change durations. The time of attention is that of a step, without the time of a step
with a context of one token. The speed is the median of the ratios of each turn to the first kind.
Writes benchmarks/results/block_sizes.json.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine.attention_threads import STEPS, Sequence
from benchmarks.shared.random_models import make_llama
from tandem.engine.cache.layout.pool_memory import create_shared
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

HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64


@options
class Options:
    sizes: str = "16,32,64,128"
    contexts: str = "2000,8000"
    layers: int = 12
    turns: int = 15
    output: Path = RESULTS / "block_sizes.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    contexts = numbers(options.contexts)
    rows = []
    with tempfile.TemporaryDirectory() as path:
        folder = make_llama(
            Path(path),
            hidden_size=HEADS * HEAD_SIZE,
            intermediate_size=64,
            num_hidden_layers=options.layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=max(contexts) + 1,
            tie_word_embeddings=True,
        )
        for context in contexts:
            rows += measure(folder, context, options)
    report.write(layers=options.layers, rows=rows)
    print(
        table(
            "context | blocks | attention, ms | speed | quartiles",
            (
                (
                    f"{row['context']:,}",
                    row["blocks"],
                    f"{row['attention_ms']:.2f}",
                    f"{row['speed']:.2f}",
                    " to ".join(f"{each:.2f}" for each in row["quartiles"]),
                )
                for row in rows
            ),
        )
    )


def measure(folder: ModelFolder, context: int, options: Options) -> list[dict[str, Any]]:
    """Returns a row for each kind of blocks."""
    sizes = numbers(options.sizes)
    whole = -(-context // sizes[-1]) * sizes[-1]
    kinds = {f"{size}, scattered": (size, True, False) for size in sizes}
    kinds[f"{sizes[0]}, in order"] = (sizes[0], False, False)
    kinds["one"] = (whole, True, False)
    kinds |= {f"{size}, scattered, private": (size, True, True) for size in (sizes[0], sizes[-1])}
    kinds["one, private"] = (whole, True, True)
    sequences = {
        name: Sequence(
            folder,
            "bfloat16",
            1,
            context,
            block_size=size,
            scattered=scattered,
            pool_fd=None if private else create_shared(),
        )
        for name, (size, scattered, private) in kinds.items()
    }
    ways = {name: partial(attention_s, each, context) for name, each in sequences.items()}
    taken = in_turn(ways, options.turns, warm_up=2)
    first = next(iter(taken.values()))
    rows = []
    for name, seconds in taken.items():
        speed = ratios(first, seconds)
        rows.append(
            {
                "context": context,
                "blocks": name,
                "attention_ms": round(1e3 * statistics.median(seconds), 3),
                "speed": round(speed.median, 3),
                "quartiles": [round(speed.low, 3), round(speed.high, 3)],
            }
        )
    return rows


def attention_s(sequence: Sequence, context: int) -> float:
    """Returns the CPU time of attention in a step: in the fastest of some."""
    return min(step_s(sequence, context) for _ in range(STEPS)) - min(
        step_s(sequence, 1) for _ in range(STEPS)
    )


def step_s(sequence: Sequence, context: int) -> float:
    began = time.process_time()
    sequence.logits(context)
    return time.process_time() - began


if __name__ == "__main__":
    run_main(main)
