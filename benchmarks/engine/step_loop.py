"""Measures the part of a decode step outside its compiled code: scheduling, inputs, sampling, the
report.

    python -m benchmarks.engine.step_loop [--threads 2] [--batches 1,8,32]

One engine in this process, as a worker runs it, without a network: so many sequences of 256 tokens
decode together, greedily. Medians over the steps, in ms; the share is of the whole step. Writes
benchmarks/results/step_loop.json and prints the table of docs/measurements.md.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.shared.engines import first_tokens, make_engine, sequence
from benchmarks.shared.requests import random_prompt
from tandem.engine.cache.layout.pool_memory import populate
from tandem.engine.engine import Engine
from tandem.engine.executor.native.decoder import NativeDecoder
from tandem_bench.framework import RESULTS, Report, numbers, options, run_main, table

PROMPT, WARM_UP = 256, 20


@options
class Options:
    threads: int = 2
    batches: str = "1,8,32"
    steps: int = 200
    output: Path = RESULTS / "step_loop.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    engine = make_engine(num_threads=options.threads, itl_target_s=0.0)
    runner = engine._runner
    decoder = runner.native
    assert decoder is not None, "this machine has no compiled kernels"
    populate(runner.kv.data_ptr(), runner.kv.nbytes).join()
    rows = [measure(engine, decoder, batch, options.steps) for batch in numbers(options.batches)]
    report.write(threads=options.threads, rows=rows)
    print(
        table(
            "batch | step | compiled code | the loop | share",
            (
                (
                    row["batch"],
                    *(f"{row[name]:.2f} ms" for name in ("step_ms", "compiled_ms", "loop_ms")),
                    f"{row['share']:.1%}",
                )
                for row in rows
            ),
        )
    )


def measure(engine: Engine, decoder: NativeDecoder, batch: int, steps: int) -> dict[str, Any]:
    rng, names = Random(batch), [f"{batch}-{number}" for number in range(batch)]
    for name in names:
        engine.add(sequence(name, random_prompt(rng, PROMPT), 10 * steps))
    first_tokens(engine, names)
    taken = []
    for _ in range(WARM_UP + steps):
        decoder.take_stages()
        began = time.perf_counter()
        report = engine.step()
        whole = time.perf_counter() - began
        assert len(report.new_tokens) == batch
        taken.append((whole, sum(decoder.take_stages().values())))
    for name in names:
        engine.remove(name)
    engine.step()
    taken = taken[WARM_UP:]
    return {
        "batch": batch,
        "step_ms": round(1e3 * statistics.median(whole for whole, _ in taken), 3),
        "compiled_ms": round(1e3 * statistics.median(inside for _, inside in taken), 3),
        "loop_ms": round(1e3 * statistics.median(whole - inside for whole, inside in taken), 3),
        "share": round(statistics.median(1 - inside / whole for whole, inside in taken), 4),
    }


if __name__ == "__main__":
    run_main(main)
