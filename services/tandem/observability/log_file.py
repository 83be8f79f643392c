"""The file that standard output and error of a process of `tandem up` go to: it has a largest size.

    ID.log -> ID.log.1 (the one before is dropped), and a new ID.log

The process that was started with the file renames it; processes that it started, its engine for
one, find that the name is another file's and follow. What native code prints goes along, because
the descriptors themselves are replaced.
"""

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

FILE_VARIABLE = "TANDEM_LOG_FILE"  # set by whoever started the process with this file
BYTES_MAX = 32 << 20


def older(path: Path) -> Path:
    """Returns where the lines before those of a log are, if it has been renamed."""
    return path.with_name(f"{path.name}.1")


class LogFileHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error; before each record it looks at the file behind it."""

    def __init__(self, path: Path, bytes_max: int = BYTES_MAX) -> None:
        super().__init__()
        self._path = path
        self._bytes_max = bytes_max
        self._renames = os.getsid(0) == os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # such as a full disk: the old file goes on
            self._keep_small()
        super().emit(record)

    def _keep_small(self) -> None:
        ours = os.fstat(self.stream.fileno())
        if not stat.S_ISREG(ours.st_mode):
            return
        with suppress(FileNotFoundError):
            named = self._path.stat()
            if os.path.samestat(named, ours):
                if ours.st_size < self._bytes_max or not self._renames:
                    return
                self._path.rename(older(self._path))
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for descriptor in (1, 2):
            if os.path.samestat(os.fstat(descriptor), ours):  # and no pipe, for example
                os.dup2(file, descriptor)
        os.close(file)
