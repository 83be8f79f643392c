"""Makes workers on one card tune their kernels one after the other.

Two workers that tune at the same time would measure each other's load and choose slow tile sizes.
The second to write would also replace the first one's results in Triton's cache folder. With the
lock, the second worker finds the results of the first and measures nothing.

The lock is a file in the cache folder (TRITON_CACHE_DIR), so workers must share the folder. The
operating system releases it when a process dies.
"""

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from triton import knobs

from tandem.models.files import writing

log = logging.getLogger(__name__)

_CACHE_VARIABLE = "TRITON_CACHE_DIR"
# Tuning takes up to some minutes, most of it for compiling. A worker that waits longer than this
# tunes beside the other, which costs speed but no correctness.
_WAIT_S = 900.0
_POLL_S = 0.2


@contextmanager
def tuning_alone(device: torch.device) -> Iterator[None]:
    """Context manager that holds the lock of a card. Waits for the worker that holds it. On a CPU,
    it does nothing.

    Raises ConfigError if the cache folder cannot be written.
    """
    if device.type != "cuda":
        yield
        return
    card = str(torch.cuda.get_device_properties(device).uuid)
    with held(Path(knobs.cache.dir), card):
        yield


@contextmanager
def held(folder: Path, card: str, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Context manager that holds the lock of a card in the cache folder `folder`, or runs without
    it after `wait_s` seconds."""
    path = folder / f"tandem-tuning-{card}.lock"
    with writing(folder, _CACHE_VARIABLE):
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        _wait(file.fileno(), path, wait_s)
        yield


def _wait(descriptor: int, path: Path, wait_s: float) -> None:
    started = time.monotonic()
    is_waiting = False
    while not _try_to_lock(descriptor, path):
        if time.monotonic() >= started + wait_s:
            log.warning(
                "another worker has tuned its kernels on this card for more than %.0f s; tuning "
                "beside it, so kernels may be slower. Restart the worker that holds %s",
                wait_s,
                path,
            )
            return
        if not is_waiting:
            is_waiting = True
            log.info("waiting until another worker has tuned its kernels on this card")
        time.sleep(_POLL_S)


def _try_to_lock(descriptor: int, path: Path) -> bool:
    with writing(path.parent, _CACHE_VARIABLE):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
