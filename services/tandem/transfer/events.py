"""What the transfer thread tells the process it runs in."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.transfer.protocol import PullResult, RemotePool


@dataclass(frozen=True, slots=True)
class Settled:
    """A submitted pull has ended; exactly one for each."""

    result: PullResult


@dataclass(frozen=True, slots=True)
class Unfenced:
    """Blocks of FAILED pulls that nothing writes any more; always after their `Settled`."""

    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Renewed:
    """The reader was made anew, so many times since the last word of it."""

    num_times: int


@dataclass(frozen=True, slots=True)
class Broken:
    """No pull will succeed here any more until the process is started anew; sent once."""

    message: str


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """Answer to `connect`."""

    peer_id: str
    error: str  # empty: connected, and all self-test reads passed
    reads: tuple[tuple[int, float], ...] = ()  # bytes and seconds of those, the first one apart


@dataclass(frozen=True, slots=True)
class SourceReady:
    """Answer to `source`."""

    request_id: int
    metadata: bytes  # empty without NIXL; it opens the whole pool to its holder
    pool: RemotePool
    error: str = ""


TransferEvent = Settled | Unfenced | Renewed | Broken | PeerConnected | SourceReady
