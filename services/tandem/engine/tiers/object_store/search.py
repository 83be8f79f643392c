"""Finds which blocks of a chain are in an object store, with few requests. Runs in the thread for
look-ups.

For a group without a window, the store has complete prefixes (storage.py). For a group with a
window, it has runs of consecutive blocks, each at least as long as the window. A request can resume
after a run. To find the last run, every n-th block is requested, from the end of the chain to its
start, where n is the length of the window in blocks. Each run has at least one of these blocks. An
example with 16 blocks, a window of 3 blocks and two runs:

    blocks in the store   . . a a a . . . . b b b b . . .
    requested first       ^     ^     ^     ^     ^     ^

Block 15 is not found, and block 12 is. Then its neighbours, blocks 9 to 14, are requested. So a
request can resume after block 12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.tiers.storage import SharedStorage

AT_ONCE = 8  # number of blocks that are requested at the same time


# For each KV group: the chain indices of the blocks that were found in the store.
Found = list[list[int]]


def search(
    storages: Sequence[SharedStorage],
    layout: KvLayout,
    block_hashes: Sequence[bytes],
    first: int,
) -> Found:
    """Returns the chain indices of the blocks found in the store, for each KV group. In the group
    without a window, these are the leading blocks. In a group with a window, they are blocks near
    the largest depth at which a request can resume.

    The first `first` blocks of the group without a window are not requested. They are part of the
    result only if later blocks are found too. Raises OSError.
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
    """Returns the largest depth, at most `depth`, at which the store has all blocks that the
    windows need. Returns 0 if there is none."""
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
            # Depths below `index` are not accepted here, because they may need blocks that have not
            # been requested.
            if (deepest := layout.deepest_hit(chain, end, has)) >= max(1, index):
                return deepest
    return 0
