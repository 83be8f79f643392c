"""Drives the transfer threads of several tensor-parallel ranks as one.

If each rank of a worker has a KV pool of its own, each has a transfer thread (thread.py), which
reads the heads of the rank. Rank 0 sends each command to all ranks, through one pipe for each rank,
and merges their events:

    merged event                    when it is sent
    `Settled`                       the pull has ended on every rank. It is DONE if it is DONE on
                                    all of them. The first failure cancels it on the others.
    `Unfenced`                      no read of any rank writes the block any more
    `PeerConnected`,                every rank has answered
    `ProducerReady`
    `Renewed`                       a rank has replaced an agent
    `Broken`                        a rank has sent it, for the first time

A rank that ends is noticed elsewhere: the engine process then ends, too.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeAlias

import msgspec

from tandem.errors import InternalError
from tandem.transfer.reads import messages
from tandem.transfer.thread import STOP_DEADLINE_S, TransferThread

log = logging.getLogger(__name__)

# Creates the transfer thread of a rank. The argument is the function that takes its events.
MakeThread = Callable[[Callable[[messages.TransferEvent], None]], TransferThread]
_Pipe: TypeAlias = "Connection[Any, Any]"


class RankTransfers:
    """The transfer threads of all ranks, with the methods of `TransferThread`. Used by rank 0."""

    def __init__(
        self,
        make_own: MakeThread,
        others: Sequence[_Pipe],
        on_event: Callable[[messages.TransferEvent], None],
    ) -> None:
        """`make_own` creates the thread of rank 0. `others` are the pipes to `serve` in ranks 1 and
        up. `on_event` is called in a thread with each merged event, and must be quick."""
        own, served = Pipe()
        self._pipes = [own, *others]
        self._sending = threading.Lock()
        self._merger = EventMerger(len(self._pipes))
        self._on_event = on_event
        self._serving = threading.Thread(
            target=serve, args=(served, make_own), name="rank-0", daemon=True
        )
        self._merging = threading.Thread(target=self._merge, name="merge-ranks", daemon=True)

    def start(self) -> None:
        self._serving.start()
        self._merging.start()

    def stop(self) -> None:
        """Stops the threads of all ranks, as `TransferThread.stop` does. Raises InternalError."""
        self._send("stop")
        self._merging.join(2 * STOP_DEADLINE_S)
        if self._merging.is_alive():
            raise InternalError("the transfer threads of the ranks did not stop in time")

    def connect(
        self, peer_id: str, ranks: Sequence[messages.PeerRank], transport: str = "nixl"
    ) -> None:
        self._send("connect", peer_id, ranks, transport)

    def disconnect(self, peer_id: str, transport: str = "nixl") -> None:
        self._send("disconnect", peer_id, transport)

    def submit(self, pull: messages.Pull) -> None:
        self._merger.expect(pull)
        self._send("submit", pull)

    def cancel(self, pull_id: str) -> None:
        self._send("cancel", pull_id)

    def producer(self, request_id: int) -> None:
        self._send("producer", request_id)

    def _send(self, method: str, *arguments: object) -> None:
        """Calls a method of each rank's transfer thread."""
        with self._sending:
            for pipe in self._pipes:
                with suppress(OSError):  # the rank has ended
                    pipe.send((method, arguments))

    def _merge(self) -> None:
        """Merges the events of all ranks, until the threads of all have stopped."""
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while ranks:
            for pipe in wait(list(ranks)):
                assert isinstance(pipe, Connection)
                try:
                    event = pipe.recv()
                except (EOFError, OSError):
                    del ranks[pipe]
                    continue
                for merged in self._merger.add(ranks[pipe], event):
                    self._on_event(merged)
                match event:
                    case messages.Settled(result) if self._merger.waits_for(result.pull_id):
                        if not result.done:
                            self.cancel(result.pull_id)


def serve(pipe: _Pipe, make_thread: MakeThread) -> None:
    """Runs the transfer thread of one rank. Applies the commands that rank 0 sends through the
    pipe, until one is `stop` or rank 0 ends."""

    def send(event: messages.TransferEvent) -> None:
        with suppress(OSError):  # rank 0 has ended
            pipe.send(event)

    try:
        thread = make_thread(send)
        thread.start()
        while True:
            try:
                method, arguments = pipe.recv()
            except (EOFError, OSError):  # rank 0 has ended
                return
            getattr(thread, method)(*arguments)
            if method == "stop":
                return
    except Exception as error:
        log.exception("the transfer thread of a rank is broken")
        send(messages.Broken(f"the transfer thread of a rank is broken: {error!r}"))
    finally:
        pipe.close()


@dataclass(slots=True)
class _PullOfRanks:
    """A pull that has not ended on all ranks, or that has failed and has unsafe blocks."""

    pull: messages.Pull
    results: list[messages.PullResult] = field(default_factory=list)
    # block -> number of ranks whose reads do not write it any more
    safe: Counter[int] = field(default_factory=Counter)


