"""Checksums of a run, made at its producer and compared at its consumer."""

from __future__ import annotations

import mmap

import pytest
import xxhash

from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.errors import BlockMismatch, LeaseLost
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.engine_process.pool_view import MappedPool
from tandem.worker.kv_pulls.checksums import checked, checksums, verify

SIZE = 64


def make_pool() -> tuple[MappedPool, mmap.mmap]:
    memory = mmap.mmap(-1, 100 * SIZE)
    memory[:] = b"".join(bytes([n]) * SIZE for n in range(100))
    return MappedPool(memory, BlockSpans.equal(SIZE, len(memory) // SIZE)), memory


async def announced(every: int, num_blocks: int = 20, first_block: int = 5) -> pb.BlockRun:
    pool, _ = make_pool()
    block_ids = list(range(30, 30 + num_blocks))
    run = pb.BlockRun(first_block=first_block, block_ids=block_ids)
    run.checksums.extend(await checksums(pool, "lease", first_block, block_ids, every))
    return run


def test_each_nth_block_of_the_prompt_however_it_is_cut_into_runs() -> None:
    assert list(checked(0, 40, 16)) == [0, 16, 32]
    assert list(checked(5, 40, 16)) == [11, 27]
    assert list(checked(16, 3, 16)) == [0]
    assert list(checked(17, 3, 16)) == []
    assert list(checked(3, 3, 1)) == [0, 1, 2]
    assert list(checked(0, 40, 0)) == []


@pytest.mark.parametrize("every", [1, 16])
async def test_the_same_bytes_pass_and_others_do_not(every: int) -> None:
    run = await announced(every)
    pool, memory = make_pool()
    targets = list(range(30, 50))
    await verify(pool, "s", run, targets, every)
    checked_block = 30 + checked(5, 20, every)[-1]
    memory[checked_block * SIZE + 63] ^= 1
    with pytest.raises(BlockMismatch, match=f"but block {checked_block} of the peer has"):
        await verify(pool, "s", run, targets, every)


async def test_the_checksum_is_xxh3() -> None:
    run = await announced(1, num_blocks=1)
    assert run.checksums[0].xxh3 == xxhash.xxh3_64_intdigest(bytes([30]) * SIZE)


async def test_a_producer_that_names_no_checksums_is_no_proof() -> None:
    run = await announced(16)
    pool, _ = make_pool()
    with pytest.raises(LeaseLost):
        await verify(pool, "s", run, list(range(30, 50)), 1)
