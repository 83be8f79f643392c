"""Messages between the transfer thread and the main thread of the engine process.

Messages whose class has a msgspec tag are also passed on to the worker's I/O process.
"""

from dataclasses import dataclass

import msgspec

from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.engine.cache.layout.kv_groups import KvLayout


class RemotePool(msgspec.Struct, frozen=True):
    """The address and block sizes of a producer's pools, which are contiguous in memory."""

    address: int
    num_blocks: int  # number of blocks of all pools together
    block_bytes: int  # bytes of one block, all layers together
    device_id: int
    memory: str  # NIXL's name of the memory: "DRAM" or "VRAM"
    # (number of blocks, bytes per block) of each pool if the model has several KV groups
    pools: tuple[tuple[int, int], ...] = ()

    @property
    def spans(self) -> BlockSpans:
        return BlockSpans(self.pools or ((self.num_blocks, self.block_bytes),))


class LocalPool(msgspec.Struct, frozen=True):
    """This process's KV pool: its address for NIXL and its layout."""

    address: int
    num_bytes: int
    device_id: int
    memory: str
    layout: KvLayout

    def remote(self) -> RemotePool:
        """Returns the description of this pool that peers need to read its blocks."""
        return RemotePool(
            address=self.address,
            num_blocks=self.layout.num_blocks,
            block_bytes=self.layout.block_bytes,
            device_id=self.device_id,
            memory=self.memory,
            pools=self.layout.spans.pools if len(self.layout.groups) > 1 else (),
        )


class Pull(msgspec.Struct, frozen=True):
    """A read of the peer's blocks `producer_block_ids` into this worker's `local_block_ids`.

    Blocks at the same index belong together. A probe has no local blocks.
    """

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
    reason: str = ""  # reason of the failure in one word: refused, error, deadline, cancelled, ...
    num_fenced: int = 0  # number of local blocks that an abandoned read may still write
    # Part of `elapsed_s` spent in NIXL's calls that start reads. Over CMA, these calls also copy.
    post_s: float = 0.0
    num_blocks: int = 0  # number of blocks that NIXL read; 0 if the pull failed


@dataclass(frozen=True, slots=True)
class Settled:
    """The end of a submitted pull. Exactly one `Settled` is sent for each pull."""

    result: PullResult


@dataclass(frozen=True, slots=True)
class Unfenced:
    """Blocks of FAILED pulls that no read writes any more.

    The `Settled` message of the pulls always comes first.
    """

    block_ids: list[int]


class Renewed(msgspec.Struct, frozen=True, tag=True):
    """The consumer's agent was replaced `num_times` times since the last `Renewed` message."""

    num_times: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """No pull can succeed until the process is restarted. Sent once."""

    message: str


class PeerConnected(msgspec.Struct, frozen=True, tag=True):
    """The answer to `TransferThread.connect`."""

    peer_id: str
    error: str  # empty if the peer is connected and all test reads passed
    # (bytes, seconds) of the test reads after the first one
    reads: tuple[tuple[int, float], ...] = ()


class ProducerReady(msgspec.Struct, frozen=True, tag=True):
    """The answer to `TransferThread.producer`."""

    request_id: int
    metadata: bytes  # with it, a peer can read the whole pool; empty without NIXL
    pool: RemotePool
    error: str = ""


TransferEvent = Settled | Unfenced | Renewed | Broken | PeerConnected | ProducerReady
