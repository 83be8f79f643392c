"""Finds the resumable blocks of a model with sliding windows. A request can resume after such a
block, because all blocks that its next token needs are in the pools. Workers report these blocks to
the prefix tree.

A block is resumable if two conditions hold:

- The group with full attention has the block, and therefore all blocks before it.
- Each group with a window has the block and all earlier blocks that the next token attends to.

For the second condition, each block of a window's pool has a count: how many consecutive blocks
that end with this block are in the pool. A count is at most the length of the window in blocks, and
a block is resumable only if its count is this maximum. Removing a block lowers the counts of the
blocks after it. In this example with a window of 3 blocks, c and d are not resumable once b is
removed:

              all present     b is removed
    blocks    a b c d e f     a . c d e f
    counts    3 3 3 3 3 3     3   1 2 3 3

The first block of a chain needs no block before it, so its count is the maximum.

The counts follow the events of the pools. Every block that is reported as resumable is resumable.
But if a block becomes resumable only because a block before it was stored, it is not reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.types import BlockChanges, StoredBlock

Events = tuple[list[StoredBlock], list[bytes]]


class ResumableDepths:
    def __init__(self, layout: KvLayout) -> None:
        self._full = [set[bytes]() for group in layout.groups if group.window is None]
        self._windows = [
            _Window(group.blocks_seen) for group in layout.groups if group.window is not None
        ]
        self._is_window = [group.window is not None for group in layout.groups]
        self._published: dict[bytes, None] = {}

    def update(self, events: Sequence[Events]) -> Events:
        """Applies the events of each group's pool. Returns (blocks that became resumable, hashes of
        blocks that are no longer resumable)."""
        known: dict[bytes, StoredBlock] = {}
        changed: dict[bytes, None] = {}
        full = iter(self._full)
        windows = iter(self._windows)
        for is_window, (stored, removed) in zip(self._is_window, events, strict=True):
            known.update((each.block_hash, each) for each in stored)
            if is_window:
                changed |= dict.fromkeys(next(windows).update(stored, removed))
            else:
                held = next(full)
                held.update(each.block_hash for each in stored)
                held.difference_update(removed)
                changed |= dict.fromkeys([each.block_hash for each in stored] + removed)
        gained = []
        lost = []
        for block_hash in changed:
            is_resumable = self._is_resumable(block_hash)
            if is_resumable and block_hash not in self._published and block_hash in known:
                self._published[block_hash] = None
                gained.append(known[block_hash])
            elif not is_resumable and block_hash in self._published:
                del self._published[block_hash]
                lost.append(block_hash)
        gained.sort(key=lambda each: each.index)
        return gained, lost

    def block_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Returns the hashes h of resumable blocks with `first` <= h < `end`; an empty `end` means
        no upper bound."""
        return [h for h in self._published if first <= h and (not end or h < end)]

    def _is_resumable(self, block_hash: bytes) -> bool:
        return all(block_hash in held for held in self._full) and all(
            window.is_complete(block_hash) for window in self._windows
        )


class ResumableChains:
    """The resumable blocks and all blocks before them in their chains. The group with full
    attention has all of these blocks.

    KV events list these blocks, because a subscriber needs the parents of each block too. A block
    leaves this set when its use count is 0. The use count is the number of the block's children in
    this set, plus 1 if the block itself is resumable.
    """

    def __init__(self) -> None:
        # Blocks of the full-attention group, by hash.
        self._blocks: dict[bytes, StoredBlock] = {}
        self._num_uses: Counter[bytes] = Counter()

    def update(self, full: Events, resumable: Events) -> BlockChanges:
        """Applies the events of the full-attention group's pool, and the changes that
        `ResumableDepths.update` returned. Returns the blocks that joined this set and those that
        left it."""
        self._blocks.update((each.block_hash, each) for each in full[0])
        stored = [block for each in resumable[0] for block in self._use(each.block_hash)]
        removed = [found for block_hash in resumable[1] for found in self._release(block_hash)]
        for block_hash in full[1]:
            del self._blocks[block_hash]
        return BlockChanges(stored, removed)

    def _use(self, block_hash: bytes) -> list[StoredBlock]:
        new: list[StoredBlock] = []
        while (block := self._blocks.get(block_hash)) is not None:
            self._num_uses[block_hash] += 1
            if self._num_uses[block_hash] > 1:
                break
            new.append(block)
            block_hash = block.parent_hash
        return new[::-1]

    def _release(self, block_hash: bytes) -> list[bytes]:
        gone: list[bytes] = []
        while (block := self._blocks.get(block_hash)) is not None:
            self._num_uses[block_hash] -= 1
            if self._num_uses[block_hash]:
                break
            del self._num_uses[block_hash]
            gone.append(block_hash)
            block_hash = block.parent_hash
        return gone


class _Window:
    """The blocks in the pool of one group with a window, and their counts, which are defined at the
    top of this file."""

    def __init__(self, blocks_seen: int) -> None:
        self._blocks_seen = max(1, blocks_seen)
        self._in_row: dict[bytes, int] = {}
        self._roots: set[bytes] = set()  # hashes of the first blocks of chains
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[bytes, list[bytes]] = {}

    def is_complete(self, block_hash: bytes) -> bool:
        return self._in_row.get(block_hash, 0) >= self._blocks_seen

    def update(self, stored: Iterable[StoredBlock], removed: Iterable[bytes]) -> list[bytes]:
        """Applies a pool's events. Returns the hashes of the blocks whose counts changed."""
        changed = []
        for block in stored:
            if block.index == 0:
                self._roots.add(block.block_hash)
            self._parents[block.block_hash] = block.parent_hash
            self._children.setdefault(block.parent_hash, []).append(block.block_hash)
            self._in_row[block.block_hash] = 0
            changed += self._count_from(block.block_hash)
        for block_hash in removed:
            del self._in_row[block_hash]
            self._roots.discard(block_hash)
            parent_hash = self._parents.pop(block_hash)
            self._children[parent_hash].remove(block_hash)
            if not self._children[parent_hash]:
                del self._children[parent_hash]
            changed.append(block_hash)
            for child in self._children.get(block_hash, ()):
                changed += self._count_from(child)
        return changed

    def _count_from(self, block_hash: bytes) -> list[bytes]:
        """Recomputes the count of a block and of the blocks after it. Returns the hashes of the
        blocks whose counts changed."""
        changed = []
        waiting = [block_hash]
        while waiting:
            block_hash = waiting.pop()
            before = self._in_row.get(self._parents[block_hash], 0)
            is_root = block_hash in self._roots
            in_row = self._blocks_seen if is_root else min(self._blocks_seen, before + 1)
            if in_row != self._in_row[block_hash]:
                self._in_row[block_hash] = in_row
                changed.append(block_hash)
                waiting += self._children.get(block_hash, ())
        return changed
