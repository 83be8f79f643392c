"""Chains of blocks that a peer reads or fills, known by their hashes alone: no tokens, no steps.

    hold  --> held: what is cached of a chain, for a reader        --remove--> gone
    adopt --> adopted: a chain's blocks, to be filled from outside --commit--> gone, blocks CACHED
                  `--remove--> gone, blocks FREE

Neither waits nor evicts: a hold references what is there, an adoption takes FREE blocks besides. So
no cycle of workers can wait for each other's blocks through them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tandem.engine.cache.block_pool import BlockPool
from tandem.engine.cache.block_table import check_own, check_trusted, give_back, store_blocks
from tandem.errors import InternalError

_ROOT_UNKNOWN = b""  # hashes come without their chain's root, and nobody looks for it


@dataclass(slots=True)
class Chain:
    block_table: list[int]
    num_cached_blocks: int  # of the table's first blocks: stored, shared, never written


@dataclass(slots=True)
class AdoptedChain(Chain):
    block_hashes: list[bytes]  # of the table's blocks


class Chains:
    """All chains of one engine, by the id of the sequence that a peer knows them under."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._chains: dict[str, Chain] = {}

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._chains

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def num_adopted(self) -> int:
        return sum(isinstance(chain, AdoptedChain) for chain in self._chains.values())

    @property
    def num_held(self) -> int:
        return len(self._chains) - self.num_adopted

    @property
    def block_tables(self) -> list[list[int]]:
        return [chain.block_table for chain in self._chains.values()]

    def block_ids(self, sequence_id: str) -> list[int]:
        return list(self._chains[sequence_id].block_table)

    def hold(self, sequence_id: str, block_hashes: list[bytes]) -> Chain:
        """References what is cached of the chain, until `remove`."""
        num_cached = len(self._pool.match(block_hashes))
        reservation = self._pool.reserve(block_hashes[:num_cached], num_cached)
        assert reservation is not None, "blocks that are there need no room"
        chain = Chain(reservation.block_table, num_cached)
        self._chains[sequence_id] = chain
        return chain

    def adopt(self, sequence_id: str, block_hashes: list[bytes]) -> Chain:
        """References what is cached of the chain and as many FREE blocks after it as there are."""
        num_cached = len(self._pool.match(block_hashes))
        block_hashes = block_hashes[: num_cached + self._pool.num_free]
        reservation = self._pool.reserve(block_hashes, len(block_hashes))
        assert reservation is not None, "free blocks were counted"
        chain = AdoptedChain(reservation.block_table, num_cached, block_hashes=block_hashes)
        self._chains[sequence_id] = chain
        return chain

    def commit(self, sequence_id: str, num_blocks: int, unsafe_blocks: Collection[int]) -> None:
        """The first `num_blocks` blocks of an adopted chain are good: whoever looks finds them.

        The chain is gone then, also when InternalError is raised for what cannot be.
        """
        chain = self._chains.get(sequence_id)
        if not isinstance(chain, AdoptedChain):
            raise InternalError(f"no chain {sequence_id} is adopted on this engine")
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
            chain.num_cached_blocks = num_blocks
        finally:
            self.remove(sequence_id, unsafe_blocks)

    def remove(self, sequence_id: str, unsafe_blocks: Collection[int]) -> None:
        chain = self._chains[sequence_id]
        check_own(sequence_id, chain.block_table[chain.num_cached_blocks :], unsafe_blocks)
        del self._chains[sequence_id]
        give_back(self._pool, chain.block_table, unsafe_blocks)
