"""The messages between the transfer thread and the process that it runs in.

Those with a tag go on to the worker's I/O process as they are.
"""

from dataclasses import dataclass

import msgspec

from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.engine.cache.layout.kv_groups import KvLayout


class RemotePool(msgspec.Struct, frozen=True):
    """The pools of a producer, as far as a consumer must know them, one after the other."""

    address: int
    num_blocks: int  # of all pools
    block_bytes: int  # of all layers
    device_id: int
    memory: str  # "DRAM" or "VRAM", NIXL's names
    # Of several KV groups, the number of blocks of each pool and the bytes of each block.
    pools: tuple[tuple[int, int], ...] = ()

    @property
    def spans(self) -> BlockSpans:
        return BlockSpans(self.pools or ((self.num_blocks, self.block_bytes),))


class LocalPool(msgspec.Struct, frozen=True):
    """This process's KV pool: an address for NIXL, and the layout of what lies there."""

    address: int
    num_bytes: int
    device_id: int
    memory: str
    layout: KvLayout

    def remote(self) -> RemotePool:
        """Returns what a consumer must know to address its blocks."""
        return RemotePool(
            address=self.address,
            num_blocks=self.layout.num_blocks,
            block_bytes=self.layout.block_bytes,
            device_id=self.device_id,
            memory=self.memory,
            pools=self.layout.spans.pools if len(self.layout.groups) > 1 else (),
        )


class Pull(msgspec.Struct, frozen=True):
    """Read blocks `producer_block_ids` of a peer into `local_block_ids`, pairwise."""

    pull_id: str
    peer_id: str
    producer_block_ids: list[int]
    local_block_ids: list[int]
    deadline_s: float


class PullResult(msgspec.Struct, frozen=True):
    pull_id: str
    done: bool
    num_bytes: int = 0
    elapsed_s: float = 0.0
    error: str = ""
    reason: str = ""  # one word for why it is FAILED: refused, error, deadline, cancelled, ...
    num_fenced: int = 0  # of its local blocks: a read may still write them
    post_s: float = 0.0  # part of `elapsed_s` in which NIXL took its reads; over CMA it copies then
    num_blocks: int = 0  # that NIXL read; 0: it failed


@dataclass(frozen=True, slots=True)
class Settled:
    """A submitted pull has ended. There is exactly one for each pull."""

    result: PullResult


@dataclass(frozen=True, slots=True)
class Unfenced:
    """Blocks of FAILED pulls that nothing writes any more; always after their `Settled`."""

    block_ids: list[int]


class Renewed(msgspec.Struct, frozen=True, tag=True):
    """The consumer was made anew `num_times` times since the last such message."""

    num_times: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """No pull will succeed here any more until the process is started anew; sent once."""

    message: str


class PeerConnected(msgspec.Struct, frozen=True, tag=True):
    """Answer to `connect`."""

    peer_id: str
    error: str  # empty: connected, and all self-test reads passed
    reads: tuple[tuple[int, float], ...] = ()  # bytes and seconds of those, the first one apart


class ProducerReady(msgspec.Struct, frozen=True, tag=True):
    """Answer to `producer`."""

    request_id: int
    metadata: bytes  # empty without NIXL; it opens the whole pool to its holder
    pool: RemotePool
    error: str = ""


TransferEvent = Settled | Unfenced | Renewed | Broken | PeerConnected | ProducerReady
