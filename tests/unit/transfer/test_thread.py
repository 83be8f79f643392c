"""The thread's KV compatibility where NIXL is missing or broken; tests/service has it over real
NIXL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tandem.common.config.transfer import TransferConfig
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.errors import Incompatible, InternalError
from tandem.transfer import thread
from tandem.transfer.nixl import agent, producer
from tandem.transfer.nixl.ucx_mode import UcxMode
from tandem.transfer.reads import block_reader as reader_module
from tandem.transfer.reads import messages
from tandem.transfer.reads.block_reader import RECOVER_S, BlockReader
from tandem.transfer.reads.messages import LocalPool, PeerRank, Pull, PullResult, RemotePool

LAYOUT = KvLayout.of_one(BlockLayout(8, 1, 1, 4, 8, "float32"))
DEADLINE_S = 10.0
MEMORY = np.zeros(LAYOUT.pool_bytes, np.uint8)
POOL = LocalPool(MEMORY.ctypes.data, MEMORY.nbytes, 0, "DRAM", LAYOUT)
REMOTE = RemotePool(0, 8, LAYOUT.block_bytes, 0, "DRAM")


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "nixl_modules", lambda: ("no_such_nixl",))


@pytest.fixture
def events() -> SimpleQueue[messages.TransferEvent]:
    return SimpleQueue()


@pytest.fixture
def transfer(events: SimpleQueue[messages.TransferEvent]) -> Iterator[thread.TransferThread]:
    under_test = thread.TransferThread(POOL, TransferConfig(), "alone", events.put)
    under_test.start()
    yield under_test
    under_test.stop()


def pull(**changes: object) -> Pull:
    fields = {
        "pull_id": "a",
        "peer_id": "nobody",
        "producer_block_ids": [1, 2],
        "local_block_ids": [3, 4],
        "deadline_s": DEADLINE_S,
    }
    return Pull(**(fields | changes))


def test_what_is_to_run_first_runs_first_and_in_the_thread() -> None:
    ran: SimpleQueue[str] = SimpleQueue()
    under_test = thread.TransferThread(
        POOL,
        TransferConfig(),
        "first",
        lambda _: ran.put("event"),
        lambda: ran.put(threading.current_thread().name),
    )
    under_test.start()
    under_test.submit(pull())
    assert [ran.get(timeout=DEADLINE_S) for _ in range(2)] == ["transfer", "event"]
    under_test.stop()


def test_loading_a_missing_nixl_tells_why(without_nixl: None) -> None:
    with pytest.raises(Incompatible, match="no_such_nixl: No module named 'no_such_nixl'"):
        agent.load_nixl()


def test_without_nixl_each_question_is_answered(
    without_nixl: None,
    transfer: thread.TransferThread,
    events: SimpleQueue[messages.TransferEvent],
) -> None:
    transfer.connect("peer", [PeerRank(b"metadata", REMOTE)])
    connected = events.get(timeout=DEADLINE_S)
    assert isinstance(connected, messages.PeerConnected)
    assert "NIXL cannot be loaded" in connected.error
    transfer.producer(7)
    ready = events.get(timeout=DEADLINE_S)
    assert isinstance(ready, messages.ProducerReady)
    assert (ready.request_id, ready.metadata) == (7, b"")
    assert ready.pool == RemotePool(POOL.address, 8, LAYOUT.block_bytes, 0, "DRAM")
    assert "NIXL cannot be loaded" in ready.error


EQUAL = "the numbers must be equal and above 0"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, "the peer nobody is not connected"),
        (
            {"producer_block_ids": [1]},
            f"the pull has 1 producer blocks and 2 local blocks; {EQUAL}",
        ),
        (
            {"producer_block_ids": [], "local_block_ids": []},
            f"the pull has 0 producer blocks and 0 local blocks; {EQUAL}",
        ),
        (
            {"local_block_ids": [3, 8]},
            "a block id of the pull is out of range; it must be from 0 to 7",
        ),
    ],
)
def test_a_pull_that_cannot_start_fails_and_leaves_its_blocks_safe(
    transfer: thread.TransferThread,
    events: SimpleQueue[messages.TransferEvent],
    changes: dict[str, object],
    error: str,
) -> None:
    wanted = pull(**changes)
    transfer.submit(wanted)
    settled = events.get(timeout=DEADLINE_S)
    assert settled == messages.Settled(PullResult("a", False, error=error, reason="refused"))
    if wanted.local_block_ids:
        assert events.get(timeout=DEADLINE_S) == messages.Unfenced(wanted.local_block_ids)


def test_a_peer_with_other_blocks_is_incompatible(
    transfer: thread.TransferThread, events: SimpleQueue[messages.TransferEvent]
) -> None:
    large = RemotePool(0, 8, LAYOUT.block_bytes * 2, 0, "DRAM")
    transfer.connect("peer", [PeerRank(b"metadata", large)])
    connected = events.get(timeout=DEADLINE_S)
    assert isinstance(connected, messages.PeerConnected)
    assert (
        connected.error == "rank 0 of peer has blocks of 512 bytes; this worker expects 256 bytes"
    )


def test_cancelling_and_disconnecting_what_is_unknown_is_nothing(
    transfer: thread.TransferThread, events: SimpleQueue[messages.TransferEvent]
) -> None:
    transfer.cancel("unknown")
    transfer.disconnect("unknown")
    transfer.submit(pull())
    assert isinstance(events.get(timeout=DEADLINE_S), messages.Settled)


def test_after_a_bug_everything_is_answered_and_only_what_never_started_is_unfenced(
    monkeypatch: pytest.MonkeyPatch,
    transfer: thread.TransferThread,
    events: SimpleQueue[messages.TransferEvent],
) -> None:
    def broken(consumer: BlockReader) -> list[PullResult]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(BlockReader, "poll", broken)
    submit: list[Callable[[], None]] = [
        lambda: transfer.submit(pull()),
        lambda: transfer.submit(pull()),
    ]
    for number, each in enumerate(submit):
        each()
        settled = events.get(timeout=DEADLINE_S)
        assert isinstance(settled, messages.Settled)
        assert not settled.result.done
        assert settled.result.reason == "broken"
        assert "a bug" in settled.result.error
        if number == 0:
            assert isinstance(told := events.get(timeout=DEADLINE_S), messages.Broken)
            assert "a bug" in told.message
    assert events.get(timeout=DEADLINE_S) == messages.Unfenced([3, 4])  # of the one never started
    transfer.connect("peer", [PeerRank(b"metadata", REMOTE)])
    connected = events.get(timeout=DEADLINE_S)
    assert isinstance(connected, messages.PeerConnected)
    assert "a bug" in connected.error
    assert events.empty()


def test_a_consumer_that_cannot_be_made_anew_is_told_once_and_not_before_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    consumer = BlockReader(
        POOL, lambda number: SimpleNamespace(), quarantine_blocks_max=4, clock=lambda: now
    )

    def fails(*args: object) -> None:
        raise Incompatible("no memory to register")

    def connect() -> None:
        with pytest.raises(Incompatible):
            consumer.connect("peer", [PeerRank(b"metadata", REMOTE)])

    monkeypatch.setattr(reader_module, "AgentInstance", fails)
    connect()
    now += 2 * RECOVER_S
    connect()
    assert consumer.failure() == "", "without NIXL from the start nothing is lost: gRPC is left"
    consumer.fence()
    connect()
    assert "no memory to register" in consumer.failure()
    monkeypatch.setattr(
        reader_module, "AgentInstance", lambda *args: SimpleNamespace(load=lambda *peer: None)
    )
    consumer.connect("peer", [PeerRank(b"metadata", REMOTE)])
    assert consumer.failure() == ""


@pytest.mark.parametrize(
    ("transport", "mode", "nixl", "ucx_uses_cuda_ipc", "cuda_ipc"),
    [
        ("auto", UcxMode.MEMORY, b"", None, b"handle"),
        ("auto", UcxMode.RDMA, b"nixl", False, b"handle"),
        ("auto", UcxMode.TCP, b"nixl", False, b"handle"),
        ("nixl", UcxMode.MEMORY, b"nixl", True, b""),
        ("cuda_ipc", UcxMode.RDMA, b"", None, b"handle"),
    ],
)
def test_ucx_has_no_part_in_reads_within_a_machine_of_gpus_that_this_process_maps(
    transport: str,
    mode: UcxMode,
    nixl: bytes,
    ucx_uses_cuda_ipc: bool | None,
    cuda_ipc: bytes,
    monkeypatch: pytest.MonkeyPatch,
    events: SimpleQueue[messages.TransferEvent],
) -> None:
    created: list[bool] = []

    def make(*_: object, with_cuda_ipc: bool, **__: object) -> Any:
        created.append(with_cuda_ipc)
        return SimpleNamespace(metadata=lambda: b"nixl", register=lambda **_: None, close=list)

    monkeypatch.setattr(producer, "NixlAgent", make)
    monkeypatch.setattr(thread, "host_identity", lambda _: SimpleNamespace(mode=mode))
    device: Any = SimpleNamespace(export=lambda address: b"handle")
    config = TransferConfig(transport=transport)  # type: ignore[arg-type]
    under_test = thread.TransferThread(POOL, config, "gpu", events.put, ipc_device=device)
    under_test.start()
    under_test.producer(1)
    ready = events.get(timeout=DEADLINE_S)
    under_test.stop()
    assert ready == messages.ProducerReady(1, nixl, POOL.remote(), cuda_ipc=cuda_ipc)
    assert created == ([] if ucx_uses_cuda_ipc is None else [ucx_uses_cuda_ipc])


def test_a_pool_that_cannot_be_shared_is_said(
    events: SimpleQueue[messages.TransferEvent],
) -> None:
    def fails(address: int) -> bytes:
        raise Incompatible("the KV pool cannot be shared over CUDA IPC")

    device: Any = SimpleNamespace(export=fails)
    config = TransferConfig(transport="cuda_ipc")
    under_test = thread.TransferThread(POOL, config, "gpu", events.put, ipc_device=device)
    under_test.start()
    under_test.producer(1)
    ready = events.get(timeout=DEADLINE_S)
    under_test.stop()
    error = "the KV pool cannot be shared over CUDA IPC"
    assert ready == messages.ProducerReady(1, b"", POOL.remote(), cuda_ipc_error=error)


def test_a_transport_that_this_process_does_not_use_is_refused(
    events: SimpleQueue[messages.TransferEvent], transfer: thread.TransferThread
) -> None:
    transfer.connect("peer", [PeerRank(b"handle", REMOTE)], "cuda_ipc")
    error = "the engine process does not use the transport cuda_ipc"
    connected = messages.PeerConnected("peer", error, transport="cuda_ipc")
    assert events.get(timeout=DEADLINE_S) == connected
    transfer.disconnect("peer", "cuda_ipc")
    transfer.submit(pull(transport="cuda_ipc"))
    result = PullResult("a", False, error=error, reason="broken")
    assert events.get(timeout=DEADLINE_S) == messages.Settled(result)
    assert events.get(timeout=DEADLINE_S) == messages.Unfenced([3, 4])
    transfer.submit(pull())
    settled = events.get(timeout=DEADLINE_S)
    assert isinstance(settled, messages.Settled)
    assert settled.result.reason == "refused", "the thread is not broken"


@pytest.mark.parametrize(
    ("memory", "mode", "is_larger"),
    [
        ("DRAM", UcxMode.MEMORY, False),
        ("VRAM", UcxMode.RDMA, False),
        ("VRAM", UcxMode.MEMORY, True),
    ],
)
def test_nixl_reads_gpus_of_one_machine_in_pieces_of_another_size(
    memory: str, mode: UcxMode, is_larger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "device_bytes", lambda **_: 7)
    pool = replace(POOL, memory=memory)
    found = thread._nixl_piece_bytes(pool, mode, quarantine_blocks_max=4)
    assert found == (7 if is_larger else thread.FIRST_BYTES)


def test_the_queue_of_commands_is_bounded(events: SimpleQueue[messages.TransferEvent]) -> None:
    never_started = thread.TransferThread(POOL, TransferConfig(), "idle", events.put)
    for _ in range(thread.COMMANDS_MAX):
        never_started.cancel("x")
    with pytest.raises(InternalError, match="4096 commands already wait"):
        never_started.cancel("x")
