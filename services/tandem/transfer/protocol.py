"""The protocol that every transport implements.

A transport connects this worker to one peer and reads blocks from the peer's pool into the local
pool. A peer never writes a worker's memory.

    created --connect--> connected --pull, pull, ...--> connected --close--> closed
`connect` may be called again, and measures the speed of reads from the peer each time.

A pull belongs to a live lease. It either puts every byte in place before its deadline or raises a
TandemError (errors.py). After an error, the contents of the local blocks are undefined. A transport
never writes a block that was given to another sequence since the pull began.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.net.rpc.tandem.v1 import worker_pb2 as pb

PROBE_BYTES = 4 << 20  # Size in bytes of the largest reads that measure the speed between workers


@dataclass(frozen=True, slots=True)
class BlockPull:
    """A read of the peer's blocks `producer_block_ids` into this worker's `local_block_ids`.

    Blocks at the same index belong together. The local blocks belong to `sequence_id`.
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
        """The name of the transport in workers' records and metrics: "nixl" or "grpc"."""

    async def connect(self, offer: pb.ConnectResponse) -> list[tuple[int, float]]:
        """Connects to the peer and measures reads from it; returns (bytes, seconds) of each read.

        May be called again. Raises TandemError if the peer cannot be read.
        """

    async def pull(self, pull: BlockPull) -> float:
        """Reads the blocks and returns the duration in seconds once all bytes are in place.

        Raises LeaseLost or another TandemError if the pull fails. The call may be cancelled.
        """

    def close(self) -> None:
        """Ends all pulls. No method may be called afterwards."""
