"""Chains of blocks that are held for a peer or pulled from one. Only the block hashes of these
chains are known; no sequence of this engine has their tokens, and no step computes them.

    hold_prefix    --> held: cached blocks of a chain, for a consumer     --remove--> removed
    import_blocks --> imported: blocks of a chain, to be filled by pulls --commit--> removed
                         `--remove--> removed

`commit` caches the pulled blocks of an imported chain. Without it, `remove` frees these blocks.

Neither `hold_prefix` nor `import_blocks` waits or evicts: both reference cached blocks, and
`import_blocks` also takes FREE blocks. So workers cannot wait for each other's blocks in a cycle
through these chains.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tandem.engine.cache.block_table import BlockTables, check_own, check_trusted
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.report import PendingReport
from tandem.errors import InternalError

# The parent hash of a chain's first block. A peer does not send it, and no code looks it up.
_ROOT_UNKNOWN = b""


@dataclass(slots=True)
class PeerChain:
    """The blocks of a held or imported chain. In an imported chain, a pull fills the blocks from
    `num_cached_blocks` on."""

    tables: BlockTables
    block_hashes: list[bytes]  # one hash for each block of the tables
    num_cached_blocks: int
    is_imported: bool


class PeerBlocks:
    """All chains of one engine, by the sequence id that the peer uses."""

    def __init__(self, kv: KvCache, pending: PendingReport) -> None:
        """`pending` receives the blocks of each new chain."""
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
        """References the cached blocks of the chain until `remove`.

        With windows it references either the whole chain or no block. A consumer resumes at one
        depth, and the blocks that windows need at a smaller depth are of no use to it.
        """
        depth = self._kv.match(block_hashes)
        if self._kv.has_windows and depth < len(block_hashes):
            depth = 0
        chain = self._take(sequence_id, block_hashes[:depth], depth, is_imported=False)
        self._pending.held(sequence_id, chain.tables, depth, first_wanted_block)

    def import_blocks(self, sequence_id: str, block_hashes: list[bytes]) -> None:
        """References the cached blocks of the chain, and takes FREE blocks for its other blocks as
        long as there are any.

        With windows it takes FREE blocks for the whole chain, or none.
        """
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
        tables = self._kv.reserve(block_hashes, depth, num_tokens=num_tokens, resume=num_tokens)
        assert tables is not None, "its free blocks were counted"
        chain = self._chains[sequence_id] = PeerChain(tables, block_hashes, depth, is_imported)
        return chain

    def commit(self, sequence_id: str, num_blocks: int, unsafe_blocks: Collection[int]) -> None:
        """Caches the first `num_blocks` blocks of an imported chain, which are filled and trusted.

        Raises InternalError if the blocks cannot be trusted. The chain is removed in any case.
        """
        chain = self._chains.get(sequence_id)
        if chain is None or not chain.is_imported:
            raise InternalError(f"no chain {sequence_id} is imported on this engine")
        num_cached = chain.num_cached_blocks
        num_held = len(chain.block_hashes)
        try:
            check_trusted(sequence_id, num_blocks, num_cached, num_held)
            if self._kv.has_windows and num_blocks < num_held:
                num_blocks = num_cached  # with windows, only the complete chain is of use
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
