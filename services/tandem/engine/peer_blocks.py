"""Transfers cached blocks between workers without a sequence. The engine knows only the block
hashes of the transferred chain of blocks, not the tokens.

    worker      call             effect
    sender      hold_prefix      the chain is held: its cached blocks stay in the pool
                remove           the chain is dropped; its blocks may be evicted again
    receiver    import_blocks    the chain is imported: blocks are reserved for the pull
                commit           the pulled blocks are cached, and the chain is dropped
                remove           the chain is dropped, and the pulled blocks are freed

Neither `hold_prefix` nor `import_blocks` waits for a block or evicts one. Both reference cached
blocks, and `import_blocks` also takes FREE blocks. So these transfers never make two workers wait
for each other.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tandem.engine.cache.block_table import BlockTables, check_own, check_trusted
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.report import PendingReport
from tandem.errors import InternalError

# Used as the parent hash of a chain's first block. A peer does not send the real parent hash, and
# none is needed.
_ROOT_UNKNOWN = b""


@dataclass(slots=True)
class PeerChain:
    """The blocks of a held or imported chain. The first `num_cached_blocks` blocks have KV. In an
    imported chain, a pull fills the other blocks."""

    tables: BlockTables
    block_hashes: list[bytes]  # one hash for each block of the tables
    num_cached_blocks: int
    is_imported: bool


class PeerBlocks:
    """All held and imported chains of one engine. A chain is named by a sequence id."""

    def __init__(self, kv: KvCache, pending: PendingReport) -> None:
        """The blocks of each new chain are reported to `pending`."""
        self._kv = kv
        self._pending = pending
        self._chains: dict[str, PeerChain] = {}

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._chains

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def num_imports(self) -> int:
        return sum(chain.is_imported for chain in self._chains.values())

    @property
    def tables(self) -> list[BlockTables]:
        return [chain.tables for chain in self._chains.values()]

    def block_ids(self, sequence_id: str) -> list[int]:
        return self._kv.global_ids(self._chains[sequence_id].tables)

    def hold_prefix(
        self, sequence_id: str, block_hashes: list[bytes], first_wanted_block: int
    ) -> None:
        """References the longest cached prefix of the chain, so that these blocks are not evicted
        before `remove`.

        In a model with sliding windows, the whole chain must be cached; otherwise no block is
        referenced. The consumer resumes at the end of the chain, and needs the blocks in the
        windows there. The windows at the end of a shorter prefix have other blocks.
        """
        depth = self._kv.match(block_hashes)
        if self._kv.has_windows and depth < len(block_hashes):
            depth = 0
        chain = self._take(sequence_id, block_hashes[:depth], depth, is_imported=False)
        self._pending.held(sequence_id, chain.tables, depth, first_wanted_block)

    def import_blocks(self, sequence_id: str, block_hashes: list[bytes]) -> None:
        """References the longest cached prefix of the chain, and reserves FREE blocks for the rest
        of the chain. If there are too few FREE blocks, the end of the chain is left out; a model
        with sliding windows then reserves no block at all."""
        depth = self._kv.match(block_hashes)
        room = self._kv.room_for_import(block_hashes, depth)
        chain = self._take(sequence_id, block_hashes[:room], depth, is_imported=True)
        size = len(chain.block_hashes)
        self._pending.reserved(
            sequence_id, chain.tables, num_cached=depth, num_blocks=size, depth=size
        )

    def _take(
        self, sequence_id: str, block_hashes: list[bytes], depth: int, *, is_imported: bool
    ) -> PeerChain:
        num_tokens = len(block_hashes) * self._kv.layout.block_size
        tables = self._kv.reserve(
            block_hashes, depth, num_tokens=num_tokens, resume=num_tokens, is_chain=True
        )
        assert tables is not None, "its free blocks were counted"
        chain = self._chains[sequence_id] = PeerChain(tables, block_hashes, depth, is_imported)
        return chain

    def commit(self, sequence_id: str, num_blocks: int, unsafe_blocks: Collection[int]) -> None:
        """Caches the first `num_blocks` blocks of an imported chain, whose KV is complete and
        trusted. Then removes the chain.

        Raises InternalError, after removing the chain, if the arguments contradict the chain.
        """
        chain = self._chains.get(sequence_id)
        if chain is None or not chain.is_imported:
            raise InternalError(f"no import of KV blocks with the id {sequence_id} is in progress")
        num_cached = chain.num_cached_blocks
        num_held = len(chain.block_hashes)
        try:
            check_trusted(sequence_id, num_blocks, num_cached, num_held)
            if self._kv.has_windows and num_blocks < num_held:
                num_blocks = num_cached  # an incomplete chain has no use with sliding windows
            check_own(sequence_id, self._kv.global_ids(chain.tables, num_blocks), unsafe_blocks)
            self._kv.store(
                chain.tables,
                chain.block_hashes,
                chain_root=_ROOT_UNKNOWN,
                first=num_cached,
                last=num_blocks,
                resumable=[num_blocks],
            )
            chain.num_cached_blocks = num_blocks
        finally:
            self.remove(sequence_id, unsafe_blocks)
        self._pending.forget(sequence_id)

    def remove(self, sequence_id: str, unsafe_blocks: Collection[int]) -> None:
        chain = self._chains[sequence_id]
        own = self._kv.global_ids(chain.tables, chain.num_cached_blocks)
        check_own(sequence_id, own, unsafe_blocks)
        del self._chains[sequence_id]
        self._kv.release(chain.tables, unsafe_blocks)
