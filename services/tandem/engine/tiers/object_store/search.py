"""Finds out how much of a chain a store has, by requests to it; runs in a thread of its own.

A group without a window is asked for by whole prefixes (storage.py). A window's blocks are
in the store in runs: those that a request needs to go on somewhere. A run that is as long as the
window has a block at each stride of the window's length, so few requests find the deepest one:

    blocks of a window of 3    . . a a a . . . . b b b b . . .
    asked for                          ^     ^     ^     ^       then its neighbours
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.tiers.storage import SharedStorage

AT_ONCE = 8  # strides


Found = list[list[int]]  # of each group, indexes of blocks in the chain that are in the store


def search(
    storages: Sequence[SharedStorage],
    layout: KvLayout,
    block_hashes: Sequence[bytes],
    first: int,
) -> Found:
    """Returns what is there of a chain, as deep as a request can go on. Of the group without a
    window, `first` blocks are known to be. Raises OSError."""
    depth = len(block_hashes)
    found = [list[int]() for _ in layout.groups]
    for number, group in enumerate(layout.groups):
        if group.window is None and first < depth:
            depth = storages[number].look_up(block_hashes, first)
            found[number] = list(range(depth)) if depth > first else []
    if not layout.has_windows or not depth:
        return found
    known = [dict[int, bool]() for _ in layout.groups]

    def ask(number: int, indexes: Sequence[int]) -> None:
        new = [index for index in indexes if index not in known[number]]
        there = storages[number].look_up_each([block_hashes[index] for index in new])
        known[number].update(zip(new, there, strict=True))

    deepest = _search_windows(layout, depth, known, ask)
    for number, group in enumerate(layout.groups):
        if group.window is None:
            found[number] = found[number][:depth]
        elif deepest:
            found[number] = sorted(index for index, is_there in known[number].items() if is_there)
    return found


def _search_windows(
    layout: KvLayout,
    depth: int,
    known: Sequence[dict[int, bool]],
    ask: Callable[[int, Sequence[int]], None],
) -> int:
    """Returns the largest depth, at most `depth`, at which all windows are there; 0: none."""
    windows = [n for n, group in enumerate(layout.groups) if group.window is not None]
    longest = max(windows, key=lambda number: layout.groups[number].blocks_seen)
    stride = max(1, layout.groups[longest].blocks_seen)
    chain = [index.to_bytes(4, "big") for index in range(depth)]

    def has(number: int, index: bytes) -> bool:
        return known[number].get(int.from_bytes(index, "big"), False)

    strides = range(depth - 1, -1, -stride)
    for at in range(0, len(strides), AT_ONCE):
        ask(longest, strides[at : at + AT_ONCE])
        for index in strides[at : at + AT_ONCE]:
            if not known[longest][index]:
                continue
            end = min(depth, index + stride)
            for number in windows:
                ask(number, range(max(0, index - stride), end))
            # Of runs before `index` perhaps not all blocks were asked for yet.
            if (deepest := layout.deepest_hit(chain, end, has)) >= max(1, index):
                return deepest
    return 0
