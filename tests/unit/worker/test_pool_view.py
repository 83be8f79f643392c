"""The blocks that the I/O process may write, and until when."""

from __future__ import annotations

import mmap
import os
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.engine.cache.layout.pool_memory import create_shared, map_shared, size_shared
from tandem.errors import InternalError, LeaseLost
from tandem.transfer.grpc.reservations import Reservations
from tandem.worker.engine_process import messages
from tandem.worker.engine_process.link import PoolThroughEngine
from tandem.worker.engine_process.pool_view import MappedPool

SIZE = 100


def make_pool(num_blocks: int = 8) -> tuple[MappedPool, mmap.mmap]:
    memory = mmap.mmap(-1, num_blocks * SIZE)
    return MappedPool(memory, BlockSpans.equal(SIZE, len(memory) // SIZE)), memory


def block(value: int) -> bytes:
    return bytes([value]) * SIZE


async def test_blocks_land_where_the_reservation_says_and_nowhere_else() -> None:
    pool, memory = make_pool()
    into = Reservations().open("s", [6, 1, 4])
    pool.write(into, 1, memoryview(block(7) + block(8)))
    assert [memory[n * SIZE] for n in range(8)] == [0, 7, 0, 0, 8, 0, 0, 0]
    assert [bytes(each) for each in await pool.read("s", [4, 1])] == [block(8), block(7)]


def test_nothing_is_written_once_the_engine_was_told_of_the_end() -> None:
    pool, memory = make_pool()
    reservations = Reservations()
    first = reservations.open("s", [0])
    other = reservations.open("t", [1])
    reservations.end("s")
    with pytest.raises(LeaseLost):
        pool.write(first, 0, memoryview(block(1)))
    pool.write(other, 0, memoryview(block(2)))
    assert (memory[0], memory[SIZE]) == (0, 2)
    again = reservations.open("s", [0])  # the sequence was restarted, and reserved anew
    pool.write(again, 0, memoryview(block(3)))
    with pytest.raises(LeaseLost):
        pool.write(first, 0, memoryview(block(1)))
    assert memory[0] == 3


def test_a_closed_pull_does_not_close_another_one_of_its_sequence() -> None:
    pool, memory = make_pool()
    reservations = Reservations()
    first = reservations.open("s", [0])
    second = reservations.open("s", [1])
    reservations.close(first)
    with pytest.raises(LeaseLost):
        pool.write(first, 0, memoryview(block(1)))
    pool.write(second, 0, memoryview(block(2)))
    reservations.end("s")
    with pytest.raises(LeaseLost):
        pool.write(second, 0, memoryview(block(1)))
    reservations.close(second)
    assert memory[SIZE] == 2


@pytest.mark.parametrize(("first", "num_bytes"), [(0, SIZE - 1), (0, 3 * SIZE), (2, SIZE)])
def test_bytes_that_are_not_the_blocks_are_refused(first: int, num_bytes: int) -> None:
    pool, memory = make_pool()
    into = Reservations().open("s", [0, 1])
    with pytest.raises(LeaseLost):
        pool.write(into, first, memoryview(bytes([1]) * num_bytes))
    assert memory[:] == bytes(8 * SIZE)


async def test_a_block_outside_the_pool_is_refused() -> None:
    pool, _ = make_pool(2)
    with pytest.raises(InternalError):
        await pool.read("s", [2])


def test_both_who_map_a_shared_pool_see_the_same_bytes() -> None:
    fd = create_shared()
    assert fd is not None
    theirs = os.dup(fd)
    one = size_shared(fd, 3 * SIZE)
    other = map_shared(theirs, 3 * SIZE)
    assert other[:] == bytes(3 * SIZE)
    one[SIZE : 2 * SIZE] = block(5)
    assert other[SIZE : 2 * SIZE] == block(5)


async def test_probes_of_a_pool_on_a_gpu_go_through_the_engine_process() -> None:
    """Like pulls, and unlike probes of a pool that this process has mapped."""
    asked: list[int] = []
    sent: list[tuple[object, bytes]] = []

    async def load_probe(num_bytes: int) -> memoryview:
        asked.append(num_bytes)
        return memoryview(bytes(num_bytes))

    link: Any = SimpleNamespace(
        load_probe=load_probe, send=lambda command, data: sent.append((command, bytes(data)))
    )
    pool = PoolThroughEngine(link, BlockSpans.equal(SIZE, 8))
    assert bytes(await pool.read_probe(3)) == bytes(3)
    pool.write_probe(memoryview(b"abc"))
    assert asked == [3]
    assert sent == [(messages.StoreProbe(), b"abc")]
