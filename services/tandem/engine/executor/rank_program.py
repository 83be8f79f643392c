"""The program of ranks 1 and up. It computes the steps that rank 0 posts, and moves blocks."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tandem.engine.cache.layout.pool_memory import map_shared
from tandem.engine.executor.native.decoder import SentStep
from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.ranks import messages
from tandem.engine.executor.ranks.cores import pin_to_share
from tandem.engine.executor.ranks.tier_copies import CopyServer
from tandem.engine.executor.runner import LoadedAdapter, ModelRunner
from tandem.engine.scheduler.batch import StepBatch
from tandem.errors import TandemError
from tandem_kernels.native.library import RankEnded

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class Member:
    """One rank: its share of the model, and the adapters that are loaded but not yet added."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        settings: messages.Settings = pipe.recv()
        self._config = settings.config
        pin_to_share(settings.config, settings.rank)
        self._memory = RankMemory(
            settings.memory_fd, rank=settings.rank, num_ranks=settings.config.tensor_parallel
        )
        self._runner = ModelRunner(
            settings.folder, settings.config, pool_fd=settings.pool_fd, member_of=self._memory
        )
        self.rank = settings.rank
        self._service = settings.service
        self._service_pipe: Connection[Any, Any] = Connection(settings.service_fd)
        self._tier_memory_fd = settings.tier_memory_fd
        self._tier_pipe: Connection[Any, Any] = Connection(settings.tier_fd)
        self._copies: CopyServer | None = None  # of the KV tiers
        self._loaded: dict[str, LoadedAdapter] = {}

    def run(self) -> None:
        """Computes steps until rank 0 ends. Raises RankEnded."""
        threading.Thread(target=self._load_adapters, name="adapters", daemon=True).start()
        self._pipe.send(messages.Loaded())
        for message in self._memory.messages():
            match message.content:
                case SentStep() as step:
                    self._runner.compute_share(step, message.numbers_address)
                case StepBatch() as batch:
                    self._runner.forward(batch)
                case messages.Allocate(num_blocks):
                    self._runner.allocate(*num_blocks)
                    self._start_service()
                case messages.Measure(step_tokens):
                    self._runner.with_pool_size(self._config, step_tokens)
                case messages.CopyBlocks(copies):
                    self._runner.copy_blocks(copies)
                case messages.ReadBlocks(block_ids):
                    self._runner.blocks.collect(block_ids)
                case messages.WriteBlocks(block_ids):
                    num_bytes = self._runner.blocks.num_bytes(block_ids)
                    data = (ctypes.c_uint8 * num_bytes).from_address(message.numbers_address)
                    self._runner.blocks.distribute(block_ids, np.ctypeslib.as_array(data))
                case messages.ServeTiers(num_bytes):
                    self._serve_tiers(num_bytes)
                case messages.MarkWork(number):
                    assert self._copies is not None
                    self._copies.mark(number)
                case messages.AddAdapter(digest):
                    self._runner.add_adapter(self._loaded.pop(digest))
                case messages.DropAdapter(digest):
                    self._runner.drop_adapter(digest)

    def _start_service(self) -> None:
        if self._service is not None:
            arguments = (self._runner, self._service_pipe)
            threading.Thread(target=self._service, args=arguments, daemon=True).start()

    def _serve_tiers(self, num_bytes: int) -> None:
        memory = np.frombuffer(map_shared(self._tier_memory_fd, num_bytes), np.uint8)
        self._copies = self._runner.copy_server(memory)
        self._copies.start(self._tier_pipe)

    def _load_adapters(self) -> None:
        """Loads adapters while steps run. Ends the process when rank 0 has ended."""
        while True:
            try:
                message: messages.LoadAdapter = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            try:
                loaded = self._runner.load_adapter(message.adapter)
                self._loaded[loaded.weights.digest] = loaded
                self._pipe.send(messages.Loaded())
            except TandemError as error:
                self._pipe.send(messages.Loaded(str(error)))
            except Exception as error:  # rank 0 would wait forever if this thread ended
                self._pipe.send(messages.Loaded(f"rank {self._memory.rank}: {error!r}"))


def main() -> int:
    pipe_fd, parent_pid = map(int, sys.argv[1:])
    # A rank ends with rank 0: the system kills it, also if it is stopped.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If rank 0 died before prctl, perhaps during the import of torch, no SIGKILL comes.
    if os.getppid() != parent_pid:
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    # Like all processes of a worker, writes the stacks of its threads instead of being killed.
    faulthandler.register(signal.SIGUSR2)
    logging.basicConfig(level=logging.ERROR)  # rank 0 logs what all ranks would say
    pipe: Connection[Any, Any] = Connection(pipe_fd)
    try:
        member = Member(pipe)
    except TandemError as error:
        pipe.send(messages.Loaded(str(error)))
        return 1
    try:
        member.run()
    except RankEnded:
        return 0
    except TandemError as error:
        log.error("rank %s: %s", member.rank, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
