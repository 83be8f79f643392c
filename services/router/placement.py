"""Where a request goes: a decode worker, and prefill workers in order of preference.

Pure: plain data in, plain data out; no clock, no socket, and the random source is an argument. The
simulator runs this same code. The cost of a worker is the time that the request is predicted to
lose there (`costs.py`).

Routers see load that is stale by a step or a record, so the choice is random among the near-best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from services.router.costs import (
    Work,
    WorkerSnapshot,
    cached_tokens,
    decode_cost,
    prefill_cost,
    with_likely_rates,
)

__all__ = [
    "Placement",
    "Work",
    "WorkerSnapshot",
    "choose",
    "decode_cost",
    "near_best",
    "prefill_cost",
]

NEAR_BEST_RATIO = 1.05
NEAR_BEST_S = 8e-3
PREFILL_CANDIDATES_MAX = 3
PREFIX_HOLDERS_MAX = 3


@dataclass(frozen=True, slots=True)
class Placement:
    decode: WorkerSnapshot
    prefill_candidates: tuple[WorkerSnapshot, ...]
    # Others that have more of the prompt than the first candidate, the deepest first.
    prefix_holders: tuple[WorkerSnapshot, ...]
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
    likely = with_likely_rates(usable)
    prefill = [w for w in likely if w.role == "prefill"]
    decode = [w for w in likely if w.role == "decode" and w.epoch not in refused]
    if not decode:
        return None
    costs = {w.worker_id: decode_cost(work, w, matches, sources=prefill) for w in decode}
    chosen = rng.choice(near_best(decode, costs))
    deepest = _deepest(likely, matches)
    candidates = _order_prefill(work, prefill, matches, deepest, rng)
    prefills = candidates[0] if candidates else chosen
    cached = cached_tokens(work, chosen, matches)
    tokens_missing = work.num_tokens - max(cached, cached_tokens(work, prefills, matches))
    holders = [
        w
        for w in deepest
        if w not in (chosen, prefills) and matches[w.worker_id] > matches.get(prefills.worker_id, 0)
    ]
    names = ",".join(w.worker_id for w in candidates) or "none"
    reason = (
        f"decode={chosen.worker_id} cost={costs[chosen.worker_id] * 1000:.0f}ms cached={cached}"
        f"/{work.num_tokens} running={chosen.num_running} waiting={chosen.num_waiting}"
        f" kv={chosen.kv_use:.2f} of={len(decode)}; prefill={names}"
    )
    seen = {w.worker_id: w for w in usable}
    return Placement(
        seen[chosen.worker_id],
        tuple(seen[w.worker_id] for w in candidates),
        tuple(seen[w.worker_id] for w in holders[:PREFIX_HOLDERS_MAX]),
        tokens_missing,
        reason,
    )


def near_best(
    workers: Sequence[WorkerSnapshot], costs: Mapping[str, float]
) -> list[WorkerSnapshot]:
    """Those whose cost is too close to the lowest for stale load to tell them apart."""
    limit = min(costs[w.worker_id] for w in workers) * NEAR_BEST_RATIO + NEAR_BEST_S
    return [w for w in workers if costs[w.worker_id] <= limit]


def _order_prefill(
    work: Work,
    workers: Sequence[WorkerSnapshot],
    matches: Mapping[str, int],
    holders: Sequence[WorkerSnapshot],
    rng: Random,
) -> list[WorkerSnapshot]:
    """The first at random among the near-best, then the others by cost."""
    if not workers:
        return []
    costs = {w.worker_id: prefill_cost(work, w, matches, holders=holders) for w in workers}
    first = rng.choice(near_best(workers, costs))
    rest = sorted(
        (w for w in workers if w is not first), key=lambda w: (costs[w.worker_id], w.worker_id)
    )
    return [first, *rest][:PREFILL_CANDIDATES_MAX]


def _deepest(workers: Sequence[WorkerSnapshot], matches: Mapping[str, int]) -> list[WorkerSnapshot]:
    """Those that have something of the prompt, the most first; a few of them will do."""
    having = [w for w in workers if matches.get(w.worker_id, 0) > 0]
    having.sort(key=lambda w: (-matches[w.worker_id], w.worker_id))
    return having[: PREFIX_HOLDERS_MAX + 2]
