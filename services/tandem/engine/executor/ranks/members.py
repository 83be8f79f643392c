"""Starts the other ranks of an engine and watches them. Used by rank 0."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from tandem.common.adapter import Adapter
from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.ranks import messages
from tandem.errors import ConfigError, WorkerLost
from tandem.models.folder import ModelFolder
from tandem_kernels.native.library import RankEnded

log = logging.getLogger(__name__)

MODULE = "tandem.engine.executor.rank_program"
_END_S = 5.0  # longest time for a rank to end by itself


class Members:
    """The processes of ranks 1 and up.

    A rank ends when rank 0 ends. If a rank ends first, `on_end` is called in a thread. If it
    returns, no rank waits for the ended one any more: every step raises RankEnded.
    """

    def __init__(
        self,
        folder: ModelFolder,
        config: EngineConfig,
        pool_fd: int,
        on_end: Callable[[str], object],
    ) -> None:
        """Starts the processes. They load their share of the weights at the same time as rank 0.
        Raises ConfigError."""
        self.memory = RankMemory.create(config.tensor_parallel)
        self._on_end = on_end
        self._is_closed = self._has_ended = False
        self._loads = threading.Lock()  # one adapter at a time, so that answers find their thread
        self._ranks = [
            _Member(messages.Settings(folder, config, rank, self.memory.fd, pool_fd))
            for rank in range(1, config.tensor_parallel)
        ]

    def wait_until_loaded(self) -> None:
        """Waits until all ranks have loaded their weights, and watches them from then on. Raises
        ConfigError, or WorkerLost if a rank ends."""
        for member in self._ranks:
            member.answer()
        for member in self._ranks:
            threading.Thread(
                target=self._watch, args=(member,), name="watch-rank", daemon=True
            ).start()

    def load_adapter(self, adapter: Adapter) -> None:
        """Loads an adapter in all ranks, in any thread. Raises ConfigError, or WorkerLost if a rank
        ends."""
        with self._loads:
            for member in self._ranks:
                member.load(adapter)
            for member in self._ranks:
                member.answer()

    def check(self) -> None:
        """Raises RankEnded if a rank has ended. The results of the last step may be wrong then."""
        if self._has_ended:
            raise RankEnded("a rank of the tensor-parallel engine has ended")

    def close(self) -> None:
        """Ends the processes."""
        self._is_closed = True
        self.memory.break_up()
        for member in self._ranks:
            member.end()

    def _watch(self, member: _Member) -> None:
        status = member.process.wait()
        if self._is_closed:
            return
        self._has_ended = True
        text = f"rank {member.rank} of the engine ended with status {status}"
        log.error("%s, so the engine cannot compute any more", text)
        try:
            self._on_end(text)
        finally:
            self.memory.break_up()


class _Member:
    """One process, and rank 0's end of its pipe."""

    def __init__(self, settings: messages.Settings) -> None:
        self.rank = settings.rank
        self.pipe: Connection[Any, Any]
        self.pipe, others = Pipe()
        fds = (others.fileno(), settings.memory_fd, settings.pool_fd)
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(others.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
        )
        others.close()
        self._send(settings)

    def load(self, adapter: Adapter) -> None:
        self._send(messages.LoadAdapter(adapter))

    def answer(self) -> None:
        """Waits for the rank's answer. Raises ConfigError with its error, or WorkerLost if the
        rank ends."""
        try:
            found = self.pipe.recv()
        except (EOFError, OSError):
            status = self.process.wait()
            raise WorkerLost(
                f"rank {self.rank} of the engine ended with status {status} while it loaded; lines "
                "before this one may say why"
            ) from None
        if found.error:
            raise ConfigError(found.error)

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the rank has ended, as `answer` notices
            self.pipe.send(message)

    def end(self) -> None:
        self.pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
            return
        self.process.kill()
        self.process.wait()
