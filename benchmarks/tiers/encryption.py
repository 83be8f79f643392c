"""This benchmark measures what encryption adds to the write and the read of a block on disk.

    OMP_NUM_THREADS=1 python -m benchmarks.tiers.encryption [--blocks 200] [--rounds 5]

Blocks of SmolLM2 in bfloat16 (368,640 bytes) are written to a tier's storage and read again, plain
and encrypted in turn. A figure is the median of the rounds, for one block. Writes
benchmarks/results/kv_encryption.json.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from tandem.engine.tiers.disk.manifest import HEADER_BYTES, RECORD_BYTES
from tandem.engine.tiers.disk.storage import DiskStorage
from tandem.engine.tiers.seal import Encrypted, Plain, Seal
from tandem.engine.tiers.storage import Entry
from tandem_bench.framework import RESULTS, Report, in_turn, medians, options, run_main

BLOCK_BYTES = 368_640


def measure(seal: Seal, num_blocks: int) -> dict[str, float]:
    """Returns the milliseconds that a block takes."""
    data = np.frombuffer(os.urandom(BLOCK_BYTES), np.uint8)
    target = np.empty_like(data)
    entries = [Entry(os.urandom(16), b"") for _ in range(num_blocks)]
    slot_bytes = BLOCK_BYTES + seal.num_extra_bytes + RECORD_BYTES
    with tempfile.TemporaryDirectory() as folder:
        storage = DiskStorage(
            Path(folder),
            bytes_max=HEADER_BYTES + num_blocks * slot_bytes,
            block_bytes=BLOCK_BYTES,
            identity="benchmark",
            seal=seal,
        )
        started = time.perf_counter()
        for slot, entry in enumerate(entries):
            storage.write(slot, entry, data)
        written = time.perf_counter()
        for slot, entry in enumerate(entries):
            storage.read(slot, entry.block_hash, target)
        read = time.perf_counter()
        storage.close()
    assert np.array_equal(target, data)
    return {
        "write_ms": (written - started) / num_blocks * 1000,
        "read_ms": (read - written) / num_blocks * 1000,
    }


@options
class Options:
    blocks: int = 200
    rounds: int = 5
    output: Path = RESULTS / "kv_encryption.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    seals: tuple[Seal, ...] = (Plain(), Encrypted([os.urandom(32)], "benchmark"))
    ways = {seal.name: partial(measure, seal, options.blocks) for seal in seals}
    taken = in_turn(ways, options.rounds, warm_up=0)
    found = {name: medians(rounds, 3) for name, rounds in taken.items()}
    report.write(block_bytes=BLOCK_BYTES, medians=found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    run_main(main)
