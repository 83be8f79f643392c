"""The transfer threads of several ranks, driven as one. Real threads over real NIXL are in
tests/service/test_rank_transfers.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.errors import InternalError
from tandem.transfer.ranks import EventMerger, RankTransfers, serve
from tandem.transfer.reads.messages import (
    Broken,
    PeerConnected,
    ProducerReady,
    Pull,
    PullResult,
    RemotePool,
    Renewed,
    Settled,
    TransferEvent,
    Unfenced,
)

DEADLINE_S = 10.0
NUM_RANKS = 3


def pull(pull_id: str, *block_ids: int) -> Pull:
    return Pull(pull_id, "peer", list(block_ids), list(block_ids), 5.0)


def done(pull_id: str, num_bytes: int = 0, elapsed_s: float = 0.0) -> Settled:
    return Settled(PullResult(pull_id, True, num_bytes, elapsed_s, num_blocks=2))


def failed(pull_id: str, reason: str, num_fenced: int = 0) -> Settled:
    result = PullResult(pull_id, False, error=reason, reason=reason, num_fenced=num_fenced)
    return Settled(result)


def test_a_pull_is_done_when_it_is_done_on_every_rank() -> None:
    merger = EventMerger(2)
    merger.expect(pull("a", 1, 2))
    assert merger.add(1, done("a", 100, 0.2)) == []
    assert merger.waits_for("a")
    assert merger.add(0, done("a", 150, 0.1)) == [done("a", 250, 0.2)]
    assert not merger.waits_for("a")


def test_a_block_of_a_failed_pull_is_safe_when_no_rank_writes_it() -> None:
    merger = EventMerger(2)
    merger.expect(pull("a", 1, 2, 3))
    assert merger.add(1, failed("a", "deadline", num_fenced=2)) == []
    assert merger.add(1, Unfenced([3])) == []
    # Rank 0 was faster than the cancel, so none of its reads can write a block.
    assert merger.add(0, done("a")) == [failed("a", "deadline", 2), Unfenced([3])]
    assert merger.add(1, Unfenced([2])) == [Unfenced([2])]
    assert merger.add(1, Unfenced([1])) == [Unfenced([1])]


def test_the_blocks_of_a_failed_pull_may_become_safe_one_after_the_other() -> None:
    merger = EventMerger(2)
    merger.expect(pull("a", 1, 2))
    merger.add(0, failed("a", "error", num_fenced=2))
    merger.add(1, failed("a", "error", num_fenced=2))
    for block in (2, 1):
        assert merger.add(0, Unfenced([block])) == []
        assert merger.add(1, Unfenced([block])) == [Unfenced([block])]
    assert merger._pulls == {}


def test_the_first_failure_is_the_reason() -> None:
    merger = EventMerger(2)
    merger.expect(pull("a", 1))
    merger.add(1, failed("a", "error", num_fenced=1))
    assert merger.add(0, failed("a", "cancelled")) == [failed("a", "error", num_fenced=1)]


def test_a_peer_is_connected_when_every_rank_has_connected_it() -> None:
    merger = EventMerger(2)
    assert merger.add(0, PeerConnected("p", "", ((100, 0.1), (400, 0.4)))) == []
    assert merger.add(0, PeerConnected("p", "", ((10, 0.1),))) == []  # of the next `connect`
    both = PeerConnected("p", "", ((200, 0.3),))
    assert merger.add(1, PeerConnected("p", "", ((100, 0.3),))) == [both]
    error = PeerConnected("p", "no route", ())
    assert merger.add(1, error) == [error]


def test_the_offers_of_all_ranks_are_one_answer() -> None:
    ready = [ProducerReady(5, bytes([i]), RemotePool(i, 1, 1, i, "DRAM")) for i in range(2)]
    merger = EventMerger(2)
    assert merger.add(1, ready[1]) == []
    (merged,) = merger.add(0, ready[0])
    assert isinstance(merged, ProducerReady)
    assert [(rank.metadata, rank.pool) for rank in merged.ranks] == [
        (rank.metadata, rank.pool) for rank in ready
    ]


def test_a_renewal_is_passed_on_and_only_the_first_breakdown() -> None:
    merger = EventMerger(2)
    assert merger.add(1, Renewed(1)) == [Renewed(1)]
    assert merger.add(1, Broken("why")) == [Broken("why")]
    assert merger.add(0, Broken("another")) == []


class MergerMachine(RuleBasedStateMachine):
    """Ranks that settle their parts of pulls in any order, and unfence blocks of failed ones, while
    an engine pulls into blocks that are safe."""

    def __init__(self) -> None:
        super().__init__()
        self.merger = EventMerger(NUM_RANKS)
        self.num_pulls = 0
        self.blocks: dict[str, set[int]] = {}
        self.open: dict[str, set[int]] = {}  # pull -> ranks on which it has not ended
        self.writes: dict[int, set[tuple[int, str]]] = {}  # block -> (rank, pull) that may write it
        self.unsafe: set[int] = set()  # to the engine
        self.results: dict[str, bool] = {}
        self.failed: set[str] = set()

    @rule(blocks=st.sets(st.integers(0, 7), min_size=1, max_size=4))
    def submit(self, blocks: set[int]) -> None:
        if blocks := blocks - self.unsafe:
            pull_id = f"pull {self.num_pulls}"
            self.num_pulls += 1
            self.blocks[pull_id] = blocks
            self.open[pull_id] = set(range(NUM_RANKS))
            for block in blocks:
                self.writes[block] = {(rank, pull_id) for rank in range(NUM_RANKS)}
            self.unsafe |= blocks
            self.merger.expect(pull(pull_id, *sorted(blocks)))

    @precondition(lambda self: any(self.open.values()))
    @rule(data=st.data(), is_done=st.booleans())
    def settle(self, data: st.DataObject, is_done: bool) -> None:
        left = sorted((pull_id, rank) for pull_id, ranks in self.open.items() for rank in ranks)
        pull_id, rank = data.draw(st.sampled_from(left))
        self.open[pull_id].remove(rank)
        if is_done:
            for block in self.blocks[pull_id]:
                self.writes[block].discard((rank, pull_id))
        else:
            self.failed.add(pull_id)
        self.apply(self.merger.add(rank, done(pull_id) if is_done else failed(pull_id, "error")))

    @precondition(lambda self: self.unfenceable())
    @rule(data=st.data())
    def unfence(self, data: st.DataObject) -> None:
        rank, pull_id, block = data.draw(st.sampled_from(self.unfenceable()))
        self.writes[block].remove((rank, pull_id))
        self.apply(self.merger.add(rank, Unfenced([block])))

    def unfenceable(self) -> list[tuple[int, str, int]]:
        return sorted(
            (rank, pull_id, block)
            for block, writers in self.writes.items()
            for rank, pull_id in writers
            if rank not in self.open[pull_id]
        )

    def apply(self, events: list[TransferEvent]) -> None:
        for event in events:
            if isinstance(event, Settled):
                result = event.result
                assert result.pull_id not in self.results
                assert not self.open[result.pull_id], "it has ended on every rank"
                assert result.done == (result.pull_id not in self.failed)
                self.results[result.pull_id] = result.done
                if result.done:
                    self.free(self.blocks[result.pull_id])
            else:
                assert isinstance(event, Unfenced)
                self.free(set(event.block_ids))

    def free(self, blocks: set[int]) -> None:
        assert blocks <= self.unsafe
        assert not any(self.writes[block] for block in blocks), "a rank may still write it"
        self.unsafe -= blocks

    @invariant()
    def what_no_rank_writes_is_safe(self) -> None:
        ended = {block for pull_id in self.results for block in self.blocks[pull_id]}
        left = {
            block for pull_id, ranks in self.open.items() if ranks for block in self.blocks[pull_id]
        }
        for block in ended - left:
            assert (block in self.unsafe) == bool(self.writes[block])

    def teardown(self) -> None:
        """When all reads have ended, the merger has forgotten everything."""
        for pull_id, ranks in self.open.items():
            for rank in sorted(ranks):
                self.open[pull_id].remove(rank)
                for block in self.blocks[pull_id]:
                    self.writes[block].discard((rank, pull_id))
                self.apply(self.merger.add(rank, done(pull_id)))
        for rank, _, block in self.unfenceable():
            self.writes[block] = {each for each in self.writes[block] if each[0] != rank}
            self.apply(self.merger.add(rank, Unfenced([block])))
        assert not self.unsafe
        assert self.merger._pulls == {}
        assert self.merger._pull_ids == {}


TestMerger = MergerMachine.TestCase


@dataclass
class Rank:
    """In place of a `TransferThread`: records the commands, and sends the events of the test."""

    called: SimpleQueue[tuple[object, ...]] = field(default_factory=SimpleQueue)
    on_event: Callable[[TransferEvent], None] = lambda _: None

    def make(self, on_event: Callable[[TransferEvent], None]) -> Any:
        self.on_event = on_event
        return self

    def next(self) -> tuple[object, ...]:
        return self.called.get(timeout=DEADLINE_S)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def submit(self, pull: Pull) -> None:
        if pull.pull_id == "one too many":
            raise InternalError("too many commands wait")
        self.called.put(("submit", pull))

    def cancel(self, pull_id: str) -> None:
        self.called.put(("cancel", pull_id))


class Ranks:
    def __init__(self) -> None:
        self.ranks = Rank(), Rank()
        here, there = Pipe()
        self.events: SimpleQueue[TransferEvent] = SimpleQueue()
        self.transfers = RankTransfers(self.ranks[0].make, [here], self.events.put)
        threading.Thread(target=serve, args=(there, self.ranks[1].make), daemon=True).start()
        self.transfers.start()


@pytest.fixture
def two() -> Ranks:
    return Ranks()


def test_a_failure_on_one_rank_cancels_the_pull_on_the_others(two: Ranks) -> None:
    two.transfers.submit(pull("a", 1))
    assert [rank.next() for rank in two.ranks] == [("submit", pull("a", 1))] * 2
    two.ranks[1].on_event(failed("a", "error", num_fenced=1))
    assert two.ranks[0].next() == ("cancel", "a")
    assert two.events.empty()
    two.ranks[0].on_event(failed("a", "cancelled"))
    assert two.events.get(timeout=DEADLINE_S) == failed("a", "error", num_fenced=1)
    two.ranks[0].on_event(Unfenced([1]))
    two.ranks[1].on_event(Unfenced([1]))
    assert two.events.get(timeout=DEADLINE_S) == Unfenced([1])
    two.transfers.stop()
    assert two.events.empty()


def test_a_rank_that_refuses_a_command_is_broken(two: Ranks) -> None:
    two.transfers.submit(pull("one too many", 1))
    broken = two.events.get(timeout=DEADLINE_S)
    assert isinstance(broken, Broken)
    assert "too many commands wait" in broken.message
    two.transfers.stop()
