"""Finds which blocks of a chain an object store has, by requests to the store. It runs in the
thread of the look-ups.

For a group without a window, the store has complete prefixes (storage.py). For a group with a
window it has runs of consecutive blocks, which requests need to resume after the run. A run is at
least as long as the window. If blocks at a distance of the window's length are requested, one of
them is in each run, so few requests find the deepest run. Then the neighbours of the found block
are requested. An example with a window of 3 blocks and the runs a and b:

    blocks in the store   . . a a a . . . . b b b b . . .
    first requests        ^     ^     ^     ^     ^     ^
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.tiers.storage import SharedStorage

AT_ONCE = 8  # number of blocks that are looked up together


Found = list[list[int]]  # for each group, the chain indices of blocks that are in the store


def search(
    storages: Sequence[SharedStorage],
    layout: KvLayout,
    block_hashes: Sequence[bytes],
    first: int,
) -> Found:
    """Returns the stored blocks of a chain up to the largest depth at which a request can resume.

    The first `first` blocks of the group without a window are known to be stored. Raises OSError.
    """
    depth = len(block_hashes)
    found = [list[int]() for _ in layout.groups]
    for number, group in enumerate(layout.groups):
        if group.window is None and first < depth:
            depth = storages[number].look_up(block_hashes, first)
            found[number] = list(range(depth)) if depth > first else []
    if not layout.has_windows or not depth:
        return found
    known = [dict[int, bool]() for _ in layout.groups]

    def look_up(number: int, indexes: Sequence[int]) -> None:
        new = [index for index in indexes if index not in known[number]]
        there = storages[number].look_up_each([block_hashes[index] for index in new])
        known[number].update(zip(new, there, strict=True))

    deepest = _search_windows(layout, depth, known, look_up)
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
    look_up: Callable[[int, Sequence[int]], None],
) -> int:
    """Returns the largest depth up to `depth` at which all windows are complete; 0 if there is
    none."""
    windows = [n for n, group in enumerate(layout.groups) if group.window is not None]
    longest = max(windows, key=lambda number: layout.groups[number].blocks_seen)
    stride = max(1, layout.groups[longest].blocks_seen)
    chain = [index.to_bytes(4, "big") for index in range(depth)]

    def has(number: int, index: bytes) -> bool:
        return known[number].get(int.from_bytes(index, "big"), False)

    strides = range(depth - 1, -1, -stride)
    for at in range(0, len(strides), AT_ONCE):
        look_up(longest, strides[at : at + AT_ONCE])
        for index in strides[at : at + AT_ONCE]:
            if not known[longest][index]:
                continue
            end = min(depth, index + stride)
            for number in windows:
                look_up(number, range(max(0, index - stride), end))
            # A smaller depth is not certain, because blocks before `index` may not have been
            # requested yet.
            if (deepest := layout.deepest_hit(chain, end, has)) >= max(1, index):
                return deepest
    return 0
