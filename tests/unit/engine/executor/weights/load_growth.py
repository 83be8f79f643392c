"""A process that loads a model and tells by how much that made it grow.

    python -m tests.unit.engine.executor.weights.load_growth MODEL DTYPE KERNELS TOKENS

Prints bytes of resident memory, private and mapped: those that stayed, and those at the peak, which
the kernel keeps. With torch's kernels a step of TOKENS (up to 64) belongs to it: what it does not
use of a file is not there yet.

Code that runs for the first time, of which torch has several MB for a load, is no copy of a tensor:
all pages of shared libraries are made resident before. Where a processor multiplies bfloat16, torch
compiles a product for each number of rows and keeps up to 1,024 of them (20 MB), whatever the model
is: here it keeps 16.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "16"  # torch reads it at its first product

import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.weights.mxfp4 import Mxfp4
from tandem.engine.executor.weights.released_memory import release_freed_memory
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.source import resolve

_FORGET_PEAK = "5"  # proc_pid_clear_refs(5)
_POPULATE_READ = 22  # madvise(2), Linux 5.14


def resident_bytes() -> int:
    return _bytes_of("/proc/self/smaps_rollup", "Rss:")


def peak_bytes() -> int:
    """Returns the most resident bytes since the peak was forgotten."""
    return _bytes_of("/proc/self/status", "VmHWM:")


def _bytes_of(file: str, name: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{file} has no {name}")


def populate_libraries() -> None:
    """Makes all pages of the shared libraries resident that are loaded by now."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        if ".so" not in line or not rights.startswith("r"):
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        if madvise(start, end - start, _POPULATE_READ):
            raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: {line}")


def main() -> None:
    """Loads with as few blocks of KV as a pool may have."""
    model, dtype, kernels, tokens = sys.argv[1:]
    config = EngineConfig(
        model=model, dtype=dtype, kernels=kernels, device="cpu", num_blocks=4, num_threads=1
    )
    folder = resolve(model)
    torch.ones(64, 64) @ torch.ones(64, 64)  # what torch itself needs, here and below
    Mxfp4(torch.ones(2, 4, 1, 16).byte(), torch.ones(2, 4, 1).byte()).blocks()
    torch.cat((torch.ones(4, 4), torch.ones(4, 4))).bfloat16().float().contiguous()
    torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
    gc.collect()
    populate_libraries()
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
    runner = ModelRunner(folder, config)
    if kernels == "torch":
        num = int(tokens)
        table, *others = ([*range(4)] for _ in runner.layout().groups)
        runner.allocate(*[4] * (1 + len(others)))
        ids = list(range(1, num + 1))
        runner.forward(StepBatch([SequenceSlice(ids, num, table, True, other_tables=others)]))
        release_freed_memory()
    grown = peak_bytes() - before
    gc.collect()
    stayed = resident_bytes() - before
    print(stayed, grown)
    del runner


if __name__ == "__main__":
    main()
