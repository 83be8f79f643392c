"""Collects the blocks that a pool stores and removes, until they are reported."""

from tandem.engine.types import StoredBlock


class BlockEvents:
    """The net changes of a pool since the last `take`.

    A reader applies all stored blocks before all removed ones. So a block that was stored and then
    removed, or the reverse, is left out of both lists.
    """

    def __init__(self, *, with_tokens: bool = False) -> None:
        """With `with_tokens`, stored blocks are reported with their token ids."""
        self._with_tokens = with_tokens
        self._stored: dict[bytes, StoredBlock] = {}  # stored blocks by hash, parents first
        self._removed: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._stored or self._removed)

    def store(self, block: StoredBlock) -> None:
        """Records that a block can be found now. The block's parent must be recorded first."""
        if not self._with_tokens and (block.token_ids or block.adapter is not None):
            block = StoredBlock(block.parent_hash, block.block_hash, index=block.index)
        if block.block_hash in self._removed:
            del self._removed[block.block_hash]
        else:
            self._stored[block.block_hash] = block

    def remove(self, block_hash: bytes) -> None:
        """Records that a block cannot be found any more. The block's children must be removed
        first."""
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None

    def take(self) -> tuple[list[StoredBlock], list[bytes]]:
        """Returns the changes since the last call: (stored blocks, hashes of removed blocks).
        Stored blocks are listed parents first, removed ones children first."""
        stored = list(self._stored.values())
        removed = list(self._removed)
        self._stored = {}
        self._removed = {}
        return stored, removed

    def forget_stored(self) -> None:
        """Leaves the blocks stored so far out of the next `take`. Their removal is still reported
        later."""
        self._stored.clear()
