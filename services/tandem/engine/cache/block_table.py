"""Operations on the block tables of sequences and chains: store blocks, and give them back.

A table's first blocks are stored (hashed, shared, never written), the rest are its owner's own. Own
blocks that a read may still write (unsafe) go to quarantine, never straight to the next owner.
"""

from collections.abc import Callable, Collection, Sequence

from tandem.engine.cache.block_pool import BlockPool
from tandem.errors import InternalError


def store_blocks(
    pool: BlockPool,
    block_table: list[int],
    block_hashes: Sequence[bytes],
    *,
    chain_root: bytes,
    first: int,
    last: int,
    block_tokens: Callable[[int], Sequence[int]] | None = None,
) -> None:
    """Lets others find blocks first..last - 1 of the table, those before them being stored.

    A block that is there already takes the place of the table's own. `block_tokens` are the token
    ids of a block, by its index, if the pool's events are to have them.
    """
    for i in range(first, last):
        block_table[i] = pool.store(
            block_table[i],
            parent_id=block_table[i - 1] if i else None,
            parent_hash=block_hashes[i - 1] if i else chain_root,
            block_hash=block_hashes[i],
            token_ids=block_tokens(i) if block_tokens else (),
        )


def check_own(sequence_id: str, own: Collection[int], unsafe: Collection[int]) -> None:
    """Raises InternalError when an unsafe block is not among the blocks that the sequence owns."""
    if strangers := set(unsafe).difference(own):
        raise InternalError(
            f"blocks {sorted(strangers)} are not own blocks of sequence {sequence_id}"
        )


def check_trusted(
    sequence_id: str,
    block_table: Sequence[int],
    unsafe: Collection[int],
    *,
    num_stored_blocks: int,
    num_blocks: int,
) -> None:
    """Raises InternalError when the table's first `num_blocks` blocks cannot all be good."""
    if not num_stored_blocks <= num_blocks <= len(block_table):
        raise InternalError(
            f"{num_blocks} blocks of sequence {sequence_id} are said to be good; it has "
            f"{len(block_table)}, and {num_stored_blocks} of them were here"
        )
    check_own(sequence_id, block_table[num_blocks:], unsafe)


def give_back(pool: BlockPool, block_table: Sequence[int], unsafe: Collection[int]) -> None:
    """Drops the table's references; its `unsafe` blocks wait in quarantine until they are safe."""
    quarantined = set(unsafe)
    pool.quarantine(quarantined)
    pool.release([b for b in block_table if b not in quarantined])
