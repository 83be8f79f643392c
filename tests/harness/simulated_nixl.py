"""NIXL as hostile as its contract allows: bytes land block by block, whenever the test says so.

It stands where `NixlAgent` does, under the real reader, fence and transfer thread. A read cannot be
taken back: it lands after its handle was released, after it was reported as failed and after its
source is gone. Only closing the agent ends it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.engine import sequence
from services.errors import WorkerLost
from services.transfer.descriptors import Span
from services.transfer.nixl_agent import ReadState

Copy = tuple[int, int]  # source address, local address, of one block


@dataclass(eq=False)
class SimulatedRead:
    waiting: list[Copy]
    failed: bool = False
    is_seen: bool = False  # by the checks, which then note whose it is
    owner: sequence.Sequence | None = None


@dataclass
class SimulatedFabric:
    """All that agents share: who may be read, and how blocks are cut."""

    block_bytes: int
    unreachable: set[str] = field(default_factory=set)  # peers that reads cannot be started from


class SimulatedAgent:
    """services.transfer.nixl_agent.NixlAgent, over memory of this process."""

    def __init__(self, fabric: SimulatedFabric, name: str) -> None:
        self.name = name
        self.reads: dict[int, SimulatedRead] = {}  # by handle; what may still land stays here
        self.is_closed = False
        self._fabric = fabric
        self._next_handle = 0

    def register(self, *, address: int, num_bytes: int, device_id: int, memory: str) -> None:
        assert not self.is_closed

    def add_peer(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_peer(self, name: str) -> None:
        assert not self.is_closed

    def create_read(
        self,
        peer: str,
        *,
        source: Sequence[Span],
        source_device: tuple[str, int],
        local: Sequence[Span],
        local_device: tuple[str, int],
    ) -> int:
        if peer in self._fabric.unreachable:
            raise WorkerLost(f"{peer} is gone")
        step = self._fabric.block_bytes
        copies = [
            (from_address + offset, to_address + offset)
            for (from_address, num_bytes), (to_address, _) in zip(source, local, strict=True)
            for offset in range(0, num_bytes, step)
        ]
        self._next_handle += 1
        self.reads[self._next_handle] = SimulatedRead(copies)
        return self._next_handle

    def start(self, handle: int) -> ReadState:
        return self.state(handle)

    def state(self, handle: int) -> ReadState:
        assert not self.is_closed, "a closed agent is asked for a read"
        read = self.reads[handle]
        if read.failed:
            return ReadState.FAILED
        return ReadState.UNDER_WAY if read.waiting else ReadState.DONE

    def release(self, handle: int) -> None:
        """The handle is gone; what it had still to bring is not."""

    def close(self) -> None:
        self.is_closed = True
        self.reads.clear()

    def land(self, read: SimulatedRead, index: int) -> None:
        from_address, to_address = read.waiting.pop(index % len(read.waiting))
        ctypes.memmove(to_address, from_address, self._fabric.block_bytes)
