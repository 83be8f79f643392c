"""The engine process of a consumer under test: the bench's stand-in, with blocks in quarantine.

Real are the process, its ledger and its transfer thread. A sequence gets, at each place, the first
block of the place's group that nobody holds and that no read may still write.
"""

from __future__ import annotations

import os
from typing import cast

import numpy as np
import torch

from tandem.common.worker_load import WorkerLoad
from tandem.engine.cache.layout.pool_memory import size_shared
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Reserved, SequenceSpec
from tandem.errors import QueueFull
from tandem.transfer.cuda_ipc.agent import IpcDevice
from tandem.worker.engine_process.messages import EngineSettings
from tandem.worker.engine_process.pool_transfers import PoolTransfers
from tandem.worker.engine_process.process import main
from tandem_bench.engine_stand_in import PoolOnly, StandInEngine, StandInProcess
from tandem_bench.shared_memory_device import SharedMemoryDevice
from tests.service.transfer_pools import layout, scattered_blocks

# Seconds that each copy over CUDA IPC takes, so that failures happen during copies.
DEVICE_DELAY_S = 0.005


class PoolEngine(StandInEngine):
    def __init__(self) -> None:
        super().__init__(layout(), scattered_blocks(seed=2))
        self._quarantine: set[int] = set()

    def add(self, spec: SequenceSpec) -> None:
        taken = {block for table in self._tables.values() for block in table} | self._quarantine
        num_blocks = len(spec.token_ids) // self.layout.block_size
        free: list[list[int]] = [[] for _ in self.layout.groups]
        for block in reversed(self._order):
            if block not in taken:
                free[self._group(block)].append(block)
        groups = list(map(self._group, self._order[:num_blocks]))
        if any(groups.count(group) > len(blocks) for group, blocks in enumerate(free)):
            raise QueueFull(f"there are not {num_blocks} blocks")
        table = [free[group].pop() for group in groups]
        self._tables[spec.sequence_id] = table
        self._report.reserved = [*self._report.reserved, Reserved(spec.sequence_id, 0, table)]
        self._has_work = True

    def _group(self, block_id: int) -> int:
        return self.layout.locate(block_id)[0]

    def remove(self, sequence_id: str, unsafe_blocks: list[int]) -> None:
        self._tables.pop(sequence_id, None)
        self._quarantine.update(unsafe_blocks)

    def unquarantine(self, block_ids: list[int]) -> None:
        assert self._quarantine.issuperset(block_ids)
        self._quarantine.difference_update(block_ids)

    def load(self) -> WorkerLoad:
        return WorkerLoad(num_pulls=len(self._tables), blocks_quarantined=len(self._quarantine))

    def check_integrity(self) -> None:
        assert not self._tables, f"{list(self._tables)} are here"
        assert not self._quarantine, f"{len(self._quarantine)} blocks are in quarantine"


class ConsumerProcess(StandInProcess):
    def _load(
        self, settings: EngineSettings, load_ms: dict[str, float]
    ) -> tuple[ModelRunner, Engine, str]:
        torch.set_num_threads(settings.engine.num_threads)
        assert settings.pool_fd is not None, "the test must see the pool"
        self._device_fd = os.dup(settings.pool_fd)
        pages = size_shared(settings.pool_fd, layout().pool_bytes)
        self._memory = np.frombuffer(pages, np.uint8)
        kv = torch.from_numpy(self._memory)
        return cast(ModelRunner, PoolOnly(kv)), cast(Engine, PoolEngine()), "stand-in"

    def _pool_transfers(self) -> PoolTransfers:
        return PoolOfDevice(self)


class PoolOfDevice(PoolTransfers):
    def __init__(self, process: ConsumerProcess) -> None:
        super().__init__(process._runner.kv, process._engine.layout)
        self._ipc = SharedMemoryDevice(process._device_fd, process._memory, DEVICE_DELAY_S)

    def ipc_device(self) -> IpcDevice | None:
        return self._ipc


if __name__ == "__main__":
    main(ConsumerProcess)
