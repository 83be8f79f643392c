"""A terminal as standard error, and the text written to it."""

from __future__ import annotations

import os
import pty
import sys
import threading
from typing import Self

import pytest

from tandem.common.process import progress


class Terminal:
    """Makes standard error a terminal within the context, where progress bars appear
    immediately."""

    def __init__(self) -> None:
        self._written = b""
        self._ours, theirs = pty.openpty()
        self._theirs = open(theirs, "w")  # noqa: SIM115
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        self._reader.start()
        self._patch.setattr(sys, "stderr", self._theirs)
        self._patch.setattr(progress, "SHOWN_AFTER_S", 0.0)
        self._patch.setenv("TERM", "xterm")
        self._patch.setenv("COLUMNS", "120")
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        self._theirs.close()
        self._reader.join(10)
        os.close(self._ours)

    @property
    def text(self) -> str:
        """The text that was written, including terminal control codes."""
        return self._written.decode(errors="replace")

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._ours, 4096)
            except OSError:  # the other side was closed
                return
            self._written += read
