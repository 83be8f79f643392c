"""Messages between the transfer thread and the main thread of the engine process.

The main thread passes messages of a class with `tag=True` on to the worker's I/O process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.transfer.protocol import PROBE_BYTES
from tandem.transfer.reads.block_list import BlockList, BlockParts


class RemotePool(msgspec.Struct, frozen=True):
    """The address and block sizes of the pools of a producer, or of one of its ranks if each has
    pools of its own. There is one pool for each KV group, and the pools lie one after another in
    memory."""

    address: int
    num_blocks: int  # total number of blocks of all pools
    block_bytes: int  # bytes of one block with all layers; used only if `pools` is empty
    device_id: int
    memory: str  # memory type, as NIXL names it: "DRAM" or "VRAM"
    # (number of blocks, bytes per block) of each pool; empty if the model has only one KV group
    pools: tuple[tuple[int, int], ...] = ()

    @property
    def spans(self) -> BlockSpans:
        return BlockSpans(self.pools or ((self.num_blocks, self.block_bytes),))

    def blocks(self, groups: Sequence[SomeHeads] = ()) -> BlockList:
        """Returns a list of some heads of each block of each KV group; all bytes by default."""
        parts = []
        start = 0
        pools = self.spans.pools
        for (num_blocks, size), some in zip(
            pools, groups or [ALL_HEADS] * len(pools), strict=False
        ):
            stride = size * some.num_pieces  # the bytes of a block or slot
            first, end = (stride * head // some.num_held for head in (some.first, some.end))
            piece = (end - first) // some.num_pieces
            parts.append(BlockParts(start + first, num_blocks, stride, piece, some.num_pieces))
            start += num_blocks * size
        return BlockList(self.address, self.device_id, self.memory, tuple(parts))


class SomeHeads(NamedTuple):
    """Neighbouring heads of the blocks of one KV group in one pool."""

    first: int
    end: int
    num_held: int  # number of heads in a block of the pool
    num_pieces: int = 1  # of a slot of states


ALL_HEADS = SomeHeads(0, 1, 1)


class PeerRank(msgspec.Struct, frozen=True):
    """One rank of a peer: its pool, and the metadata with which an agent can read it. A peer whose
    ranks share one pool counts as one rank."""

    metadata: bytes
    pool: RemotePool


class LocalPool(msgspec.Struct, frozen=True):
    """This process's KV pool: its address and its layout."""

    address: int
    num_bytes: int
    device_id: int
    memory: str
    layout: KvLayout  # of blocks with all heads of the model
    # Address of `scratch_bytes` bytes on the pool's device, into which probes read. Probes then
    # take the path of pulls. None: the pool is in host memory, and the consumer allocates them.
    device_scratch: int | None = None
    # If several ranks of the worker have a pool each: this process's rank, and their number. The
    # pool then has only the heads of the rank.
    rank: int = 0
    num_ranks: int = 1

    @property
    def own_layout(self) -> KvLayout:
        """The layout of this pool, with the heads of the rank."""
        return self.layout.of_rank(self.num_ranks)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch memory: PROBE_BYTES in whole blocks, but at least one block. Probes
        read blocks of the peer's first pool."""
        _, size = self.own_layout.spans.pools[0]
        return max(1, PROBE_BYTES // size) * size

    def remote(self) -> RemotePool:
        """Returns the description that peers need to read blocks of this pool."""
        layout = self.own_layout
        return RemotePool(
            address=self.address,
            num_blocks=layout.num_blocks,
            block_bytes=layout.block_bytes,
            device_id=self.device_id,
            memory=self.memory,
            pools=layout.spans.pools if len(layout.groups) > 1 else (),
        )


class Pull(msgspec.Struct, frozen=True):
    """A read of blocks of the peer: `producer_block_ids[i]` is read into this worker's block
    `local_block_ids[i]`. A probe has no local blocks, because it reads into scratch memory. If a
    block is a piece of a slot, the pull has all pieces of the slot, because the ranks of two
    workers may cut a slot into other pieces.
    """

    pull_id: str
    peer_id: str
    producer_block_ids: list[int]
    local_block_ids: list[int]
    deadline_s: float
    transport: str = "nixl"


class PullResult(msgspec.Struct, frozen=True):
    pull_id: str
    done: bool
    num_bytes: int = 0
    elapsed_s: float = 0.0
    error: str = ""
    # Why the pull failed, in one word such as "refused", "error", "deadline" or "cancelled".
    reason: str = ""
    # Number of local blocks that reads of a failed pull may still write.
    num_fenced: int = 0
    # The part of `elapsed_s` that was spent in the calls that start reads. With CMA (copies by
    # the kernel within one machine), these calls also copy the bytes.
    post_s: float = 0.0
    num_blocks: int = 0  # number of blocks of the pull; 0 if the pull failed


@dataclass(frozen=True, slots=True)
class Settled:
    """A submitted pull has ended. Exactly one `Settled` is sent for each pull."""

    result: PullResult


@dataclass(frozen=True, slots=True)
class Unfenced:
    """Some local blocks of failed pulls are safe now: no read writes these blocks any more.

    The `Settled` message of a pull is sent before any `Unfenced` message with blocks of the pull.
    """

    block_ids: list[int]


class Renewed(msgspec.Struct, frozen=True, tag=True):
    """Agents of the consumer were replaced `num_times` times since the last `Renewed` message."""

    num_times: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """No pull can succeed until the process is restarted. Sent once."""

    message: str


class PeerConnected(msgspec.Struct, frozen=True, tag=True):
    """The answer to `TransferThread.connect`."""

    peer_id: str
    error: str  # empty if the peer is connected and all test reads succeeded
    # (bytes, seconds) of each test read except the first one
    reads: tuple[tuple[int, float], ...] = ()
    transport: str = "nixl"


class ProducerReady(msgspec.Struct, frozen=True, tag=True):
    """The answer to `TransferThread.producer`."""

    request_id: int
    # NIXL metadata with which a peer can read the whole pool. If it is empty, `error` has the
    # reason, or this process does not use NIXL.
    metadata: bytes
    pool: RemotePool
    error: str = ""
    # Metadata with which a peer can map the whole pool over CUDA IPC. If it is empty,
    # `cuda_ipc_error` has the reason, or this process does not use CUDA IPC.
    cuda_ipc: bytes = b""
    cuda_ipc_error: str = ""
    # The answers of ranks 1 and up, in order, if each rank has a pool of its own.
    other_ranks: tuple[ProducerReady, ...] = ()

    @property
    def ranks(self) -> tuple[ProducerReady, ...]:
        return self, *self.other_ranks


TransferEvent = Settled | Unfenced | Renewed | Broken | PeerConnected | ProducerReady
