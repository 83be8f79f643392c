"""The pool of a KV group with a sliding window. Its blocks have no parents, so any of them may go.

Evicted first are blocks that the window has passed, then the least recently used, and of one
sequence's the oldest position first: the last ones are those that a later request may go on from.

Tiers copy a block only if a request is expected to need it, because most of them are passed soon:

    stored --> UNWANTED --want_copies, or another sequence reuses it--> NONE --> written
"""

from collections.abc import Iterable, Sequence

from tandem.common.adapter import Adapter
from tandem.engine.cache.pool.block import Copy
from tandem.engine.cache.pool.block_pool import BlockPool

_PASSED = 1 << 62  # before anything that was used when its sequence ended


class WindowPool(BlockPool):
    def __init__(self, num_blocks: int, *, report_tokens: bool = False) -> None:
        super().__init__(num_blocks, report_tokens=report_tokens)
        self._parent_hashes: dict[int, bytes] = {}  # of hashed blocks; empty: a chain's first

    def release(self, block_table: Sequence[int]) -> None:
        """Drops one reference on each block of a table (given in the order of the chain)."""
        self._release_in_order(block_table, 0)

    def release_passed(self, block_ids: Sequence[int]) -> None:
        """Drops one reference on blocks that no later token of their sequence sees, in order."""
        self._release_in_order(block_ids, -_PASSED)

    def store(
        self,
        block_id: int,
        *,
        parent_id: int | None,
        parent_hash: bytes,
        block_hash: bytes,
        token_ids: Sequence[int] = (),
        index: int = 0,
        adapter: Adapter | None = None,
    ) -> int:
        """Lets a full block be found, as `BlockPool.store`; no copy of it is wanted yet."""
        stored = super().store(
            block_id,
            parent_id=parent_id,
            parent_hash=parent_hash,
            block_hash=block_hash,
            token_ids=token_ids,
            index=index,
            adapter=adapter,
        )
        if stored == block_id:
            self._parent_hashes[block_id] = parent_hash if index else b""
            self._set_copy(block_id, Copy.UNWANTED)
        return stored

    def want_copies(self, block_hashes: Iterable[bytes]) -> None:
        """Lets tiers copy these blocks, as far as they are here: a request may need them."""
        for block_hash in block_hashes:
            block_id = self.find(block_hash)
            if block_id is not None and self._blocks[block_id].copy is Copy.UNWANTED:
                self._set_copy(block_id, Copy.NONE)
                self._unwritten[block_id] = None

    def names_of(self, block_id: int) -> tuple[bytes, bytes]:
        """Returns the hashes of a hashed block and of its parent; empty if it has no parent."""
        block_hash, _ = super().names_of(block_id)
        return block_hash, self._parent_hashes[block_id]

    def can_reserve_any(self, block_hashes: Sequence[bytes], num_blocks: int) -> bool:
        """Returns whether there is room for what `reserve_any` would take."""
        return self._fits(self._find_any(block_hashes), num_blocks, None)

    def reserve_any(self, block_hashes: Sequence[bytes], num_blocks: int) -> list[int] | None:
        """References those of these blocks that are here, whichever they are, and allocates the
        rest of `num_blocks`. None when there is no room; then nothing changed."""
        here = self._find_any(block_hashes)
        if not self._fits(here, num_blocks, None):
            return None
        for block_id in here:
            self._reference(block_id)
        fresh = self.allocate(num_blocks - len(here))
        assert fresh is not None
        rest = iter(fresh)
        table = [self._by_hash.get(block_hash) for block_hash in block_hashes]
        table += [None] * (num_blocks - len(table))
        return [next(rest) if block_id is None else block_id for block_id in table]

    def _find_any(self, block_hashes: Sequence[bytes]) -> list[int]:
        found = (self.find(block_hash) for block_hash in block_hashes)
        return [block_id for block_id in found if block_id is not None]

    def _release_in_order(self, block_ids: Sequence[int], offset: int) -> None:
        for block_id in block_ids:
            self._clock += 1
            self._drop_reference(block_id, offset + self._clock)
