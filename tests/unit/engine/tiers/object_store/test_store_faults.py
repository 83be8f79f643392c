"""Errors of a store that nobody expects: no block is given away while a write still reads it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tandem.engine.tiers.device.blocks import DONE, BlocksInPlace
from tandem.engine.tiers.io_thread import IoThread
from tandem.engine.tiers.jobs import Target, Write, write_all
from tandem.engine.tiers.object_store import storage as object_storage
from tandem.engine.tiers.object_store.storage import ObjectStorage
from tandem.engine.tiers.seal import Plain
from tandem.engine.tiers.storage import BadBlock, Bytes, Entry

obstore = pytest.importorskip("obstore")
NUM_BLOCKS, BLOCK_BYTES = 24, 8
HASHES = [bytes([number]) * 16 for number in range(NUM_BLOCKS)]
GONE = 0xFF  # what is in a block when it has the next sequence's KV


class Pool:
    """Blocks full of their numbers plus 1, each of which has other bytes once its write ended."""

    def __init__(self, storage: ObjectStorage) -> None:
        numbers = np.arange(1, NUM_BLOCKS + 1, dtype=np.uint8)
        self.rows = np.repeat(numbers[:, None], BLOCK_BYTES, axis=1)
        self.storage = storage
        self.ended: list[int] = []

    def write_all(self) -> list[Target]:
        targets = [Target(0, self.storage, [slot], False) for slot in range(NUM_BLOCKS)]
        writes = [
            (Write(number, Entry(HASHES[number], b""), DONE, [target], 0, self.end), target)
            for number, target in enumerate(targets)
        ]
        write_all(writes, BlocksInPlace(self.rows).open_channel())
        return targets

    def end(self, write: Write, target: Target) -> None:
        self.ended.append(write.block_id)
        self.rows[write.block_id] = GONE

    def stored(self) -> dict[int, set[int]]:
        """Returns the bytes of each block that the store has."""
        found = {}
        for number, block_hash in enumerate(HASHES):
            data = np.zeros(BLOCK_BYTES, np.uint8)
            try:
                self.storage.read(0, block_hash, data)
            except BadBlock:
                continue
            found[number] = set(data.tolist())
        return found


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr(object_storage, "_PAUSE_S", 0.0)
    store = obstore.store.MemoryStore()
    return Pool(ObjectStorage(store, place="here", identity="x", seal=Plain()))


@pytest.mark.parametrize("place", ["seal", "begin", "put"])
def test_blocks_are_not_given_away_while_they_are_read(
    place: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One write raises while the store's threads are busy and others wait for one."""
    hold = threading.Event()
    put, begin_write = obstore.put, pool.storage.begin_write

    def held(client: Any, name: str, data: bytes) -> None:
        if place == "put" and HASHES[0].hex() in name:
            raise RuntimeError("not one of obstore's")
        if not hold.wait(0.3):  # longer than it takes to end all writes that are not awaited
            hold.set()
        put(client, name, data)

    class Raising(Plain):
        def seal(self, block_hash: bytes, data: Bytes) -> Bytes:
            if block_hash == HASHES[0]:
                raise RuntimeError("no memory")
            return super().seal(block_hash, data)

    def begin(slot: int, entry: Entry, data: Bytes) -> Any:
        if entry.block_hash == HASHES[16]:
            raise RuntimeError("no thread")
        return begin_write(slot, entry, data)

    monkeypatch.setattr(obstore, "put", held)
    if place == "seal":
        pool.storage._seal = Raising()
    if place == "begin":
        monkeypatch.setattr(pool.storage, "begin_write", begin)
    with pytest.raises(RuntimeError):
        pool.write_all()
    hold.set()
    pool.storage._writers.shutdown(wait=True)
    assert sorted(pool.ended) == list(range(NUM_BLOCKS))
    stored = pool.stored()
    assert stored == {number: {number + 1} for number in stored}
    pool.storage.close()


def test_writes_need_no_further_thread(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of threads that cannot start one queues the call all the same, and raises."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert all(target.is_written for target in pool.write_all())
    pool.storage.close()


def test_a_store_is_tried_again_after_an_error_that_nobody_knows(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [obstore.exceptions.GenericError("it is down"), RuntimeError("not one of obstore's")]
    head = obstore.head

    def failing(*about: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return head(*about)

    monkeypatch.setattr(obstore, "head", failing)
    with pytest.raises(OSError, match="it is down"):
        pool.storage.look_up(HASHES, 0)
    with pytest.raises(RuntimeError):
        pool.storage.look_up(HASHES, 0)  # the one request that tries the store
    assert pool.storage.is_ready
    assert pool.storage.look_up(HASHES, 0) == 0
    pool.storage.close()


def test_a_thread_outlives_a_panic(caplog: pytest.LogCaptureFixture) -> None:
    """A panic in obstore is no Exception."""
    done, thread = threading.Event(), IoThread("store-writes")

    def panics() -> None:
        raise BaseException("PanicException")

    thread.submit(panics)
    thread.submit(done.set)
    assert done.wait(10)
    thread.close(10.0)
    assert "a job of the thread store-writes failed" in caplog.text
