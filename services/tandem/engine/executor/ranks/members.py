"""Starts the other ranks of an engine and watches them. Used by rank 0."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Pipe

from tandem.common.adapter import Adapter
from tandem.common.config.engine import EngineConfig
from tandem.common.process.endings import is_stopped
from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.ranks import messages
from tandem.errors import ConfigError, WorkerLost
from tandem.models.folder import ModelFolder
from tandem_kernels.native.library import RankEnded

log = logging.getLogger(__name__)

MODULE = "tandem.engine.executor.rank_program"
_END_S = 5.0  # longest time for a rank to end by itself
_LOOK_S = 1.0  # interval at which rank 0 looks whether another rank is stopped


class Members:
    """The processes of ranks 1 and up.

    A rank ends when rank 0 ends. If a rank ends first, `on_end` is called in a thread with a text
    that says how. If it returns, no rank waits for the ended one any more: every step raises
    RankEnded. A rank that is stopped for `config.rank_stopped_s_max` seconds is killed.
    """

    def __init__(
        self,
        folder: ModelFolder,
        config: EngineConfig,
        pool_fd: int,
        on_end: Callable[[str], object],
        service: messages.RankService | None = None,
    ) -> None:
        """Starts the processes. They load their share of the weights at the same time as rank 0.
        If `service` is given, each rank runs it when its pool is allocated. It must be a function
        that the rank can import. Raises ConfigError."""
        self.memory = RankMemory.create(config.tensor_parallel)
        self.tier_memory_fd = os.memfd_create("tandem-kv-tiers", os.MFD_CLOEXEC)
        self._on_end = on_end
        self._is_closed = self._has_ended = False
        self._loads = threading.Lock()  # one adapter at a time, so that answers find their thread
        self._ranks = [
            _Member(folder, config, rank, self.memory.fd, pool_fd, self.tier_memory_fd, service)
            for rank in range(1, config.tensor_parallel)
        ]

    @property
    def service_pipes(self) -> list[messages.RankPipe]:
        """Rank 0's ends of the pipes of `service`, of ranks 1 and up."""
        return [member.service_pipe for member in self._ranks]

    @property
    def tier_pipes(self) -> list[messages.RankPipe]:
        """Rank 0's ends of the pipes of the copies of tiers, of ranks 1 and up."""
        return [member.tier_pipe for member in self._ranks]

    def wait_until_loaded(self) -> None:
        """Waits until all ranks have loaded their weights. Raises ConfigError, or WorkerLost if a
        rank ends. From then on, `on_end` is called if a rank ends."""
        for member in self._ranks:
            member.answer()
        for member in self._ranks:
            member.end_text.add_done_callback(self._report_end)

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

    def _report_end(self, end_text: Future[str]) -> None:
        if self._is_closed:
            return
        self._has_ended = True
        log.error("%s, so the engine cannot compute any more", end_text.result())
        try:
            self._on_end(end_text.result())
        finally:
            self.memory.break_up()


class _Member:
    """One process, and rank 0's end of its pipe."""

    def __init__(
        self,
        folder: ModelFolder,
        config: EngineConfig,
        rank: int,
        memory_fd: int,
        pool_fd: int,
        tier_memory_fd: int,
        service: messages.RankService | None,
    ) -> None:
        self.rank = rank
        self._stopped_s_max = config.rank_stopped_s_max
        self.end_text: Future[str] = Future()  # how the process ended; set when it has ended
        self.pipe, others = Pipe()
        self.service_pipe, others_service = Pipe()
        self.tier_pipe, others_tier = Pipe()
        fds = (others.fileno(), others_service.fileno(), others_tier.fileno())
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(others.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=(*fds, memory_fd, pool_fd, tier_memory_fd),
        )
        settings = messages.Settings(
            folder,
            config,
            rank,
            memory_fd,
            pool_fd,
            others_service.fileno(),
            service,
            tier_memory_fd,
            others_tier.fileno(),
        )
        for end in (others, others_service, others_tier):
            end.close()
        pidfd = os.pidfd_open(self.process.pid)
        threading.Thread(target=self._watch, args=(pidfd,), name="watch-rank", daemon=True).start()
        self._send(settings)

    def load(self, adapter: Adapter) -> None:
        self._send(messages.LoadAdapter(adapter))

    def answer(self) -> None:
        """Waits for the rank's answer. Raises ConfigError with its error, or WorkerLost if the
        rank ends."""
        try:
            found = self.pipe.recv()
        except (EOFError, OSError):
            raise WorkerLost(
                f"{self.end_text.result()} during loading; earlier lines of this log may say why"
            ) from None
        if found.error:
            raise ConfigError(found.error)

    def _watch(self, pidfd: int) -> None:
        """Waits until the process ends, and kills it if it is stopped for too long. `pidfd` is
        readable when the process has ended; this method closes it."""
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        # The time is counted in looks, not read from a clock. If all processes are stopped for a
        # while, as by Ctrl-Z, no look happens.
        stopped_s = 0.0
        while stopped_s < self._stopped_s_max and not poll.poll(_LOOK_S * 1000):
            stopped_s = stopped_s + _LOOK_S if is_stopped(self.process.pid) else 0.0
        os.close(pidfd)
        if stopped_s < self._stopped_s_max:
            how = f"ended with status {self.process.wait()}"
        else:
            self.process.kill()
            self.process.wait()
            how = f"does not answer: its process was stopped (SIGSTOP) for {stopped_s:g} s"
        self.end_text.set_result(f"rank {self.rank} of the engine {how}")

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the rank has ended, as `answer` notices
            self.pipe.send(message)

    def end(self) -> None:
        self.pipe.close()
        self.service_pipe.close()
        self.tier_pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
            return
        self.process.kill()
        self.process.wait()
