"""Finds the GPUs of a host, and assigns some to each worker process.

Each worker uses one GPU, or one for each of its tensor-parallel ranks. The variable
CUDA_VISIBLE_DEVICES of the worker's process names these GPUs, so CUDA shows no other GPU to the
process. Otherwise a thread of the engine could use a wrong GPU by mistake, because each thread has
a current CUDA device of its own.

This module imports neither torch nor CUDA, and does not depend on pools.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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


def with_gpus(environment: Mapping[str, str], gpus: Sequence[int]) -> dict[str, str]:
    """Builds the environment of a process that sees only these GPUs of its host.

    If the host's CUDA_VISIBLE_DEVICES is set, `gpus` are indices into its list: with "4,5" and the
    index 1, the process gets "5". If `gpus` is empty, the environment is unchanged.
    """
    if not gpus:
        return dict(environment)
    text = environment.get(VISIBLE)
    names = map(str, gpus) if text is None else (_visible(text)[gpu] for gpu in gpus)
    return {**environment, VISIBLE: ",".join(names)}


def least_used(
    num_gpus: Mapping[str, int], used: Iterable[tuple[str, int]], num_wanted: int = 1
) -> dict[str, tuple[int, list[int]]]:
    """Finds the `num_wanted` GPUs with the fewest workers on each host that has as many GPUs.

    Returns host id -> (largest number of workers on one of those GPUs, indices of those GPUs).
    `num_gpus` maps host ids to numbers of GPUs. `used` has the (host id, GPU index) of each worker,
    once for each of its GPUs.
    """
    uses = Counter(used)
    found = {}
    for host_id, number in num_gpus.items():
        if number >= num_wanted:
            pairs = sorted((uses[host_id, gpu], gpu) for gpu in range(number))[:num_wanted]
            found[host_id] = pairs[-1][0], sorted(gpu for _, gpu in pairs)
    return found


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
