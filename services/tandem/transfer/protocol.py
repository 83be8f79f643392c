"""What a transport does, whatever moves the bytes.

A transport runs in the engine process, in one thread that owns all its handles. A *pull* reads
blocks of a remote pool into blocks of the local one; a worker's memory is never written by a peer.

    submitted --> DONE      all its bytes are in place; nothing will be written any more
              `-> FAILED    (error, deadline, cancel) bytes may still land: its local blocks stay
                            fenced until `fence()` has made the reader anew, or a late DONE comes

Who frees what: the engine frees local blocks of a DONE pull when it likes; those of a FAILED pull
it quarantines, until the transport names them in `unfenced`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from tandem.engine.cache.layout import BlockLayout

PROBE_BYTES = 4 << 20  # that two reads of a joining pair move, to see its bandwidth


class LocalPool(msgspec.Struct, frozen=True):
    """This process's KV pool: an address for NIXL, and the layout of what lies there."""

    address: int
    num_bytes: int
    device_id: int
    memory: str  # "DRAM" or "VRAM", NIXL's names
    layout: tuple[int, int, int, int, int, str]  # BlockLayout's fields


class RemotePool(msgspec.Struct, frozen=True):
    """What a reader must know of a source's pool."""

    address: int
    num_blocks: int
    block_bytes: int
    device_id: int
    memory: str


class Pull(msgspec.Struct, frozen=True):
    """Read blocks `source_block_ids` of a peer into `local_block_ids`, pairwise."""

    pull_id: str
    peer_id: str
    source_block_ids: list[int]
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


class Transport(Protocol):
    """The verbs, and two questions. All are called from the transfer thread only."""

    name: str

    def connect(self, peer_id: str, metadata: bytes, pool: RemotePool) -> None:
        """Makes a peer readable and reads nothing yet. Raises TandemError when it cannot."""

    def probe(self, pull_id: str, peer_id: str, num_blocks: int, deadline_s: float) -> None:
        """A pull of a few blocks into scratch memory, to see that the peer can be read.

        At most PROBE_BYTES, but one block always.
        """

    def disconnect(self, peer_id: str) -> None:
        """Forgets a peer; pulls from it that are under way end FAILED."""

    def submit(self, pull: Pull) -> None:
        """Starts a pull; its result comes from `poll`."""

    def poll(self) -> list[PullResult]:
        """Results that are new, without waiting. Each submitted pull gives exactly one.

        Fences by itself, as soon as that disturbs no pull under way.
        """

    def unfenced(self) -> list[int]:
        """Local blocks of FAILED pulls that became safe since last asked; their results are out."""

    def wait_s(self) -> float | None:
        """How long to leave it alone before the next `poll`; None: until the next other verb."""

    def cancel(self, pull_id: str) -> None:
        """Gives up on a pull: it ends FAILED unless it is DONE already."""

    def fence(self) -> list[int]:
        """Makes sure that no byte of a FAILED pull lands any more; returns their local blocks.

        No pull may be under way.
        """

    @property
    def num_renewals(self) -> int:
        """How often the reader was made anew, which ends reads that were given up."""

    def failure(self) -> str:
        """Why this transport cannot recover by itself; empty while it can."""

    def close(self) -> None:
        """Ends all pulls FAILED (`poll` tells) and everything that could write into the pool."""


def layout_fields(layout: BlockLayout) -> tuple[int, int, int, int, int, str]:
    return (
        layout.num_blocks,
        layout.num_kv_heads,
        layout.num_layers,
        layout.block_size,
        layout.head_dim,
        layout.dtype,
    )
