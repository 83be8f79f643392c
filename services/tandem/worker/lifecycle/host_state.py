"""The host's fields in a worker's record: name, process, clock, memory and disks.

A separate thread reads the free disk space, because the read blocks if a network file system does
not answer.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.common.config.worker import WorkerConfig
from tandem.common.process.ticks import until_tick_s
from tandem.engine.memory import read_memory
from tandem.net.observability.log_file import FILE_VARIABLE

_LOOK_S = 5.0


class HostState:
    """The current state of the host. Figures of memory and disks are up to 1.5 * `_LOOK_S` old."""

    def __init__(self, config: WorkerConfig) -> None:
        self._folders = written_folders(*config.engine.tier_folders.values())
        self._disk = (0, 0)
        self._memory = read_memory()
        self._memory_read_at = time.monotonic()
        if self._folders:
            threading.Thread(target=self._look_for_ever, name="disks", daemon=True).start()

    def told(self) -> dict[str, Any]:
        """Returns the host's fields of the worker's record."""
        if (now := time.monotonic()) >= self._memory_read_at + _LOOK_S:
            self._memory = read_memory()
            self._memory_read_at = now
        disk_free_bytes, disk_total_bytes = self._disk
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "written_at": time.time(),
            "memory_free_bytes": self._memory.free_bytes,
            "memory_total_bytes": self._memory.total_bytes,
            "disk_free_bytes": disk_free_bytes,
            "disk_total_bytes": disk_total_bytes,
        }

    def _look_for_ever(self) -> None:
        while True:
            self._disk = fullest_disk(self._folders)
            time.sleep(until_tick_s(_LOOK_S))


def written_folders(*kv_paths: Path) -> list[Path]:
    """Returns the folders that a worker writes to: that of its log and those of its tiers."""
    log = os.environ.get(FILE_VARIABLE, "")
    return [*([Path(log).parent] if log else []), *kv_paths]


def fullest_disk(folders: Sequence[Path]) -> tuple[int, int]:
    """Returns (free, total) bytes of the file system with the smallest free fraction.

    Returns zeros if none of the folders exists.
    """
    found = []
    for folder in folders:
        try:
            disk = os.statvfs(folder)
        except OSError:
            continue
        found.append((disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize))
    return min((f for f in found if f[1]), key=lambda disk: disk[0] / disk[1], default=(0, 0))