class EventMerger:
    """Merges the events of `num_ranks` transfer threads. Does no I/O."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pulls: dict[str, _PullOfRanks] = {}
        self._pull_ids: dict[int, str] = {}  # local block -> pull in `_pulls` that writes it
        # question -> answers of each rank that were not merged yet
        self._answers: dict[object, list[deque[Any]]] = {}
        self._is_broken = False

    def expect(self, pull: messages.Pull) -> None:
        """Must be called before a pull is submitted to the ranks. None of its local blocks may be
        unsafe because of an earlier pull."""
        self._pulls[pull.pull_id] = _PullOfRanks(pull)
        self._pull_ids.update(dict.fromkeys(pull.local_block_ids, pull.pull_id))

    def waits_for(self, pull_id: str) -> bool:
        """Returns whether the pull has not ended on all ranks."""
        pull = self._pulls.get(pull_id)
        return pull is not None and len(pull.results) < self._num_ranks

    def add(self, rank: int, event: messages.TransferEvent) -> list[messages.TransferEvent]:
        """Adds an event of a rank. Returns the merged events that follow from it."""
        match event:
            case messages.Settled(result):
                return self._settled(result)
            case messages.Unfenced(block_ids):
                return self._unfenced(block_ids)
            case messages.PeerConnected():
                key = event.peer_id, event.transport
                answers = self._all_answers(key, rank, event)
                return [_connected(answers)] if answers else []
            case messages.ProducerReady():
                answers = self._all_answers(event.request_id, rank, event)
                first, *others = answers or [event]
                ready = msgspec.structs.replace(first, other_ranks=tuple(others))
                return [ready] if answers else []
            case messages.Broken() if self._is_broken:
                return []
            case messages.Broken():
                self._is_broken = True
        return [event]

    def _settled(self, result: messages.PullResult) -> list[messages.TransferEvent]:
        pull = self._pulls[result.pull_id]
        pull.results.append(result)
        merged: list[messages.TransferEvent] = []
        if len(pull.results) == self._num_ranks:
            merged.append(messages.Settled(_merged(pull.results)))
        if result.done:
            merged += self._safe(pull, pull.pull.local_block_ids)
        return merged

    def _unfenced(self, block_ids: list[int]) -> list[messages.TransferEvent]:
        merged: list[messages.TransferEvent] = []
        for block_id in block_ids:
            merged += self._safe(self._pulls[self._pull_ids[block_id]], [block_id])
        return merged

    def _safe(self, pull: _PullOfRanks, block_ids: Sequence[int]) -> list[messages.TransferEvent]:
        """Notes that one rank's reads of the pull do not write these blocks any more. Returns an
        event for the blocks that no rank writes."""
        pull.safe.update(block_ids)
        safe = [block for block in block_ids if pull.safe[block] == self._num_ranks]
        for block in safe:
            del self._pull_ids[block]
        # Blocks of which no rank has sent anything yet are not in `safe`.
        if len(pull.results) == self._num_ranks and all(
            pull.safe[block] == self._num_ranks for block in pull.pull.local_block_ids
        ):
            del self._pulls[pull.pull.pull_id]
        has_failed = not all(result.done for result in pull.results)
        return [messages.Unfenced(safe)] if safe and has_failed else []

    def _all_answers(self, key: object, rank: int, answer: Any) -> list[Any]:
        """Returns the answers of all ranks to a question; [] until every rank has answered."""
        answers = self._answers.setdefault(key, [deque() for _ in range(self._num_ranks)])
        answers[rank].append(answer)
        if not all(answers):
            return []
        found = [each.popleft() for each in answers]
        if not any(answers):
            del self._answers[key]
        return found


def _merged(results: Sequence[messages.PullResult]) -> messages.PullResult:
    """Returns the result of a pull that has ended on all ranks. `results` are in the order in which
    the ranks have sent them."""
    longest_s = max(result.elapsed_s for result in results)
    failed = next((result for result in results if not result.done), None)
    if failed is not None:  # the first failure is the cause of the others
        num_fenced = max(result.num_fenced for result in results)
        return msgspec.structs.replace(failed, num_fenced=num_fenced, elapsed_s=longest_s)
    return msgspec.structs.replace(
        results[0],
        num_bytes=sum(result.num_bytes for result in results),
        elapsed_s=longest_s,
        post_s=max(result.post_s for result in results),
    )


def _connected(answers: Sequence[messages.PeerConnected]) -> messages.PeerConnected:
    error = next((answer.error for answer in answers if answer.error), "")
    # The ranks read at the same time. They may have made different numbers of test reads.
    reads = zip(*(answer.reads for answer in answers), strict=False)
    together = tuple((sum(b for b, _ in read), max(s for _, s in read)) for read in reads)
    return msgspec.structs.replace(answers[0], error=error, reads=() if error else together)
