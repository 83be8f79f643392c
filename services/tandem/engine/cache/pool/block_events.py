"""The blocks that a pool stored and removed since it was last asked."""

from tandem.engine.types import StoredBlock


class BlockEvents:
    """The net changes of a pool: a block that was stored and removed since is in neither part,
    because a consumer applies all stored blocks before all removed ones."""

    def __init__(self, *, with_tokens: bool = False) -> None:
        """`with_tokens`: stored blocks are told of with their token ids."""
        self._with_tokens = with_tokens
        self._stored: dict[bytes, StoredBlock] = {}  # by hash
        self._removed: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._stored or self._removed)

    def store(self, block: StoredBlock) -> None:
        """A block can be found from now on; its parents were stored before."""
        if not self._with_tokens and (block.token_ids or block.adapter is not None):
            block = StoredBlock(block.parent_hash, block.block_hash, index=block.index)
        if block.block_hash in self._removed:
            del self._removed[block.block_hash]
        else:
            self._stored[block.block_hash] = block

    def remove(self, block_hash: bytes) -> None:
        """A block cannot be found any more; its children were removed before."""
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None

    def take(self) -> tuple[list[StoredBlock], list[bytes]]:
        """Returns changes since last time: (stored, parents first; removed, children first)."""
        stored = list(self._stored.values())
        removed = list(self._removed)
        self._stored = {}
        self._removed = {}
        return stored, removed

    def forget_stored(self) -> None:
        """Lets the removal of a block that was stored before now be an event."""
        self._stored.clear()
