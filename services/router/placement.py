"""Where a request goes: a decode worker, and prefill workers in order of preference.

Pure: plain data in, plain data out; no clock, no socket, and the random source is an argument. The
simulator runs this same code. The cost of a worker is what the request would wait for there, in
tokens of prefill work:

    decode   queued tokens + a share for each sequence it runs or has waiting
             + what it misses of the prompt, at the price of a pull (or of computing it, when there
               is no prefill worker) + the blocks that it has not free
    prefill  queued tokens + a share for each lease it serves + what it misses of the prompt

Routers see load that is stale by a step or a record, so the choice is random among the near-best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

# In tokens of prefill work; first honest guesses, to be replaced by measured rates.
TOKENS_PER_RUNNING = 24.0  # what one more sequence in the batch costs the others
TOKENS_PER_WAITING = 64.0
TOKENS_PER_LEASE = 32.0
PULL_PRICE = 0.25  # of a token's KV that is pulled, against one that is computed
SHORTFALL_PRICE = 4.0  # of a token without a free block: somebody is preempted for it
NEAR_BEST_RATIO = 1.05
NEAR_BEST_TOKENS = 8.0
PREFILL_CANDIDATES_MAX = 3


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """What the router knows of a worker at the moment it places a request."""

    worker_id: str
    epoch: str
    address: str
    role: str  # "prefill" or "decode"
    state: str  # "starting", "ready" or "draining"
    reachable: bool = True
    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    num_leases: int = 0
    blocks_total: int = 0
    blocks_used: int = 0

    @property
    def usable(self) -> bool:
        return self.state == "ready" and self.reachable

    @property
    def kv_use(self) -> float:
        """The share of the KV pool that live sequences reference, 0 to 1."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """What placement needs of a request."""

    num_tokens: int  # of the model's input
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Placement:
    decode: WorkerSnapshot
    prefill_candidates: tuple[WorkerSnapshot, ...]
    tokens_missing: int  # where the prompt will be prefilled: the first candidate, else decode
    reason: str


def choose(
    work: Work,
    workers: Sequence[WorkerSnapshot],
    matches: Mapping[str, int],
    rng: Random,
    *,
    refused: frozenset[str] = frozenset(),
) -> Placement | None:
    """None when no decode worker is usable; `matches` is blocks of the prompt by worker id.

    Workers whose epoch is in `refused` said no to this request already.
    """
    usable = [w for w in workers if w.usable]
    prefill = [w for w in usable if w.role == "prefill"]
    decode = [w for w in usable if w.role == "decode" and w.epoch not in refused]
    if not decode:
        return None
    costs = {w.worker_id: decode_cost(work, w, matches, pulls=bool(prefill)) for w in decode}
    chosen = rng.choice(near_best(decode, costs))
    candidates = _order_prefill(work, prefill, matches, rng)
    cached = _cached_tokens(work, chosen, matches)
    prefills = candidates[0] if candidates else chosen
    tokens_missing = work.num_tokens - max(cached, _cached_tokens(work, prefills, matches))
    names = ",".join(w.worker_id for w in candidates) or "none"
    reason = (
        f"decode={chosen.worker_id} cost={costs[chosen.worker_id]:.0f} cached={cached}"
        f"/{work.num_tokens} running={chosen.num_running} waiting={chosen.num_waiting}"
        f" kv={chosen.kv_use:.2f} of={len(decode)}; prefill={names}"
    )
    return Placement(chosen, tuple(candidates), tokens_missing, reason)


def decode_cost(
    work: Work, worker: WorkerSnapshot, matches: Mapping[str, int], *, pulls: bool
) -> float:
    """Never lower with more load, never higher with more cached blocks."""
    missing = work.num_tokens - _cached_tokens(work, worker, matches)
    free_tokens = (worker.blocks_total - worker.blocks_used) * work.block_size
    shortfall = max(0, missing - free_tokens) if worker.blocks_total else 0
    return (
        worker.queued_tokens
        + TOKENS_PER_RUNNING * worker.num_running
        + TOKENS_PER_WAITING * worker.num_waiting
        + (PULL_PRICE if pulls else 1.0) * missing
        + SHORTFALL_PRICE * shortfall
    )


def prefill_cost(work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> float:
    missing = work.num_tokens - _cached_tokens(work, worker, matches)
    return worker.queued_tokens + TOKENS_PER_LEASE * worker.num_leases + missing


def near_best(
    workers: Sequence[WorkerSnapshot], costs: Mapping[str, float]
) -> list[WorkerSnapshot]:
    """Those whose cost is too close to the lowest for stale load to tell them apart."""
    limit = min(costs[w.worker_id] for w in workers) * NEAR_BEST_RATIO + NEAR_BEST_TOKENS
    return [w for w in workers if costs[w.worker_id] <= limit]


def _order_prefill(
    work: Work, workers: Sequence[WorkerSnapshot], matches: Mapping[str, int], rng: Random
) -> list[WorkerSnapshot]:
    """The first at random among the near-best, then the others by cost."""
    if not workers:
        return []
    costs = {w.worker_id: prefill_cost(work, w, matches) for w in workers}
    first = rng.choice(near_best(workers, costs))
    rest = sorted(
        (w for w in workers if w is not first), key=lambda w: (costs[w.worker_id], w.worker_id)
    )
    return [first, *rest][:PREFILL_CANDIDATES_MAX]


def _cached_tokens(work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> int:
    """A prompt that is cached whole still recomputes its last token."""
    held = matches.get(worker.worker_id, 0) * work.block_size
    return max(0, min(held, work.num_tokens - 1))
