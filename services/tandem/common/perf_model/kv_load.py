"""The reported KV pools and tiers of workers, and the blocks that a sequence would lack. Pure.

A model without windows has one pool, and a load's totals are that pool's. With windows each KV
group has its own pool, and the totals are sums. A sum hides a full pool behind a pool with many
free blocks, so the load then also contains the groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import msgspec


class GroupLoad(msgspec.Struct, frozen=True):
    """The pool of one KV group."""

    blocks_total: int
    blocks_used: int = 0  # referenced by a live sequence
    # most blocks that one sequence has in it; 0: as many as the sequence is long
    sequence_blocks_max: int = 0


class TierUse(msgspec.Struct, frozen=True):
    """The blocks of a tier below the pools.

    An object store is unbounded: `blocks_total` is the number of its blocks that a worker can
    remember, and `blocks_held` the number that it remembers.
    """

    name: str  # host, disk or store
    blocks_total: int
    blocks_held: int
    blocks_damaged: int = 0  # recently failed to be read


class KvLoad(Protocol):
    """Any object that reports a worker's pools."""

    @property
    def blocks_total(self) -> int: ...

    @property
    def blocks_used(self) -> int: ...

    @property
    def groups(self) -> tuple[GroupLoad, ...]: ...


def kv_use(load: KvLoad) -> float:
    """Returns the share of the pool that live sequences reference, 0 to 1.

    With several pools it is that of the layers that see furthest. The other pools have room for all
    running slots or are as large (engine/cache/kv_groups.py), so this pool is full first.
    """
    pool = max(load.groups, key=lambda group: group.sequence_blocks_max or math.inf, default=load)
    return pool.blocks_used / pool.blocks_total if pool.blocks_total else 0.0


def held_shares(workers: Iterable[Iterable[TierUse]]) -> dict[str, float]:
    """Returns for each tier the used share of its capacity over all workers, 0 to 1.

    A tier that no worker has is left out.
    """
    held: dict[str, int] = {}
    total: dict[str, int] = {}
    for tiers in workers:
        for tier in tiers:
            held[tier.name] = held.get(tier.name, 0) + tier.blocks_held
            total[tier.name] = total.get(tier.name, 0) + tier.blocks_total
    return {name: held[name] / total[name] for name in held if total[name]}


def lacking_blocks(load: KvLoad, num_blocks: float, num_sequences: int = 1) -> float:
    """Returns the number of missing free blocks for new sequences in the fullest pool.

    The `num_sequences` sequences have `num_blocks` blocks together. A result of 0 or less means
    that none is missing or no pool is known.
    """
    if not load.groups:
        free = load.blocks_total - load.blocks_used
        return num_blocks - free if load.blocks_total else 0.0
    return max(
        min(num_blocks, num_sequences * group.sequence_blocks_max or num_blocks)
        - (group.blocks_total - group.blocks_used)
        for group in load.groups
    )


def longest_sequence(load: KvLoad) -> int:
    """Returns the blocks of the longest sequence that fits empty pools; 0 if no bound is known."""
    if not load.groups:
        return load.blocks_total
    return min(
        (
            group.blocks_total
            for group in load.groups
            if not group.blocks_total >= group.sequence_blocks_max > 0
        ),
        default=0,
    )
