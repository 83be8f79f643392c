"""Finds the GPUs of a host, and assigns one to each worker process.

Each worker uses one GPU. The variable CUDA_VISIBLE_DEVICES of the worker's process names this GPU,
so CUDA shows no other GPU to the process. Otherwise a thread of the engine could use a wrong GPU by
mistake, because each thread has a current CUDA device of its own.

This module imports neither torch nor CUDA, and does not depend on pools.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile(r"\d+|(GPU|MIG)-\S+")  # an index, or the UUID of a GPU or a MIG instance
_DEVICE_FILE = re.compile(r"nvidia\d+")


def count_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> int:
    """Counts the GPUs that CUDA would show to a process with this environment.

    If CUDA_VISIBLE_DEVICES is set, the GPUs that it names are counted. Otherwise the device files
    /dev/nvidia0, /dev/nvidia1 and so on are counted, because a container may have fewer GPUs than
    the driver lists. If there are no device files, the driver's list is used, because some machines
    create the files only when the first program uses a GPU.
    """
    files = sum(_DEVICE_FILE.fullmatch(name) is not None for name in _names(root / "dev"))
    num_gpus = files or len(_names(root / "proc/driver/nvidia/gpus"))
    if (text := environment.get(VISIBLE)) is None:
        return num_gpus
    return len(_visible(text, num_gpus))


def with_gpu(environment: Mapping[str, str], gpu: int | None) -> dict[str, str]:
    """Builds the environment of a process that sees only this GPU of its host.

    If the host's CUDA_VISIBLE_DEVICES is set, `gpu` is an index into its list: with "4,5" and `gpu`
    1, the process gets "5". If `gpu` is None, the environment is unchanged.
    """
    if gpu is None:
        return dict(environment)
    text = environment.get(VISIBLE)
    return {**environment, VISIBLE: str(gpu) if text is None else _visible(text)[gpu]}


def least_used(
    num_gpus: Mapping[str, int], used: Iterable[tuple[str, int]]
) -> dict[str, tuple[int, int]]:
    """Finds the GPU with the fewest workers on each host that has GPUs.

    Returns host id -> (number of workers on that GPU, index of that GPU). `num_gpus` maps host ids
    to numbers of GPUs. `used` has the (host id, GPU index) of each worker.
    """
    uses = Counter(used)
    return {
        host_id: min((uses[host_id, gpu], gpu) for gpu in range(number))
        for host_id, number in num_gpus.items()
        if number
    }


def _visible(text: str, num_gpus: int = 0) -> list[str]:
    """Parses CUDA_VISIBLE_DEVICES. As in CUDA, the list ends before the first invalid entry:
    "0,1,-1,2" gives 0 and 1. If `num_gpus` is given, an index of `num_gpus` or more is invalid,
    too."""
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        is_absent = bool(num_gpus) and name.isdecimal() and int(name) >= num_gpus
        if not _NAME.fullmatch(name) or is_absent:
            break
        names.append(name)
    return names


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
