"""Chains of blocks that a peer reads or fills, known by their hashes alone: no tokens, no steps.

    hold  --> held: what is cached of a chain, for a consumer        --remove--> gone
    import --> imported: a chain's blocks, to be filled from outside --commit--> gone, blocks CACHED
                  `--remove--> gone, blocks FREE

Neither waits nor evicts: a hold references what is there, an import takes FREE blocks besides. So
no cycle of workers can wait for each other's blocks through them.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from tandem.engine.cache.block_pool import BlockPool, Reservation
from tandem.engine.cache.block_table import check_own, check_trusted, give_back, store_blocks
from tandem.errors import InternalError

_ROOT_UNKNOWN = b""  # hashes come without their chain's root, and nobody looks for it


@dataclass(frozen=True, slots=True)
class ImportedBlocks(Reservation):
    block_hashes: list[bytes]  # of the table's blocks


class PeerBlocks:
    """All chains of one engine, by the id of the sequence that a peer knows them under."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._peer_blocks: dict[str, Reservation] = {}

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._peer_blocks

    def __len__(self) -> int:
        return len(self._peer_blocks)

    @property
    def num_imports(self) -> int:
        return sum(isinstance(chain, ImportedBlocks) for chain in self._peer_blocks.values())

    @property
    def block_tables(self) -> list[list[int]]:
        return [chain.block_table for chain in self._peer_blocks.values()]

    def block_ids(self, sequence_id: str) -> list[int]:
        return list(self._peer_blocks[sequence_id].block_table)

    def pin_prefix(self, sequence_id: str, block_hashes: list[bytes]) -> Reservation:
        """References what is cached of the chain, until `remove`."""
        num_cached = len(self._pool.match(block_hashes))
        chain = self._pool.reserve(block_hashes[:num_cached], num_cached)
        assert chain is not None, "blocks that are there need no room"
        self._peer_blocks[sequence_id] = chain
        return chain

    def import_blocks(self, sequence_id: str, block_hashes: list[bytes]) -> Reservation:
        """References what is cached of the chain and as many FREE blocks after it as there are."""
        num_cached = len(self._pool.match(block_hashes))
        block_hashes = block_hashes[: num_cached + self._pool.num_free]
        reservation = self._pool.reserve(block_hashes, len(block_hashes))
        assert reservation is not None, "free blocks were counted"
        chain = ImportedBlocks(reservation.block_table, num_cached, block_hashes=block_hashes)
        self._peer_blocks[sequence_id] = chain
        return chain

    def commit(self, sequence_id: str, num_blocks: int, unsafe_blocks: Collection[int]) -> None:
        """The first `num_blocks` blocks of an imported chain are good: whoever looks finds them.

        The chain is gone then, also when InternalError is raised for what cannot be.
        """
        chain = self._peer_blocks.get(sequence_id)
        if not isinstance(chain, ImportedBlocks):
            raise InternalError(f"no chain {sequence_id} is imported on this engine")
        try:
            check_trusted(
                sequence_id,
                chain.block_table,
                unsafe_blocks,
                num_stored_blocks=chain.num_cached_blocks,
                num_blocks=num_blocks,
            )
            store_blocks(
                self._pool,
                chain.block_table,
                chain.block_hashes,
                chain_root=_ROOT_UNKNOWN,
                first=chain.num_cached_blocks,
                last=num_blocks,
            )
            self._peer_blocks[sequence_id] = replace(chain, num_cached_blocks=num_blocks)
        finally:
            self.remove(sequence_id, unsafe_blocks)

    def remove(self, sequence_id: str, unsafe_blocks: Collection[int]) -> None:
        chain = self._peer_blocks[sequence_id]
        check_own(sequence_id, chain.block_table[chain.num_cached_blocks :], unsafe_blocks)
        del self._peer_blocks[sequence_id]
        give_back(self._pool, chain.block_table, unsafe_blocks)
