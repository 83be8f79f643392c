"""The GPUs of a host: how many there are, which one a worker gets, and how its process sees it.

A worker computes on one GPU and sees no other: CUDA_VISIBLE_DEVICES of its process names that GPU.
Its engine asks for the device "cuda" in several threads, and CUDA keeps the current device by
thread, so a process with one visible GPU cannot compute on another by mistake.

This module asks neither torch nor CUDA, and knows no pool.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile(r"\d+|(GPU|MIG)-\S+")  # a number, or the UUID of a GPU or of a part of one
_DEVICE_FILE = re.compile(r"nvidia\d+")


def count_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> int:
    """Returns the number of GPUs that CUDA would show to a process with this environment.

    The variable CUDA_VISIBLE_DEVICES counts if it is set. Otherwise the device files count, because
    a container may have fewer of them than the driver lists. The driver's list is the last resort:
    on some machines the first program that uses a GPU makes the device files.
    """
    files = sum(_DEVICE_FILE.fullmatch(name) is not None for name in _names(root / "dev"))
    num_gpus = files or len(_names(root / "proc/driver/nvidia/gpus"))
    if (text := environment.get(VISIBLE)) is None:
        return num_gpus
    return len(_visible(text, num_gpus))


def with_gpu(environment: Mapping[str, str], gpu: int | None) -> dict[str, str]:
    """Returns the environment of a process that sees only this GPU of its host.

    `gpu` is an index into the host's own CUDA_VISIBLE_DEVICES, where `environment` has one, and a
    UUID stays one. With None nothing changes.
    """
    if gpu is None:
        return dict(environment)
    text = environment.get(VISIBLE)
    return {**environment, VISIBLE: str(gpu) if text is None else _visible(text)[gpu]}


def least_used(
    num_gpus: Mapping[str, int], used: Iterable[tuple[str, int]]
) -> dict[str, tuple[int, int]]:
    """Returns (number of workers, index) of the least used GPU of each host that has GPUs.

    `num_gpus` are those of each host, by its id, and `used` has (host id, index) of each worker.
    """
    uses = Counter(used)
    return {
        host_id: min((uses[host_id, gpu], gpu) for gpu in range(number))
        for host_id, number in num_gpus.items()
        if number
    }


def _visible(text: str, num_gpus: int = 0) -> list[str]:
    """Returns the GPUs that a value of CUDA_VISIBLE_DEVICES names. As for CUDA, the list ends at
    the first name that is none, such as -1, or a number that is too large where `num_gpus` is
    known."""
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
