"""The log file of a process of `tandem up`, rotated at a maximum size.

A rotation renames ID.log to ID.log.1, which replaces the previous ID.log.1, and creates a new
ID.log.

`tandem up` starts each process with a log file as standard output and error. This process rotates
the file. The child processes of this process, such as the engine, detect the rename and open the
new file. Each process replaces the file descriptors 1 and 2, so the output of native code also goes
to the new file.
"""

import logging
import os
import re
import stat
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Self

from tandem.errors import BadRequest

# Name of the environment variable that has the path of the process's log file.
FILE_VARIABLE = "TANDEM_LOG_FILE"
BYTES_MAX = 32 << 20
NO_FILE = "this worker has no log file; on Kubernetes, `kubectl logs POD` prints its log"
PIECE_BYTES_MAX = 256 << 10  # `read_piece` returns at most this many bytes by default


def older(path: Path) -> Path:
    """Returns the path that the log file at `path` gets when it is rotated."""
    return path.with_name(f"{path.name}.1")


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in a log: the inode of one of the log's files and an offset in this file. Inode 0
    means the start of the log."""

    inode: int = 0
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text that `str` returns for a position. An empty text means the start of the
        log. Raises BadRequest for any other text."""
        if not text:
            return cls()
        if not (found := re.fullmatch(r"(\d{1,20})-(\d{1,18})", text, re.ASCII)):
            message = (
                f"after is {text[:80]!r}; it must be the `after` of the previous answer, or empty"
            )
            raise BadRequest(message, param="after")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.inode}-{self.offset}"


def read_piece(
    path: Path, after: LogPosition, bytes_max: int = PIECE_BYTES_MAX
) -> tuple[bytes, LogPosition]:
    """Reads at most `bytes_max` bytes of a log from the position `after`. Returns the bytes and the
    position for the next call. The bytes are b"" if the log has no more bytes yet. If the log has
    more than `bytes_max` bytes, the result ends with a complete line.

    A log has up to two files. If the position is in the older file, repeated calls first read the
    rest of the older file, and then the newer file. If the file of the position no longer exists,
    the result begins with the start of the older file.
    """
    with ExitStack() as stack:
        opened: dict[int, BufferedReader] = {}
        # The newer file is opened first. If a rotation renames the newer file before the older one
        # is opened, the same file is opened twice, but no file is missed.
        for name in (path, older(path)):
            with suppress(FileNotFoundError):
                file = stack.enter_context(name.open("rb"))
                opened.setdefault(os.fstat(file.fileno()).st_ino, file)
        files = list(opened.items())[::-1]
        inodes = [inode for inode, _ in files]
        first = 0
        offset = 0
        if after.inode in inodes:
            first = inodes.index(after.inode)
            offset = after.offset
        for inode, file in files[first:]:
            file.seek(offset if offset <= os.fstat(file.fileno()).st_size else 0)
            start = file.tell()
            text = file.read(bytes_max)
            if len(text) == bytes_max:
                text = text[: text.rfind(b"\n") + 1] or text
            if text:
                return text, LogPosition(inode, start + len(text))
            offset = 0
        return b"", LogPosition(inodes[-1], start) if files else after


class LogFileHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Logs to standard error. If standard error is a log file that has become too large, the
    handler rotates the file."""

    def __init__(self, path: Path, bytes_max: int = BYTES_MAX) -> None:
        super().__init__()
        self._path = path
        self._bytes_max = bytes_max
        self._renames = os.getsid(0) == os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # on an error, such as a full disk, the old file stays in use
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
            # A descriptor of a pipe or of another file is not replaced.
            if os.path.samestat(os.fstat(descriptor), ours):
                os.dup2(file, descriptor)
        os.close(file)
