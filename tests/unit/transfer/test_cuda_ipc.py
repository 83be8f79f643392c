"""Reads over CUDA IPC: with a device in shared memory, and with a stand-in for CUDA's driver."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvGroup, KvLayout
from tandem.engine.cache.layout.pool_memory import create_shared, size_shared
from tandem.errors import Incompatible, InternalError
from tandem.transfer.cuda_ipc import cuda
from tandem.transfer.cuda_ipc.agent import BlockCopy, CudaIpcAgent
from tandem.transfer.reads import block_reader
from tandem.transfer.reads.block_reader import BlockReader
from tandem.transfer.reads.messages import LocalPool, PeerRank, Pull, PullResult
from tandem_bench.shared_memory_device import SharedMemoryDevice

DEADLINE_S = 10.0
ONE_GROUP = KvLayout.of_one(BlockLayout(8, 1, 1, 4, 8, "float32"))


def grouped(num_full: int, num_window: int) -> KvLayout:
    """Two KV groups, whose blocks have 256 and 512 bytes."""
    full = KvGroup((0,), None, BlockLayout(num_full, 1, 1, 4, 8, "float32"))
    window = KvGroup((1, 2), 64, BlockLayout(num_window, 1, 2, 4, 8, "float32"))
    return KvLayout((full, window))


class Worker:
    """A pool in shared memory, its device, and a reader of peers' blocks."""

    def __init__(self, layout: KvLayout = ONE_GROUP, fill: int = 0, blocks_max: int = 8) -> None:
        fd = create_shared()
        assert fd is not None
        pages = size_shared(os.dup(fd), layout.pool_bytes)
        self.memory = np.frombuffer(pages, np.uint8)
        self.memory[:] = fill
        self.device = SharedMemoryDevice(fd, self.memory)
        self.pool = LocalPool(self.memory.ctypes.data, self.memory.nbytes, 0, "DRAM", layout)
        self.now = 100.0
        self.results: list[PullResult] = []
        self.unfenced: list[int] = []
        self.reader = BlockReader(
            self.pool,
            lambda number: CudaIpcAgent(self.device),
            quarantine_blocks_max=blocks_max,
            clock=lambda: self.now,
        )

    def block(self, block_id: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.memory[self.pool.layout.spans.span(block_id)]

    def connect(self, producer: Worker, peer_id: str = "peer") -> None:
        metadata = producer.device.export(producer.pool.address)
        self.reader.connect(peer_id, [PeerRank(metadata, producer.pool.remote())])

    def submit(self, pull_id: str, theirs: list[int], ours: list[int], peer: str = "peer") -> None:
        self.reader.submit(Pull(pull_id, peer, theirs, ours, DEADLINE_S))

    def poll_until(self, is_true: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE_S
        while not is_true():
            assert time.monotonic() < until
            self.results += self.reader.poll()
            self.unfenced += self.reader.unfenced()
            time.sleep(0.001)

    def result(self, pull_id: str) -> PullResult:
        self.poll_until(lambda: any(each.pull_id == pull_id for each in self.results))
        return next(each for each in self.results if each.pull_id == pull_id)


def test_blocks_of_two_groups_arrive_where_they_belong() -> None:
    producer, consumer = Worker(grouped(6, 3)), Worker(grouped(4, 5))
    producer.memory[:] = np.random.default_rng(0).integers(0, 256, producer.memory.nbytes)
    consumer.connect(producer)
    # Ids from 6 on (producer) and from 4 on (consumer) are in the second pool.
    pairs = {5: 0, 8: 4, 0: 3, 6: 8}
    consumer.submit("pull", list(pairs), list(pairs.values()))
    assert consumer.result("pull").done
    for theirs, ours in pairs.items():
        assert np.array_equal(consumer.block(ours), producer.block(theirs))
    others = [block for block in range(9) if block not in pairs.values()]
    assert not any(consumer.block(block).any() for block in others)


def test_a_block_is_never_read_into_a_block_of_another_group() -> None:
    producer, consumer = Worker(grouped(6, 3), fill=1), Worker(grouped(6, 3))
    consumer.connect(producer)
    consumer.submit("pull", [0], [7])
    result = consumer.result("pull")
    assert not result.done
    assert "different KV groups" in result.error
    assert not consumer.memory.any()


def test_a_failing_pull_does_not_unmap_memory_that_another_pull_is_copying() -> None:
    """An error disconnects the peer, so that the next pull connects again."""
    producer, consumer = Worker(grouped(6, 3), fill=1), Worker(grouped(6, 3))
    consumer.connect(producer)
    consumer.device.may_copy.clear()
    consumer.submit("good", [0], [1])
    consumer.results += consumer.reader.poll()
    consumer.submit("bad", [0], [7])
    threading.Timer(0.05, consumer.device.may_copy.set).start()
    assert not consumer.result("bad").done
    assert consumer.device.num_mappings == 0
    assert consumer.result("good").done
    assert consumer.block(1).all()
    consumer.submit("next", [0], [2])
    assert consumer.result("next").done


def test_a_probe_reads_into_scratch_memory() -> None:
    producer, consumer = Worker(fill=1), Worker()
    consumer.connect(producer)
    consumer.reader.probe("probe", "peer", 8, DEADLINE_S)
    result = consumer.result("probe")
    assert (result.done, result.num_bytes) == (True, producer.memory.nbytes)
    assert not consumer.memory.any()


def cancelled_in_mid_copy() -> Worker:
    """A consumer whose pull into block 3 was given up. The copy is queued, and runs when the device
    `may_copy`."""
    consumer = Worker()
    consumer.connect(Worker(fill=1))
    consumer.device.may_copy.clear()
    consumer.submit("pull", [5], [3])
    consumer.results += consumer.reader.poll()
    consumer.reader.cancel("pull")
    assert consumer.result("pull").reason == "cancelled"
    assert consumer.unfenced == []
    return consumer


def test_a_given_up_copy_keeps_its_block_fenced_until_it_has_ended() -> None:
    consumer = cancelled_in_mid_copy()
    consumer.device.may_copy.set()
    consumer.poll_until(lambda: consumer.unfenced == [3])
    assert consumer.block(3).all(), "no byte arrives later"
    assert consumer.device.num_mappings == 1, "the peer is still connected"


def replace_agent(consumer: Worker) -> None:
    """Raises an error if the block is free before its copy has ended, or if the memory of the peer
    stays mapped."""
    consumer.now += block_reader.GRACE_S
    consumer.reader.poll()
    assert consumer.reader.unfenced() == [3]
    assert consumer.block(3).all(), "the block is free before its copy has ended"
    consumer.poll_until(lambda: consumer.reader.wait_s() is None)
    assert consumer.reader.num_renewals == 1
    consumer.reader.disconnect("peer")
    assert not consumer.device.num_mappings, "the memory of the peer stays mapped"


def test_a_replaced_agent_waits_for_its_copies_and_unmaps_its_peers() -> None:
    consumer = cancelled_in_mid_copy()
    threading.Timer(0.05, consumer.device.may_copy.set).start()
    replace_agent(consumer)


def test_the_checks_find_a_device_that_does_not_wait() -> None:
    consumer = cancelled_in_mid_copy()
    consumer.device.waits = False
    with pytest.raises(RuntimeError, match="while a copy from it is under way"):
        replace_agent(consumer)
    consumer.device.may_copy.set()


def test_the_checks_find_a_device_that_leaves_memory_mapped() -> None:
    consumer = cancelled_in_mid_copy()
    consumer.device.leaks = True
    threading.Timer(0.05, consumer.device.may_copy.set).start()
    with pytest.raises(AssertionError, match="stays mapped"):
        replace_agent(consumer)


def test_a_disconnected_peers_memory_is_unmapped_when_no_copy_from_it_is_left() -> None:
    producer, consumer = Worker(fill=1), Worker()
    other = Worker(fill=2)
    consumer.connect(producer)
    consumer.connect(other, "other")
    consumer.device.may_copy.clear()
    consumer.submit("given up", [5], [3])
    consumer.submit("under way", [5], [4], "other")  # so that the agent is not replaced
    for _ in range(2):
        consumer.results += consumer.reader.poll()
    consumer.reader.disconnect("peer")
    assert consumer.result("given up").reason == "disconnected"
    assert consumer.device.num_mappings == 2, "a copy from it is under way"
    consumer.device.may_copy.set()
    assert consumer.result("under way").done
    consumer.poll_until(lambda: consumer.unfenced == [3])
    assert consumer.device.num_mappings == 1
    assert consumer.block(4).max() == 2


def test_closing_waits_for_copies_and_unmaps_everything() -> None:
    producer, consumer = Worker(fill=1), Worker()
    consumer.connect(producer)
    consumer.device.delay_s = 0.05
    consumer.submit("pull", [5], [3])
    consumer.reader.poll()
    consumer.reader.close()
    assert consumer.block(3).all()
    assert not consumer.device.num_mappings


def test_a_restarted_peer_takes_the_place_of_the_old_one() -> None:
    consumer = Worker()
    consumer.connect(Worker(fill=1))
    consumer.connect(Worker(fill=2))
    assert consumer.device.num_mappings == 1
    consumer.submit("pull", [0], [0])
    assert consumer.result("pull").done
    assert consumer.block(0).min() == 2


def test_memory_that_cannot_be_mapped_refuses_the_peer() -> None:
    consumer = Worker()
    consumer.device.failing = {"open"}
    with pytest.raises(Incompatible, match="told to fail"):
        consumer.connect(Worker())
    assert consumer.device.num_mappings == 0


def test_a_copy_that_cannot_be_queued_fails_its_pull_and_its_block_is_freed() -> None:
    consumer = Worker()
    consumer.connect(Worker(fill=1))
    consumer.device.failing = {"start_copy"}
    consumer.submit("pull", [0], [0])
    assert consumer.result("pull").reason == "error"
    consumer.now += block_reader.GRACE_S
    consumer.poll_until(lambda: consumer.unfenced == [0])
    consumer.device.failing = set()
    consumer.submit("again", [0], [0])
    assert consumer.result("again").done


def test_memory_that_cannot_be_unmapped_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    consumer = Worker()
    consumer.connect(Worker())
    consumer.device.failing = {"close"}
    consumer.reader.disconnect("peer")
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "mapping of a peer's GPU memory" in record.getMessage()


# CUDA's driver and the kernel


class Driver:
    """Stands in for libcuda. An allocation begins 4096 bytes before the pool."""

    def __init__(self) -> None:
        self.code = 0
        self.calls: list[tuple[object, ...]] = []

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, pointer: Any) -> int:  # noqa: N802
        base._obj.value = pointer.value - 4096
        return self.code

    def cuIpcGetMemHandle(self, handle: Any, pointer: Any) -> int:  # noqa: N802
        ctypes.memset(ctypes.addressof(handle._obj), 7, 64)
        self.calls.append(("get", pointer.value))
        return self.code

    def cuIpcOpenMemHandle_v2(self, base: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        base._obj.value = 1 << 40
        self.calls.append(("open", bytes(handle), flags.value))
        return self.code

    def cuIpcCloseMemHandle(self, base: Any) -> int:  # noqa: N802
        self.calls.append(("close", base.value))
        return self.code

    def cuGetErrorName(self, code: int, name: Any) -> int:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(query=bool))
    return driver


def test_the_driver_maps_the_allocation_and_the_pool_is_found_in_it(driver: Driver) -> None:
    device = cuda.CudaIpcDevice(torch.device("cuda:0"))
    metadata = device.export(50_000)
    address = device.open(metadata)
    assert address == (1 << 40) + 4096
    device.close(address)
    handle = bytes([7] * 64)
    assert driver.calls == [("get", 50_000 - 4096), ("open", handle, 1), ("close", 1 << 40)]


def test_errors_of_the_driver_have_its_names(driver: Driver) -> None:
    device = cuda.CudaIpcDevice(torch.device("cuda:0"))
    metadata = device.export(50_000)
    address = device.open(metadata)
    driver.code = 1
    with pytest.raises(Incompatible, match=r"cannot be shared .*CUDA_ERROR_INVALID_VALUE"):
        device.export(50_000)
    with pytest.raises(Incompatible, match="cuIpcOpenMemHandle_v2 returned 1"):
        device.open(metadata)
    with pytest.raises(InternalError, match="cannot be unmapped"):
        device.close(address)


def test_the_kernel_copies_blocks_by_their_addresses() -> None:
    """Neither side is a tensor that torch has allocated."""
    source = np.random.default_rng(1).integers(0, 256, (6, 512), np.uint8)
    target = np.zeros((4, 512), np.uint8)
    ids = np.array([5, 0], np.int32), np.array([3, 1], np.int32)
    blocks = BlockCopy(source.ctypes.data, target.ctypes.data, 512, 512, 512, *ids)
    cuda.copy_blocks(blocks, torch.device("cpu"))
    assert np.array_equal(target[[3, 1]], source[[5, 0]])
    assert not target[[0, 2]].any()


def test_the_kernel_copies_the_same_part_of_each_block() -> None:
    source = np.random.default_rng(1).integers(0, 256, (6, 512), np.uint8)
    target = np.zeros((4, 1024), np.uint8)
    ids = np.array([5, 0], np.int32), np.array([3, 1], np.int32)
    parts = source.ctypes.data + 256, target.ctypes.data + 512
    cuda.copy_blocks(BlockCopy(*parts, 512, 1024, 256, *ids), torch.device("cpu"))
    expected = np.zeros_like(target)
    expected[[3, 1], 512:768] = source[[5, 0], 256:]
    assert np.array_equal(target, expected)
