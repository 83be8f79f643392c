"""The blocks after which a request may go on, of a model with windows: what the prefix tree holds.

A block is resumable if the full group has it (and so its parents) and each group with a window has
it and the blocks before it that the next token sees. Each window counts how many blocks of the
chain it has in a row up to a block; a block that goes shortens the counts of those after it:

    window of 3 blocks   a b c d e f      b goes:   a . c d e f
    in a row             3 3 3 3 3 3                3   1 2 3 3      c and d are resumable no more

Before a chain's first block there is nothing to see, so it counts as many as a window has.

It follows the events of the pools, so it may forget a depth that a pool could serve again, but
never tells of one that is not there.
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
        self._told: dict[bytes, None] = {}

    def update(self, events: Sequence[Events]) -> Events:
        """Takes the events of each group's pool; returns what became resumable, and what not."""
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
        gained, lost = [], []
        for block_hash in changed:
            is_resumable = self._is_resumable(block_hash)
            if is_resumable and block_hash not in self._told and block_hash in known:
                self._told[block_hash] = None
                gained.append(known[block_hash])
            elif not is_resumable and block_hash in self._told:
                del self._told[block_hash]
                lost.append(block_hash)
        gained.sort(key=lambda each: each.index)
        return gained, lost

    def block_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Hashes that were told of, from `first` on and before `end`; empty `end`: to the last."""
        return [h for h in self._told if first <= h and (not end or h < end)]

    def _is_resumable(self, block_hash: bytes) -> bool:
        return all(block_hash in held for held in self._full) and all(
            window.is_whole(block_hash) for window in self._windows
        )


class ResumableChains:
    """The resumable blocks and all blocks before them in their chains, which the full group has.

    KV events name these, because a subscriber knows a block only with all of its parents. A block
    counts its uses: one if it is resumable itself, and one for each child that is in a chain.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, StoredBlock] = {}  # of the full group
        self._num_uses: Counter[bytes] = Counter()

    def update(self, full: Events, resumable: Events) -> BlockChanges:
        """Takes the events of the full group and of the resumable blocks; returns the blocks that
        came into a chain, and those that are in none any more."""
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
    """The blocks of one group's pool, each with how many are there in a row up to it."""

    def __init__(self, blocks_seen: int) -> None:
        self._blocks_seen = max(1, blocks_seen)
        self._in_row: dict[bytes, int] = {}
        self._roots: set[bytes] = set()  # blocks that are the first of their chain
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[bytes, list[bytes]] = {}

    def is_whole(self, block_hash: bytes) -> bool:
        return self._in_row.get(block_hash, 0) >= self._blocks_seen

    def update(self, stored: Iterable[StoredBlock], removed: Iterable[bytes]) -> list[bytes]:
        """Returns the blocks whose counts changed."""
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
        """Counts a block anew, and those after it whose count it changes."""
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
