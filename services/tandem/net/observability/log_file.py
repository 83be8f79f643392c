"""The log file of a process of `tandem up`, rotated at a maximum size.

  ID.log -> ID.log.1 (the previous one is deleted), and a new ID.log

The process that was started with the file rotates it. Its child processes, such as the engine,
detect that the file was renamed and reopen it. The file descriptors of standard output and error
are replaced, so output of native code is included.
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

FILE_VARIABLE = "TANDEM_LOG_FILE"  # set by the process that started this one with the file
BYTES_MAX = 32 << 20
NO_FILE = "its log is no file of its own; on Kubernetes, `kubectl logs POD` prints a pod's"
PIECE_BYTES_MAX = 256 << 10  # limit for one read


def older(path: Path) -> Path:
    """Path to which a log is renamed when it is rotated."""
    return path.with_name(f"{path.name}.1")


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in a log: the inode of a file and an offset in it. Inode 0 is the start."""

    inode: int = 0
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the format of `str`; an empty text is the start. Raises BadRequest."""
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
    """Reads a log from a position. Returns the bytes and the position after them: b"" if there are
    none yet, complete lines if there are more than `bytes_max`.

    If the log was rotated meanwhile, the old file is read to its end, then the new one. If the file
    of the position no longer exists, the log is read from the start.
    """
    with ExitStack() as stack:
        opened: dict[int, BufferedReader] = {}
        for name in (path, older(path)):  # this order does not miss a concurrent rename
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
    """Logs to standard error, and rotates the file behind it if necessary."""

    def __init__(self, path: Path, bytes_max: int = BYTES_MAX) -> None:
        super().__init__()
        self._path = path
        self._bytes_max = bytes_max
        self._renames = os.getsid(0) == os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # for example a full disk: keep the old file
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
            # skips descriptors of pipes and other files
            if os.path.samestat(os.fstat(descriptor), ours):
                os.dup2(file, descriptor)
        os.close(file)
