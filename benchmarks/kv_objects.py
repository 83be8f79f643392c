"""This benchmark measures blocks in an object store: an object for each, or for a run of blocks.

    python benchmarks/kv_objects.py [--blocks 64] [--runs 1 8] [--rounds 3]

Blocks of SmolLM2 in bfloat16 (368,640 bytes) are written to moto's server on this machine and read
again, 8 requests at a time. A figure is the median of the rounds, for one block. Writes
benchmarks/results/kv_objects.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.peers.machine import conditions
from tests.harness.object_store import ObjectStoreServer

RESULTS = Path(__file__).parent / "results" / "kv_objects.json"
BLOCK_BYTES = 368_640


def measure(server: ObjectStoreServer, run: int, num_blocks: int) -> dict[str, float]:
    """Returns the milliseconds that a block takes in objects of `run` blocks."""
    data, client = os.urandom(run * BLOCK_BYTES), server.client
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = ObjectStoreServer(Path(folder))
        try:
            rounds = [
                {run: measure(server, run, given.blocks) for run in given.runs}
                for _ in range(given.rounds)
            ]
        finally:
            server.kill()
    medians = {
        run: {
            what: round(statistics.median(each[run][what] for each in rounds), 2)
            for what in ("write_ms", "read_ms")
        }
        for run in given.runs
    }
    found = {"conditions": conditions(), "block_bytes": BLOCK_BYTES, "by_blocks_of_object": medians}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
