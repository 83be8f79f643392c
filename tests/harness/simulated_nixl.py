"""An adversarial NIXL that still satisfies its guarantees: bytes arrive block by block, when the
test decides.

It replaces `NixlAgent` under the real consumer, fence and transfer thread. A read cannot be
revoked: it may write after its handle was released, after it was reported as failed, and after its
producer has ended. Only closing the agent ends it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.engine import sequence
from tandem.errors import WorkerLost
from tandem.transfer.reads.agent import BlockIds, ReadState
from tandem.transfer.reads.block_list import BlockList


def part_of(blocks: BlockList, block_id: int) -> tuple[int, int]:
    """The address and size of a block's part in a list."""
    for pool in blocks.pools:
        for offset, stride, number in pool.runs():
            if 0 <= block_id < number:
                return blocks.address + offset + block_id * stride, pool.num_bytes
            block_id -= number
    raise ValueError("the list has no such block")


class Copy(NamedTuple):
    """A copy of one block: where it is read and where it is written."""

    source: int
    target: int
    num_bytes: int
    block_id: int  # block id at the consumer


@dataclass(eq=False)
class SimulatedRead:
    waiting: list[Copy]
    failed: bool = False
    is_seen: bool = False  # True once the checks have recorded its owner
    owner: sequence.Sequence | None = None


@dataclass
class SimulatedFabric:
    """The state shared by all agents."""

    unreachable: set[str] = field(default_factory=set)  # peers from which no read can be started


class SimulatedAgent:
    """Replaces `tandem.transfer.nixl.agent.NixlAgent`, with memory of this process."""

    def __init__(self, fabric: SimulatedFabric, name: str) -> None:
        self.name = name
        self.reads: dict[int, SimulatedRead] = {}  # by handle; reads that may still write are kept
        self.peers: set[str] = set()
        self.registered: list[tuple[int, str]] = []  # (address, kind of memory)
        self.is_closed = False
        self._fabric = fabric
        self._next_handle = 0
        self._lists: list[tuple[str | None, BlockList]] = []  # by handle: the peer and its blocks

    def register(self, *, address: int, num_bytes: int, device_id: int, memory: str) -> None:
        assert not self.is_closed
        self.registered.append((address, memory))

    def add_peer(self, metadata: bytes) -> str:
        self.peers.add(metadata.decode())
        return metadata.decode()

    def remove_peer(self, name: str) -> None:
        assert not self.is_closed
        self.peers.remove(name)

    def list_blocks(self, peer: str | None, blocks: BlockList) -> int:
        self._lists.append((peer, blocks))
        return len(self._lists) - 1

    def release_list(self, handle: int) -> None:
        assert not self.is_closed

    def create_block_read(
        self, *, producer_list: int, producer_ids: BlockIds, local_list: int, local_ids: BlockIds
    ) -> int:
        (peer, remote), (_, local) = self._lists[producer_list], self._lists[local_list]
        if peer in self._fabric.unreachable:
            raise WorkerLost(f"{peer} is gone")
        copies = []
        for producer_id, local_id in zip(producer_ids.tolist(), local_ids.tolist(), strict=True):
            source, num_bytes = part_of(remote, producer_id)
            target, target_bytes = part_of(local, local_id)
            assert num_bytes == target_bytes, "a block is read into one of other size"
            copies.append(Copy(source, target, num_bytes, local_id))
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
        """Releases the handle. Its pending writes may still happen."""

    def close(self) -> None:
        self.is_closed = True
        self.reads.clear()

    def land(self, read: SimulatedRead, index: int) -> None:
        copy = read.waiting.pop(index % len(read.waiting))
        ctypes.memmove(copy.target, copy.source, copy.num_bytes)
