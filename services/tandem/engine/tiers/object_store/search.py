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

A model with states can resume only at multiples of some number of tokens (checkpoints.py). So only
the states at these depths are requested, and the blocks of windows only before a state that was
found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.engine.cache.layout.kv_groups import KvLayout, state_spacing
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

    search_groups = _search_states if layout.state_groups else _search_windows
    deepest = search_groups(layout, depth, known, look_up)
    for number, group in enumerate(layout.groups):
        if group.window is None:
            found[number] = found[number][:depth]
        elif deepest:
            found[number] = sorted(index for index, is_there in known[number].items() if is_there)
    return found


# Looks up the blocks of a KV group with these chain indices, and adds the results to `known`.
LookUp = Callable[[int, Sequence[int]], None]


def _search_states(
    layout: KvLayout, depth: int, known: Sequence[dict[int, bool]], look_up: LookUp
) -> int:
    """Returns the largest depth, at most `depth`, at which the store has the states and all blocks
    that the windows need. Returns 0 if there is none."""
    step = state_spacing(layout.block_size) // layout.block_size
    states = layout.state_groups
    depths = range(depth // step * step, 0, -step)
    for at in range(0, len(depths), AT_ONCE):
        some = depths[at : at + AT_ONCE]
        for number in states:
            look_up(number, [each - 1 for each in some])
        for each in some:
            if not all(known[number][each - 1] for number in states):
                continue
            needed = {
                number: range(group.first_seen(each * layout.block_size), each)
                for number, group in enumerate(layout.groups)
                if group.window is not None
            }
            for number, indexes in needed.items():
                look_up(number, indexes)
            if all(known[number][i] for number, indexes in needed.items() for i in indexes):
                return each
    return 0


def _search_windows(
    layout: KvLayout, depth: int, known: Sequence[dict[int, bool]], look_up: LookUp
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
