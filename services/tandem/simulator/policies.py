"""Policies to compare placement with. Each takes what `choose` takes and gives what it gives.

tandem         services/tandem/router/placement/choose.py, the router's own
random         any worker
round-robin    one after the other
least-loaded   the fewest requests, running and waiting
prefix-only    the longest cached prefix; at random among equals
dynamo         the published rule of Dynamo's KV router: blocks to prefill there, its queue and
               this prompt, times a weight + blocks that decode there; the lowest
               (temperature 0, their default)
dynamo-softmax the same, drawn by softmax at temperature 0.5
               https://docs.nvidia.com/dynamo/latest/components/router/README.html
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from tandem.router.placement.choose import Placement, Roster, Work, WorkerSnapshot, choose
from tandem.router.placement.costs import cached_tokens

Policy = Callable[..., Placement | None]  # takes what `choose` takes
Pick = Callable[[Work, list[WorkerSnapshot], Mapping[str, int], Random], WorkerSnapshot]


@dataclass(slots=True)
class Simple:
    """A policy with the same rule in both pools."""

    pick: Pick

    def __call__(
        self,
        work: Work,
        workers: Roster,
        matches: Mapping[str, int],
        rng: Random,
        *,
        refused: frozenset[str] = frozenset(),
    ) -> Placement | None:
        usable = [w for w in workers.by_id.values() if w.usable and w.epoch not in refused]
        decode = [w for w in usable if w.role == "decode"]
        prefill = [w for w in usable if w.role == "prefill"]
        if not decode:
            return None
        chosen = self.pick(work, decode, matches, rng)
        candidates = (self.pick(work, prefill, matches, rng),) if prefill else ()
        computes = (*candidates, chosen)[0]
        cached = cached_tokens(work, chosen, matches)
        there = max(cached, cached_tokens(work, computes, matches))
        return Placement(chosen, candidates, (), work.num_tokens - there, "")


class RoundRobin:
    def __init__(self) -> None:
        self._turns = {"prefill": 0, "decode": 0}

    def pick(
        self, work: Work, workers: list[WorkerSnapshot], matches: Mapping[str, int], rng: Random
    ) -> WorkerSnapshot:
        role = workers[0].role
        self._turns[role] += 1
        return workers[self._turns[role] % len(workers)]


@dataclass(frozen=True, slots=True)
class Dynamo:
    """Dynamo's rule. Temperature 0 takes the lowest; a softmax is over costs scaled to 0..1."""

    overlap_weight: float = 1.0
    temperature: float = 0.0

    def pick(
        self, work: Work, workers: list[WorkerSnapshot], matches: Mapping[str, int], rng: Random
    ) -> WorkerSnapshot:
        costs = [self._cost(work, w, matches) for w in workers]
        low, high = min(costs), max(costs)
        if self.temperature == 0 or low == high:
            return rng.choice([w for w, c in zip(workers, costs, strict=True) if c == low])
        weights = [math.exp(-(c - low) / (high - low) / self.temperature) for c in costs]
        return rng.choices(workers, weights)[0]

    def _cost(self, work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> float:
        missing = work.num_tokens - matches.get(worker.worker_id, 0) * work.block_size
        prefill_blocks = (worker.queued_tokens + missing) / work.block_size
        decode_blocks = worker.blocks_used + work.num_tokens / work.block_size
        return self.overlap_weight * prefill_blocks + decode_blocks


def make_policy(name: str) -> Policy:
    """Returns the policy of this name. Raises KeyError if there is none."""
    return choose if name == "tandem" else Simple(_PICKS[name]())


def _any(
    work: Work, workers: list[WorkerSnapshot], matches: Mapping[str, int], rng: Random
) -> WorkerSnapshot:
    return rng.choice(workers)


def _least_loaded(
    work: Work, workers: list[WorkerSnapshot], matches: Mapping[str, int], rng: Random
) -> WorkerSnapshot:
    counts = [w.num_running + w.num_waiting + w.num_leases for w in workers]
    low = min(counts)
    return rng.choice([w for w, count in zip(workers, counts, strict=True) if count == low])


def _longest_prefix(
    work: Work, workers: list[WorkerSnapshot], matches: Mapping[str, int], rng: Random
) -> WorkerSnapshot:
    depths = [matches.get(w.worker_id, 0) for w in workers]
    high = max(depths)
    return rng.choice([w for w, depth in zip(workers, depths, strict=True) if depth == high])


_PICKS: dict[str, Callable[[], Pick]] = {
    "random": lambda: _any,
    "round-robin": lambda: RoundRobin().pick,
    "least-loaded": lambda: _least_loaded,
    "prefix-only": lambda: _longest_prefix,
    "dynamo": lambda: Dynamo().pick,
    "dynamo-softmax": lambda: Dynamo(temperature=0.5).pick,
}
POLICIES = ("tandem", *_PICKS)
