"""The thread's contract where NIXL is missing or broken; tests/service has it over real NIXL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest

from tandem.config import TransferConfig
from tandem.engine.cache.layout import BlockLayout
from tandem.errors import Incompatible, InternalError
from tandem.transfer import nixl, nixl_agent, thread
from tandem.transfer.nixl import NixlReader
from tandem.transfer.protocol import LocalPool, Pull, PullResult, RemotePool, layout_fields
from tandem.transfer.ucx_mode import UcxMode

LAYOUT = BlockLayout(8, 1, 1, 4, 8, "float32")
DEADLINE_S = 10.0
MEMORY = np.zeros(LAYOUT.pool_bytes, np.uint8)
POOL = LocalPool(MEMORY.ctypes.data, MEMORY.nbytes, 0, "DRAM", layout_fields(LAYOUT))
REMOTE = RemotePool(0, 8, LAYOUT.block_bytes, 0, "DRAM")


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("no_such_nixl",))


@pytest.fixture
def events() -> SimpleQueue[thread.TransferEvent]:
    return SimpleQueue()


@pytest.fixture
def transfer(events: SimpleQueue[thread.TransferEvent]) -> Iterator[thread.TransferThread]:
    under_test = thread.TransferThread(POOL, TransferConfig(), "alone", events.put)
    under_test.start()
    yield under_test
    under_test.stop()


def pull(**changes: object) -> Pull:
    fields = {
        "pull_id": "a",
        "peer_id": "nobody",
        "source_block_ids": [1, 2],
        "local_block_ids": [3, 4],
        "deadline_s": DEADLINE_S,
    }
    return Pull(**(fields | changes))


def test_loading_a_missing_nixl_tells_why(without_nixl: None) -> None:
    with pytest.raises(Incompatible, match="no_such_nixl: No module named 'no_such_nixl'"):
        nixl_agent.load_nixl()


def test_without_nixl_each_question_is_answered(
    without_nixl: None,
    transfer: thread.TransferThread,
    events: SimpleQueue[thread.TransferEvent],
) -> None:
    transfer.connect("peer", b"metadata", REMOTE)
    connected = events.get(timeout=DEADLINE_S)
    assert isinstance(connected, thread.PeerConnected)
    assert "NIXL cannot be loaded" in connected.error
    transfer.source(7)
    source = events.get(timeout=DEADLINE_S)
    assert isinstance(source, thread.SourceReady)
    assert (source.request_id, source.metadata) == (7, b"")
    assert source.pool == RemotePool(POOL.address, 8, LAYOUT.block_bytes, 0, "DRAM")
    assert "NIXL cannot be loaded" in source.error


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, "the peer nobody is not connected"),
        ({"source_block_ids": [1]}, "1 source blocks for 2 here"),
        ({"source_block_ids": [], "local_block_ids": []}, "0 source blocks for 0 here"),
        ({"local_block_ids": [3, 8]}, "a block id is not in a pool of 8 blocks"),
    ],
)
def test_a_pull_that_cannot_start_fails_and_leaves_its_blocks_safe(
    transfer: thread.TransferThread,
    events: SimpleQueue[thread.TransferEvent],
    changes: dict[str, object],
    error: str,
) -> None:
    wanted = pull(**changes)
    transfer.submit(wanted)
    settled = events.get(timeout=DEADLINE_S)
    assert settled == thread.Settled(PullResult("a", False, error=error, reason="refused"))
    if wanted.local_block_ids:
        assert events.get(timeout=DEADLINE_S) == thread.Unfenced(wanted.local_block_ids)


def test_a_peer_with_other_blocks_is_incompatible(
    transfer: thread.TransferThread, events: SimpleQueue[thread.TransferEvent]
) -> None:
    transfer.connect("peer", b"metadata", RemotePool(0, 8, LAYOUT.block_bytes * 2, 0, "DRAM"))
    connected = events.get(timeout=DEADLINE_S)
    assert isinstance(connected, thread.PeerConnected)
    assert connected.error == "peer has blocks of 512 bytes, here of 256"


def test_cancelling_and_disconnecting_what_is_unknown_is_nothing(
    transfer: thread.TransferThread, events: SimpleQueue[thread.TransferEvent]
) -> None:
    transfer.cancel("unknown")
    transfer.disconnect("unknown")
    transfer.submit(pull())
    assert isinstance(events.get(timeout=DEADLINE_S), thread.Settled)


def test_after_a_bug_everything_is_answered_and_only_what_never_started_is_unfenced(
    monkeypatch: pytest.MonkeyPatch,
    transfer: thread.TransferThread,
    events: SimpleQueue[thread.TransferEvent],
) -> None:
    def broken(reader: NixlReader) -> list[PullResult]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(NixlReader, "poll", broken)
    submit: list[Callable[[], None]] = [
        lambda: transfer.submit(pull()),
        lambda: transfer.submit(pull()),
    ]
    for number, each in enumerate(submit):
        each()
        settled = events.get(timeout=DEADLINE_S)
        assert isinstance(settled, thread.Settled)
        assert not settled.result.done
        assert settled.result.reason == "broken"
        assert "a bug" in settled.result.error
        if number == 0:
            assert isinstance(told := events.get(timeout=DEADLINE_S), thread.Broken)
            assert "a bug" in told.message
    assert events.get(timeout=DEADLINE_S) == thread.Unfenced([3, 4])  # of the one never started
    transfer.connect("peer", b"metadata", REMOTE)
    connected = events.get(timeout=DEADLINE_S)
    assert isinstance(connected, thread.PeerConnected)
    assert "a bug" in connected.error
    assert events.empty()


def test_a_reader_that_cannot_be_made_anew_is_told_once_and_not_before_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    reader = NixlReader(
        POOL, "alone", mode=UcxMode.MEMORY, quarantine_blocks_max=4, clock=lambda: now
    )

    def fails(*args: object) -> None:
        raise Incompatible("no memory to register")

    def connect() -> None:
        with pytest.raises(Incompatible):
            reader.connect("peer", b"metadata", REMOTE)

    monkeypatch.setattr(nixl, "Generation", fails)
    connect()
    now += 2 * nixl.RECOVER_S
    connect()
    assert reader.failure() == "", "without NIXL from the start nothing is lost: gRPC is left"
    reader.fence()
    connect()
    assert "no memory to register" in reader.failure()
    monkeypatch.setattr(nixl, "Generation", lambda *args: SimpleNamespace(load=lambda *peer: None))
    reader.connect("peer", b"metadata", REMOTE)
    assert reader.failure() == ""


def test_the_queue_of_commands_is_bounded(events: SimpleQueue[thread.TransferEvent]) -> None:
    never_started = thread.TransferThread(POOL, TransferConfig(), "idle", events.put)
    for _ in range(thread.COMMANDS_MAX):
        never_started.cancel("x")
    with pytest.raises(InternalError, match="4096 commands wait"):
        never_started.cancel("x")
