"""Compares the tree with what a worker really holds, a range of buckets at a time.

Both sides change meanwhile: what a worker stored or evicted a moment ago is on its way to the tree.
So a range in which they differ is read again, and only what differs at each look counts: a
publisher that lives is done with anything within the pauses.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem.prefix_index.entries import NUM_BUCKETS
from tandem.prefix_index.inspect import TreeInspector

SAMPLE_ENTRIES = 16_384  # looked at by default, empty buckets counted in
_RANGE_ENTRIES = 32_768  # of one comparison

# What a worker holds from one bucket on and before another, as entries.
Held = Callable[[int, int], Awaitable[set[bytes]]]


@dataclass(frozen=True, slots=True)
class Differences:
    """`missing`: held and not in the tree; `stale`: in the tree and not held."""

    num_checked: int = 0  # entries that either side has
    missing: int = 0
    stale: int = 0
    in_tree: bool = True  # whether the worker has a log there at all

    @property
    def any(self) -> bool:
        return bool(self.missing or self.stale) or not self.in_tree

    def __add__(self, other: Differences) -> Differences:
        return Differences(
            self.num_checked + other.num_checked,
            self.missing + other.missing,
            self.stale + other.stale,
            self.in_tree and other.in_tree,
        )


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a difference may take to go."""

    looks: int = 3
    pause_s: float = 1.0


async def audit_sample(
    tree: TreeInspector,
    worker_id: str,
    held: Held,
    *,
    entries: int = SAMPLE_ENTRIES,
    patience: Patience = Patience(),
) -> Differences:
    """A range of buckets from a random one on. Errors of Redis and of `held` pass through."""
    first = random.randrange(NUM_BUCKETS)
    found, end = await _compare(tree, worker_id, held, (first, NUM_BUCKETS), entries, patience)
    left = entries - (end - first)
    if end == NUM_BUCKETS and first and left > 0:  # so that a small tree is seen whole
        more, _ = await _compare(tree, worker_id, held, (0, first), left, patience)
        found += more
    return found


async def audit_all(
    tree: TreeInspector, worker_id: str, held: Held, *, patience: Patience = Patience()
) -> Differences:
    found, at = Differences(), 0
    while at < NUM_BUCKETS:
        part, at = await _compare(
            tree, worker_id, held, (at, NUM_BUCKETS), _RANGE_ENTRIES, patience
        )
        found += part
    return found


async def _compare(
    tree: TreeInspector,
    worker_id: str,
    held: Held,
    buckets: tuple[int, int],
    entries: int,
    patience: Patience,
) -> tuple[Differences, int]:
    """The differences that stayed, and the bucket that the comparison ended before."""
    first, end = buckets
    missing: set[bytes] | None = None
    stale: set[bytes] = set()
    for look in range(patience.looks):
        if look:
            await asyncio.sleep(patience.pause_s)
        said = await tree.read(worker_id, first, end, entries)
        # Buckets that filled up since the first look are read all the same.
        entries = NUM_BUCKETS + (1 << 30)
        in_tree = said is not None
        claimed = said.entries if said is not None else set()
        end = said.end if said is not None else end
        really = await held(first, end)
        num_checked = len(claimed | really)
        missing = (really - claimed) & (missing if missing is not None else really)
        stale = (claimed - really) & (stale if look else claimed)
        if in_tree and not missing and not stale:
            break
    return Differences(num_checked, len(missing or ()), len(stale), in_tree), end
