"""Reads the pool of a peer on the same machine by copies between GPUs, through CUDA IPC.

    producer: export     the handle of the pool's memory, as metadata for peers
    consumer: add_peer   maps the peer's memory into this process
              start      queues the copies of a piece on the consumer's GPU
              state      DONE when the GPU has made the copies
              remove_peer, close
                         unmap the memory, after the copies from it have ended

A mapping keeps the memory of the peer's pool allocated, even if the peer was killed. So a copy from
a dead peer ends well, and its bytes are discarded with the lease. But a restarted worker can use
the GPU's memory only when every peer has closed its mapping, so peers close mappings when they
disconnect. A copy from memory that is no longer mapped would end the CUDA context of the consumer,
so a mapping is closed only when no copy from it can be under way.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import gcd
from typing import Protocol

import numpy as np

from tandem.errors import InternalError, TandemError, WorkerLost
from tandem.transfer.reads.agent import BlockIds, ReadState
from tandem.transfer.reads.block_list import BlockList, BlockParts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of the same part of some blocks between two pools, `num_bytes` of each block: the part
    at address `source + source_ids[i] * source_stride` is copied to
    `target + target_ids[i] * target_stride`."""

    source: int
    target: int
    source_stride: int
    target_stride: int
    num_bytes: int
    source_ids: BlockIds
    target_ids: BlockIds


class Event(Protocol):
    def query(self) -> bool:
        """Returns whether the device has made all copies that were queued before the event."""


class IpcDevice(Protocol):
    """A device whose memory other processes of the machine can map.

    One thread calls all methods.
    """

    def export(self, address: int) -> bytes:
        """Returns metadata with which other processes can map the memory from `address` on. The
        metadata gives access to the whole allocation and must be kept secret. Raises Incompatible
        if this memory cannot be mapped by others."""

    def open(self, metadata: bytes) -> int:
        """Maps the memory of another process. Returns the address of its first byte in this
        process. Raises Incompatible if this process cannot reach the memory."""

    def close(self, address: int) -> None:
        """Unmaps memory. No copy from it may be under way. Raises InternalError on failure."""

    def start_copy(self, copies: Sequence[BlockCopy]) -> Event:
        """Queues copies. Returns an event that follows them. Raises InternalError on failure; some
        of the copies may then be queued."""

    def synchronize(self) -> None:
        """Waits until the device has made all copies that were queued."""


@dataclass(slots=True, eq=False)
class _Peer:
    address: int
    num_under_way: int = 0  # number of started reads that are not known to be DONE


@dataclass(frozen=True, slots=True)
class _OpenList:
    address: int  # of the memory in this process
    blocks: BlockList
    peer: _Peer | None  # None: local memory


@dataclass(slots=True)
class _Read:
    peer: _Peer
    copies: list[BlockCopy]
    event: Event | None = None  # None: not started


class CudaIpcAgent:
    """The agent of a consumer (reads/agent.py) whose reads are copies on its own device."""

    def __init__(self, device: IpcDevice) -> None:
        self._device = device
        self._numbers = count(1)
        self._peers: dict[str, _Peer] = {}
        self._lists: dict[int, _OpenList] = {}
        self._reads: dict[int, _Read] = {}

    def register(self, *, address: int, num_bytes: int, device_id: int, memory: str) -> None:
        """Does nothing: a device can write to its own memory."""

    def add_peer(self, metadata: bytes) -> str:
        name = f"peer {next(self._numbers)}"
        self._peers[name] = _Peer(self._device.open(metadata))
        return name

    def remove_peer(self, name: str) -> None:
        peer = self._peers.pop(name)
        if peer.num_under_way:
            self._device.synchronize()
        self._unmap(peer)

    def list_blocks(self, peer: str | None, blocks: BlockList) -> int:
        known = None if peer is None else self._peers[peer]
        handle = next(self._numbers)
        address = blocks.address if known is None else known.address
        self._lists[handle] = _OpenList(address, blocks, known)
        return handle

    def release_list(self, handle: int) -> None:
        del self._lists[handle]

    def create_block_read(
        self, *, producer_list: int, producer_ids: BlockIds, local_list: int, local_ids: BlockIds
    ) -> int:
        source, target = self._lists.get(producer_list), self._lists[local_list]
        if source is None or source.peer is None:
            raise WorkerLost("the peer is no longer connected")
        handle = next(self._numbers)
        copies = list(_copies(source, target, producer_ids, local_ids))
        self._reads[handle] = _Read(source.peer, copies)
        return handle

    def start(self, handle: int) -> ReadState:
        read = self._reads[handle]
        # Counted first: if queueing fails, some copies may be queued already.
        read.peer.num_under_way += 1
        read.event = self._device.start_copy(read.copies)
        return ReadState.UNDER_WAY

    def state(self, handle: int) -> ReadState:
        read = self._reads[handle]
        assert read.event is not None, "the read was not started"
        if not read.event.query():
            return ReadState.UNDER_WAY
        read.peer.num_under_way -= 1
        return ReadState.DONE

    def release(self, handle: int) -> None:
        del self._reads[handle]

    def close(self) -> None:
        """Waits for all copies, then unmaps the memory of all peers."""
        self._device.synchronize()
        for peer in self._peers.values():
            self._unmap(peer)
        self._peers.clear()
        self._lists.clear()
        self._reads.clear()

    def _unmap(self, peer: _Peer) -> None:
        try:
            self._device.close(peer.address)
        except TandemError as error:
            log.error(
                "this worker cannot free its mapping of a peer's GPU memory, which stays in "
                "use until this worker is restarted: %s",
                error,
            )


def _copies(
    source: _OpenList, target: _OpenList, source_ids: BlockIds, target_ids: BlockIds
) -> Iterator[BlockCopy]:
    """Divides a read among the pools of the KV groups, whose blocks differ in size.

    The two sides have the same groups, but may differ in the number of blocks of each pool. Scratch
    memory has blocks of the first pool only, and only blocks of this pool are read into it.
    """
    source_first = target_first = 0
    for ours, theirs in zip(target.blocks.pools, source.blocks.pools, strict=False):
        here = (source_ids >= source_first) & (source_ids < source_first + theirs.num_blocks)
        targets = target_ids[here] - target_first
        if len(targets):
            if targets.min() < 0 or targets.max() >= ours.num_blocks:
                raise InternalError(
                    "a read has a source block and a target block of different KV groups"
                )
            source_stride, source_places = _places(theirs, source_ids[here] - source_first)
            target_stride, target_places = _places(ours, targets)
            yield BlockCopy(
                source.address + theirs.offset,
                target.address + ours.offset,
                source_stride,
                target_stride,
                ours.num_bytes,
                source_places,
                target_places,
            )
        source_first += theirs.num_blocks
        target_first += ours.num_blocks


def _places(parts: BlockParts, block_ids: BlockIds) -> tuple[int, BlockIds]:
    """Returns a distance in bytes, and how many of these distances each block's part is behind the
    first one. The parts of a slot's pieces may be less far from each other than from those of the
    next slot."""
    if parts.num_pieces == 1:
        return parts.stride, block_ids
    distance = gcd(parts.stride, parts.num_bytes)
    slots, pieces = np.divmod(block_ids, parts.num_pieces)
    places = slots * (parts.stride // distance) + pieces * (parts.num_bytes // distance)
    return distance, places.astype(block_ids.dtype)
