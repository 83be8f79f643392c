"""A worker's load, by which routers place requests. The engine, the worker, Redis and the routers
use one type. Does no I/O.

1. The engine counts its sequences and blocks.
2. The worker's I/O process sets `queue_max`, `num_leases` and `step`.
3. The load goes to a record in Redis (net/store/registry.py) and in messages to routers
   (net/rpc/convert.py).
4. A router adds the work that it has sent since the report (router/workers/known_worker.py).

A model without sliding-window attention has one KV pool, and `blocks_*` are the counts of this
pool. Otherwise each group of layers has its own pool, and `blocks_*` are sums over the pools. A sum
hides a full pool behind a pool with many free blocks, so the load then also contains the groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from tandem.common.perf_model.predict import queue_seconds
from tandem.common.perf_model.rates import WorkerRates


class GroupLoad(msgspec.Struct, frozen=True):
    """The block counts of the KV pool of one group of layers."""

    blocks_total: int
    blocks_used: int = 0  # number of blocks that sequences reference
    # Largest number of blocks of one sequence in this pool, for layers with sliding-window
    # attention. 0: no limit.
    sequence_blocks_max: int = 0


class WorkerLoad(msgspec.Struct, frozen=True, rename={"num_running_slots": "num_seats"}):
    """A worker's load after a step of the engine. The order of the fields is part of the format of
    the worker's record."""

    num_running: int = 0  # number of running sequences, without those that `num_leases` counts
    num_waiting: int = 0  # number of sequences in the worker's queue
    queue_max: int = 0  # largest number of sequences that the worker's queue may hold
    queued_tokens: int = 0  # number of tokens that wait to be prefilled
    # Predicted seconds until the queued tokens are computed. None: the worker has not measured its
    # speed, or has an older version without this field.
    queued_s: float | None = None
    blocks_total: int = 0
    blocks_used: int = 0  # number of blocks that sequences reference
    blocks_cached: int = 0  # number of blocks with cached KV that no sequence references
    blocks_quarantined: int = 0  # number of blocks to which an unfinished pull may still write
    # Number of open leases. For a lease, this worker computes or holds blocks for another worker.
    # The engine fills in only the leases that it has begun. The worker's I/O process then
    # overwrites the value with the number of all open leases.
    num_leases: int = 0
    num_pulls: int = 0  # number of sequences that wait for KV from a peer or a tier
    step: int = 0
    # Number of tokens for which the sequences' blocks have room but no KV. A sequence of 20 tokens
    # with two blocks of 16 tokens adds 12.
    tokens_wasted: int = 0
    # Largest number of sequences that may run or pull at the same time. 0: not reported.
    num_running_slots: int = 0
    # Largest number of prefill tokens in a step that also decodes. 0: not reported.
    chunk_tokens: int = 0
    # For models with sliding-window attention: the counts of the KV pool of each group of layers.
    # Empty for other models.
    groups: tuple[GroupLoad, ...] = ()
    # Number of the `num_running` sequences whose prompt this worker still computes, for itself.
    num_prefilling: int = 0
    # Number of lines of batches among `num_running`. They give way to other sequences.
    num_lines: int = 0

    def queue_s(self, rates: WorkerRates) -> float:
        """Returns the seconds until the queued tokens are computed. If the worker does not report
        this time, the result is estimated with `rates`."""
        return queue_seconds(rates, self.queued_tokens) if self.queued_s is None else self.queued_s

    @property
    def num_requests(self) -> int:
        """Total number of sequences and leases of the worker."""
        return self.num_running + self.num_waiting + self.num_pulls + self.num_leases

    @property
    def num_others(self) -> int:
        """Number of running sequences that are no lines of batches."""
        return max(0, self.num_running - self.num_lines)

    @property
    def num_decoding(self) -> int:
        """Number of sequences that generate tokens: running ones whose prompt is computed."""
        return self.num_running - self.num_prefilling

    @property
    def num_in_prefill(self) -> int:
        """Number of sequences of a decode worker whose prompt is being computed, here or by a
        prefill worker, or whose KV is on its way."""
        return self.num_prefilling + self.num_pulls

    @property
    def num_slots_taken(self) -> int:
        """Number of running slots that sequences occupy, without lines of batches."""
        return self.num_others + self.num_pulls

    @property
    def kv_use(self) -> float:
        """The fraction of the KV pool's blocks that sequences reference, 0 to 1.

        If there are several pools, this is the fraction of the pool that is full first: the pool of
        the layers without a window or, if all layers have one, with the longest window. Each other
        pool is as large, or has room for the windows of all running slots
        (engine/cache/layout/kv_groups.py).
        """
        pool: WorkerLoad | GroupLoad = self
        if self.groups:
            pool = max(self.groups, key=lambda group: group.sequence_blocks_max or math.inf)
        return pool.blocks_used / pool.blocks_total if pool.blocks_total else 0.0

    def lacking_blocks(self, num_blocks: float, num_sequences: int = 1) -> float:
        """Returns the blocks that `num_sequences` new sequences need minus the free blocks. The
        sequences need `num_blocks` blocks in total.

        Example: with 40 free blocks, the result is 60 for sequences that need 100 blocks, and -10
        for sequences that need 30. If there are several pools, the result is the largest of theirs.
        If no pool is known, the result is 0.
        """
        if not self.groups:
            free = self.blocks_total - self.blocks_used
            return num_blocks - free if self.blocks_total else 0.0
        return max(
            min(num_blocks, num_sequences * group.sequence_blocks_max or num_blocks)
            - (group.blocks_total - group.blocks_used)
            for group in self.groups
        )

    @property
    def longest_sequence(self) -> int:
        """Number of blocks of the longest sequence that fits into empty pools. 0: no limit is
        known."""
        if not self.groups:
            return self.blocks_total
        return min(
            (
                group.blocks_total
                for group in self.groups
                if not group.blocks_total >= group.sequence_blocks_max > 0
            ),
            default=0,
        )


NO_LOAD = WorkerLoad()


class TierUse(msgspec.Struct, frozen=True):
    """The block counts of a tier.

    An object store has no size limit. Its `blocks_total` is the largest number of its blocks that a
    worker can remember, and `blocks_held` is the number that the worker remembers.
    """

    name: str  # the name of one of KV_TIERS
    blocks_total: int
    blocks_held: int
    blocks_damaged: int = 0  # number of blocks that recently could not be read


def held_shares(workers: Iterable[Iterable[TierUse]]) -> dict[str, float]:
    """Returns tier name -> used share of the tier's capacity over all workers, 0 to 1.

    A tier without capacity on any worker is left out.
    """
    held: dict[str, int] = {}
    total: dict[str, int] = {}
    for tiers in workers:
        for tier in tiers:
            held[tier.name] = held.get(tier.name, 0) + tier.blocks_held
            total[tier.name] = total.get(tier.name, 0) + tier.blocks_total
    return {name: held[name] / total[name] for name in held if total[name]}
