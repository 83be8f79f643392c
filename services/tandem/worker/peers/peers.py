"""Connections to the peers: the other workers, from which this worker can pull blocks.

    (found in the registry) --> connecting --> connected (nixl or grpc) --> gone
                                          `--> refused (or unreachable): retried later

A peer is one process (worker id and epoch). A restarted worker is a new peer, and the peer of its
old process is disconnected. Connecting runs in the background, not on a request's path
(`pairing.py`).

A pair is this worker and one peer. If several NIXL reads of a pair fail in a row, the pair uses
gRPC at once. The speed of a pair is measured again from time to time if its transport is doubtful:
NIXL is in use but became slower than gRPC, or gRPC is in use only because NIXL failed or was slow.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc

from tandem.common.config.worker import WorkerConfig
from tandem.errors import Incompatible, TandemError, WorkerLost
from tandem.net.rpc.channels import foreign_cancellation_raises
from tandem.net.store.registry import WorkerRecord
from tandem.worker.peers.pairing import Pairing
from tandem.worker.peers.peer import Peer, peer_id
from tandem.worker.peers.rates import Rates

log = logging.getLogger(__name__)

# Up to this many decode workers are connected when they join. If there are more, each of them is
# connected at its first use.
EAGER_DECODE_PEERS_MAX = 16
_RETRY_S = 5.0
# An incompatible peer is retried rarely, because the KV format of a running process does not
# change. A restarted worker is a new peer, which is connected without this delay.
_RETRY_INCOMPATIBLE_S = 300.0
# seconds until a pair with a doubtful transport is measured again: 30, 60, 120 and so on, doubled
# by each measurement up to _AGAIN_MAX_S
_AGAIN_MIN_S = 30.0
_AGAIN_MAX_S = 600.0


@dataclass(slots=True)
class _Entry:
    record: tuple[str, str, str]  # (worker id, epoch, address)
    connecting: asyncio.Task[Peer]
    failed_at: float = 0.0
    retry_s: float = _RETRY_S
    failure: str = ""  # last error; if the next one is the same, it is logged at level DEBUG
    # time when the peer was last found in the registry or needed by a request
    seen_at: float = field(default_factory=time.monotonic)
    measured_at: float = field(default_factory=time.monotonic)
    again_s: float = field(default_factory=lambda: _AGAIN_MIN_S)
    measuring: asyncio.Task[None] | None = None


class Peers:
    """Keeps a connection to each producer."""

    def __init__(self, config: WorkerConfig, rates: Rates, pairing: Pairing) -> None:
        self._config = config
        self._rates = rates
        self._pairing = pairing
        self._epochs: dict[str, str] = {}  # worker id -> newest epoch in the registry
        self._entries: dict[str, _Entry] = {}  # peer id -> connection to the peer

    async def get(self, worker_id: str, epoch: str, address: str) -> Peer:
        """Waits until a peer is connected, and returns the peer.

        Raises TandemError if the connection fails or takes longer than `connect_deadline_s`.
        """
        entry = self._entries.get(peer_id(worker_id, epoch))
        if entry is None:
            entry = self._open(worker_id, epoch, address)
        went = WorkerLost(f"{worker_id} left the cluster before the connection was ready")
        try:
            with foreign_cancellation_raises(went):
                async with asyncio.timeout(self._config.transfer.connect_deadline_s):
                    peer = await asyncio.shield(entry.connecting)
        except TimeoutError:
            raise WorkerLost(f"the connection to {worker_id} is not ready yet") from None
        self._pairing.give_up_failing(peer)
        return peer

    def get_now(self, worker_id: str, epoch: str, address: str) -> Peer | None:
        """Returns a peer that is already connected.

        If the peer is not connected, returns None and connects in the background.
        """
        entry = self._entries.get(peer_id(worker_id, epoch))
        if entry is None or self._may_retry(entry):
            entry = self._open(worker_id, epoch, address)
        if not _succeeded(entry.connecting):
            return None
        peer = entry.connecting.result()
        self._pairing.give_up_failing(peer)
        return peer

    async def all_connected(self) -> list[Peer]:
        """Waits for the current attempts to connect, then returns all connected peers."""
        attempts = [entry.connecting for entry in self._entries.values()]
        if attempts:
            await asyncio.wait(attempts)
        return [attempt.result() for attempt in attempts if _succeeded(attempt)]

    def update(self, records: Iterable[WorkerRecord]) -> None:
        """Connects to new producers, and disconnects those whose records have long been missing.

        A producer without a record is kept for `record_ttl_s`, because a Redis that restarted empty
        lacks the records of healthy workers.
        """
        now = time.monotonic()
        records = [r for r in records if r.worker_id != self._config.worker_id]
        self._epochs = {r.worker_id: r.epoch for r in records}
        num_decode = sum(r.state == "ready" and r.role == "decode" for r in records)
        eager = num_decode <= EAGER_DECODE_PEERS_MAX
        for record in records:
            entry = self._entries.get(peer_id(record.worker_id, record.epoch))
            if entry is not None:
                entry.seen_at = now
            wanted = record.state == "ready" and (eager or record.role == "prefill")
            if wanted and (entry is None or self._may_retry(entry)):
                self._open(record.worker_id, record.epoch, record.address)
        for key, entry in list(self._entries.items()):
            if now - entry.seen_at > self._config.cluster.record_ttl_s:
                self._close(key)
            elif _succeeded(entry.connecting):
                self._look_after(entry, now)

    @property
    def unreachable(self) -> dict[str, str]:
        """Worker id -> reason, for each peer from which no blocks can be pulled."""
        return {
            entry.record[0]: why
            for entry in self._entries.values()
            if self._epochs.get(entry.record[0]) == entry.record[1] and (why := _why_not(entry))
        }

    async def aclose(self) -> None:
        for key in list(self._entries):
            self._close(key)

    def _look_after(self, entry: _Entry, now: float) -> None:
        """Switches a pair to gRPC if NIXL fails, or measures the pair again if that is due."""
        peer = entry.connecting.result()
        self._pairing.give_up_failing(peer)
        if entry.measuring is not None:
            return
        if self._pairing.is_doubtful(peer) and now - entry.measured_at > entry.again_s:
            entry.measuring = asyncio.create_task(self._measure_again(entry, peer))

    async def _measure_again(self, entry: _Entry, peer: Peer) -> None:
        try:
            await self._pairing.again(peer)
        except TandemError as error:
            log.info(
                "the transports to %s could not be measured again, so %s stays in use: %s",
                peer.worker_id,
                peer.transport,
                error,
            )
        except Exception:
            log.exception(
                "measuring the transports to %s again failed with an unexpected error",
                peer.worker_id,
            )
        finally:
            entry.measured_at = time.monotonic()
            entry.again_s = min(2 * entry.again_s, _AGAIN_MAX_S)
            entry.measuring = None

    def _may_retry(self, entry: _Entry) -> bool:
        failed = entry.connecting.done() and not _succeeded(entry.connecting)
        return failed and time.monotonic() - entry.failed_at > entry.retry_s

    def _open(self, worker_id: str, epoch: str, address: str) -> _Entry:
        key = peer_id(worker_id, epoch)
        before = self._entries.get(key)
        self._close(key)
        connecting = asyncio.create_task(self._pairing.make(worker_id, epoch, address))
        entry = _Entry((worker_id, epoch, address), connecting)
        entry.failure = before.failure if before else ""
        connecting.add_done_callback(lambda task: self._opened(entry, task))
        self._entries[key] = entry
        return entry

    def _opened(self, entry: _Entry, task: asyncio.Task[Peer]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            entry.failed_at = time.monotonic()
            entry.retry_s = _RETRY_INCOMPATIBLE_S if isinstance(error, Incompatible) else _RETRY_S
            previous = entry.failure
            entry.failure = str(error)
            level = logging.DEBUG if previous == entry.failure else logging.WARNING
            log.log(
                level,
                "cannot read KV blocks from %s at %s: %s",
                entry.record[0],
                entry.record[2],
                error,
            )

    def _close(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        if entry.measuring is not None:
            entry.measuring.cancel()
        worker_id = entry.record[0]
        if all(other.record[0] != worker_id for other in self._entries.values()):
            self._rates.forget(worker_id)
        if _succeeded(entry.connecting):
            entry.connecting.result().close()
        else:
            entry.connecting.cancel()


def _why_not(entry: _Entry) -> str:
    """Returns why no blocks can be pulled from a peer.

    The result is "" if pulls are possible or the first attempt to connect is under way.
    """
    if not _succeeded(entry.connecting):
        return entry.failure
    state = entry.connecting.result().channel.get_state()
    is_broken = state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
    return f"the connection to {entry.record[2]} is broken" if is_broken else ""


def _succeeded(task: asyncio.Task[Peer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
