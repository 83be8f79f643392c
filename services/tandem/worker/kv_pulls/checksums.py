"""Checksums of blocks on both sides of a transfer: `--verify-blocks off|sample|all`.

When the producer announces blocks, it also sends the 64-bit XXH3 hashes of the blocks to verify.
Before the pulled blocks become valid, the consumer hashes them and compares the hashes. This
detects bytes that changed in transit and blocks that changed on the producer after their
announcement.
"""

import asyncio
from collections.abc import Sequence

import xxhash

from tandem.errors import BlockMismatch, LeaseLost
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.transfer.grpc.reservations import PoolView

_BLOCKS_A_TURN = 8  # blocks hashed before other tasks on the event loop get a turn


def checked(first_block: int, num_blocks: int, every: int) -> range:
    """Returns which blocks of a run have a checksum, as indices in the run.

    Every `every`-th block of the prompt has a checksum, and none if `every` is 0. For example, with
    `every` = 4 the blocks 0, 4, 8 and so on have one. A run of 8 blocks that starts at block 6 has
    checksums for the blocks 8 and 12, so the indices are 2 and 6.
    """
    return range(-first_block % every, num_blocks, every) if every else range(0)


async def checksums(
    pool: PoolView, sequence_id: str, first_block: int, block_ids: Sequence[int], every: int
) -> list[pb.BlockChecksum]:
    """Computes the checksums of a run of blocks before the run is announced.

    The sequence must hold the blocks.
    """
    indices = checked(first_block, len(block_ids), every)
    hashes = await _hashes(pool, sequence_id, [block_ids[index] for index in indices])
    return [
        pb.BlockChecksum(index=index, xxh3=value)
        for index, value in zip(indices, hashes, strict=True)
    ]


async def verify(
    pool: PoolView, sequence_id: str, run: pb.BlockRun, targets: Sequence[int], every: int
) -> None:
    """Compares pulled blocks with their checksums.

    Raises BlockMismatch if a checksum differs, and LeaseLost if checksums are missing.
    """
    expected = {each.index: each.xxh3 for each in run.checksums}
    indices = checked(run.first_block, len(targets), every)
    if list(expected) != list(indices):
        raise LeaseLost(
            f"the producer sent checksums of the blocks {list(expected)} instead of {list(indices)}"
        )
    hashes = await _hashes(pool, sequence_id, [targets[index] for index in indices])
    for index, value in zip(indices, hashes, strict=True):
        if value != expected[index]:
            raise BlockMismatch(
                f"block {run.first_block + index} of this worker has the checksum "
                f"{value:016x}, but block {run.block_ids[index]} of the peer has the checksum "
                f"{expected[index]:016x}"
            )


async def _hashes(pool: PoolView, sequence_id: str, block_ids: Sequence[int]) -> list[int]:
    hashes: list[int] = []
    for first in range(0, len(block_ids), _BLOCKS_A_TURN):
        if first:
            await asyncio.sleep(0)
        blocks = await pool.read(sequence_id, block_ids[first : first + _BLOCKS_A_TURN])
        hashes += [xxhash.xxh3_64_intdigest(block) for block in blocks]
    return hashes
