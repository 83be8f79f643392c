"""The log file of a process of `tandem up`, rotated at a maximum size.

A rotation renames ID.log to ID.log.1, which replaces the previous ID.log.1, and creates a new
ID.log.

`tandem up` starts a process with a log file as standard output and error. The process started by
`tandem up` rotates the file. Child processes of that process, such as the engine, detect the rename
and open the new file. Each process replaces the file descriptors 1 and 2, so the output of native
code also goes to the new file.
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

FILE_VARIABLE = "TANDEM_LOG_FILE"  # environment variable with the path of the process's log file
BYTES_MAX = 32 << 20
NO_FILE = "its log is no file of its own; on Kubernetes, `kubectl logs POD` prints a pod's"
PIECE_BYTES_MAX = 256 << 10  # default of the maximum number of bytes that `read_piece` returns


def older(path: Path) -> Path:
    """Returns the path to which the log at `path` is renamed by a rotation."""
    return path.with_name(f"{path.name}.1")


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in a log: the inode of a file and an offset in that file. Inode 0 means the start
    of the log."""

    inode: int = 0
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text that `str` returns for a position. An empty text means the start of the
        log. Raises BadRequest."""
        if not text:
            return cls()
        if not (found := re.fullmatch(r"(\d{1,20})-(\d{1,18})", text, re.ASCII)):
            message = f"{text[:80]!r} is no place in a log; give back what the answer before had"
            raise BadRequest(message, param="after")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.inode}-{self.offset}"


def read_piece(
    path: Path, after: LogPosition, bytes_max: int = PIECE_BYTES_MAX
) -> tuple[bytes, LogPosition]:
    """Reads at most `bytes_max` bytes of a log from a position. Returns the bytes and the position
    after them. The bytes are b"" if the log has no more yet. If the log has more than `bytes_max`,
    the result ends with a complete line.

    A log has up to two files. If the position is in the renamed file, the calls read that file to
    its end, and then the new file from its start. If the file of the position no longer exists, the
    log is read from the start of the older file.
    """
    with ExitStack() as stack:
        opened: dict[int, BufferedReader] = {}
        # The newer file is opened first. If a rotation renames it between the two steps, the second
        # step finds it again, so no file is missed.
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
    """Logs to standard error. If standard error is a log file, the handler rotates that file when
    it is too large."""

    def __init__(self, path: Path, bytes_max: int = BYTES_MAX) -> None:
        super().__init__()
        self._path = path
        self._bytes_max = bytes_max
        self._renames = os.getsid(0) == os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # On an error, such as a full disk, the old file stays in use.
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
            # Only a descriptor of the old log file is replaced, not one of a pipe or of another
            # file.
            if os.path.samestat(os.fstat(descriptor), ours):
                os.dup2(file, descriptor)
        os.close(file)
