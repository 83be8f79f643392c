"""A process that loads a model and tells by how much that made it grow.

    python -m tests.unit.engine.load_growth MODEL DTYPE KERNELS TOKENS

Prints bytes of resident memory, private and mapped: those that stayed, without the pages of shared
libraries, and those at the peak, which the kernel keeps. With torch's kernels a step of TOKENS (up
to 64) belongs to it: what it does not use of a file is not there yet.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

from tandem.config.engine import EngineConfig
from tandem.engine.executor.heap import give_back_freed
from tandem.engine.executor.mxfp4 import Mxfp4
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.source import resolve

_FORGET_PEAK = "5"  # proc_pid_clear_refs(5)


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


def library_bytes() -> int:
    """Returns the resident bytes of shared libraries: code that ran for the first time, of which
    torch has several MB for a load, is no copy of a tensor."""
    total = 0
    in_library = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the first line of a mapping, which ends with its file
            in_library = ".so" in line
        elif in_library and name == "Rss:":
            total += int(values[0]) * 1024
    return total


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
    libraries = library_bytes()
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
    runner = ModelRunner(folder, config)
    if kernels == "torch":
        runner.allocate(4)
        num = int(tokens)
        runner.forward(StepBatch([SequenceSlice(list(range(1, num + 1)), num, [*range(4)], True)]))
        give_back_freed()
    grown = peak_bytes() - before
    gc.collect()
    stayed = resident_bytes() - before - (library_bytes() - libraries)
    print(stayed, grown)
    del runner


if __name__ == "__main__":
    main()
