"""This benchmark measures blocks in an object store: an object for each, or for a run of blocks.

    python -m benchmarks.tiers.objects [--blocks 64] [--runs 1 8] [--rounds 3]

Blocks of SmolLM2 in bfloat16 (368,640 bytes) are written to moto's server on this machine and read
again, 8 requests at a time. A figure is the median of the rounds, for one block. Writes
benchmarks/results/kv_objects.json.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import obstore

from benchmarks.tiers.object_store import ObjectStore
from tandem_bench.framework import RESULTS, Report, in_turn, medians, options, run_main

BLOCK_BYTES = 368_640


def measure(store: ObjectStore, run: int, num_blocks: int) -> dict[str, float]:
    """Returns the milliseconds that a block takes in objects of `run` blocks."""
    data, client = os.urandom(run * BLOCK_BYTES), store.client
    names = [f"{run}/{number}" for number in range(num_blocks // run)]
    with ThreadPoolExecutor(8) as threads:
        started = time.perf_counter()
        list(threads.map(lambda name: obstore.put(client, name, data), names))
        written = time.perf_counter()
        list(threads.map(lambda name: obstore.get(client, name).bytes(), names))
        read = time.perf_counter()
    return {
        "write_ms": (written - started) / num_blocks * 1000,
        "read_ms": (read - written) / num_blocks * 1000,
    }


@options
class Options:
    blocks: int = 64
    runs: tuple[int, ...] = (1, 8)
    """Blocks of an object."""
    rounds: int = 3
    output: Path = RESULTS / "kv_objects.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    with ObjectStore() as store:
        ways = {run: partial(measure, store, run, options.blocks) for run in options.runs}
        taken = in_turn(ways, options.rounds, warm_up=0)
    found = {run: medians(rounds, 2) for run, rounds in taken.items()}
    report.write(block_bytes=BLOCK_BYTES, by_blocks_of_object=found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    run_main(main)
