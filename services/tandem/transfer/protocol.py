"""The interface that every KV transport (CUDA IPC, NIXL and gRPC) implements.

A transport connects this worker to one peer and reads blocks from the peer's pool into the local
pool. A peer never writes a worker's memory.

The caller calls `connect` first, then `pull` any number of times, and `close` last. `connect` may
be called again at any time before `close`, and measures the speed of reads from the peer each time.

A pull needs a live lease, which makes the peer keep the blocks. The pull either puts every byte in
place before the deadline or raises a TandemError (errors.py). After an error, the contents of the
local blocks are undefined. If a local block is given to another sequence during a pull, the
transport does not write the block any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.net.rpc.tandem.v1 import worker_pb2 as pb

# Size in bytes of the largest probe. A probe is a test read that measures the speed to a peer.
PROBE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class BlockPull:
    """A read of blocks of the peer: `producer_block_ids[i]` is read into this worker's block
    `local_block_ids[i]`. The sequence `sequence_id` holds the local blocks. The pull fails if it
    takes longer than `deadline_s` seconds.
    """

    lease_id: str
    sequence_id: str
    producer_block_ids: Sequence[int]
    local_block_ids: Sequence[int]
    deadline_s: float


class Transport(Protocol):
    """A connection to one peer. All methods must be called on one event loop."""

    @property
    def name(self) -> str:
        """The name of the transport in workers' records and metrics: "cuda_ipc", "nixl" or
        "grpc"."""

    async def connect(self, offer: pb.ConnectResponse) -> list[tuple[int, float]]:
        """Connects to the peer and measures a few reads. Returns (bytes, seconds) of each read.

        May be called again. Raises TandemError if the peer cannot be read.
        """

    async def pull(self, pull: BlockPull) -> float:
        """Reads the blocks and returns the duration in seconds once all bytes are in place.

        Raises LeaseLost or another TandemError if the pull fails. The call may be cancelled.
        """

    def close(self) -> None:
        """Ends all pulls. No method may be called afterwards."""
