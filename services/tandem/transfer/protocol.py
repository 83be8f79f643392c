"""The protocol that every transport implements, whatever moves the bytes.

A transport connects this worker to one peer and reads blocks of the peer's pool into blocks of its
own. A worker's memory is never written by a peer.

    made --> connected (again, to measure it anew) --> pull, pull, ... --> closed

A pull belongs to a live lease. It either puts every byte in place before its deadline or raises an
error of the tree (errors.py); then nothing of it may be trusted. The engine learns of a sequence
that gives up its pulls before anyone else gets the blocks: no byte lands in them after that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.net.rpc.tandem.v1 import worker_pb2 as pb

PROBE_BYTES = 4 << 20  # size of the largest reads that measure a pair


@dataclass(frozen=True, slots=True)
class BlockPull:
    """A pull reads `producer_block_ids` of a peer into `local_block_ids`, pairwise.

    The local blocks are the sequence's.
    """

    lease_id: str
    sequence_id: str
    producer_block_ids: Sequence[int]
    local_block_ids: Sequence[int]
    deadline_s: float


class Transport(Protocol):
    """A transport is one way to one peer. It belongs to one event loop."""

    @property
    def name(self) -> str:
        """The name that workers and metrics use for it: "nixl" or "grpc"."""

    async def connect(self, offer: pb.ConnectResponse) -> list[tuple[int, float]]:
        """Makes the peer readable and measures reads from it: the bytes and seconds of each.

        May be called again. Raises TandemError when the peer cannot be read.
        """

    async def pull(self, pull: BlockPull) -> float:
        """Returns the seconds that the bytes took, as soon as all are in place.

        Raises LeaseLost or another TandemError otherwise. It may be cancelled.
        """

    def close(self) -> None:
        """Ends what is under way. Nothing may be called afterwards."""
