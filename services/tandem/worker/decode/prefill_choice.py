"""Where a prompt is prefilled: by which candidate, or on the decode worker itself. Pure.

Both ways are predicted, until the sequence can decode:

    a candidate   what is queued there (or the wait that it named) + computing what it misses
                  + what the pull takes longer than computing, which hides it
    here          what is queued here + computing what is missing here
                  + the same once more for each running sequence: its steps get that much longer

Either may pull the prompt's first blocks from a holder instead of computing them. Here is chosen
only if it is clearly faster: the worker is there to decode, and who comes next finds it free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.cost_model import (
    ASK_S,
    HERE_MARGIN,
    Holder,
    PairRate,
    WorkerRates,
    best_prefill,
    default_pair,
)

NEAR_BEST = 1.1  # the router's first choice stays first up to this: it spreads the load
_UNMEASURED = default_pair("nixl")


@dataclass(frozen=True, slots=True)
class Prompt:
    num_tokens: int
    bytes_per_token: float  # of KV


@dataclass(frozen=True, slots=True)
class Place:
    """A worker that could prefill the prompt."""

    rates: WorkerRates
    queued_tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Here(Place):
    num_running: int = 0


@dataclass(frozen=True, slots=True)
class Candidate(Place):
    worker_id: str = ""
    pair: PairRate = _UNMEASURED  # from it to here
    wait_s: float = 0.0  # that it named when it refused


@dataclass(frozen=True, slots=True)
class Plan:
    """Whom to ask, in order, and what to expect; nobody: prefill here."""

    candidates: tuple[str, ...]
    seconds: float
    reason: str


def plan_prefill(prompt: Prompt, here: Here, candidates: Sequence[Candidate]) -> Plan:
    """`candidates` come in the router's order."""
    here_s = seconds_here(prompt, here)
    if not candidates:
        return Plan((), here_s, "nobody to ask")
    missing_here = prompt.num_tokens - here.cached_tokens
    costs = {c.worker_id: seconds_at(prompt, c, missing_here) for c in candidates}
    order = sorted(costs, key=lambda worker_id: costs[worker_id])  # stable: the router's order
    best_s = costs[order[0]]
    first = candidates[0].worker_id
    if costs[first] <= NEAR_BEST * best_s:
        order.remove(first)
        order.insert(0, first)
    told = ", ".join(f"{w} {costs[w] * 1000:.0f} ms" for w in order)
    reason = f"here {here_s * 1000:.0f} ms, {told}; {missing_here} tokens missing"
    if here_s < HERE_MARGIN * best_s:
        return Plan((), here_s, reason)
    worth_it = [w for w in order if HERE_MARGIN * costs[w] <= here_s]
    return Plan(tuple(worth_it), costs[worth_it[0]], reason)


def seconds_here(prompt: Prompt, here: Here) -> float:
    """Until the prompt is prefilled, and the delay that this makes for those who decode here."""
    start_s, compute_s = _prefill(prompt, here)
    return _queue(here) + start_s + compute_s * (1 + here.num_running)


def seconds_at(prompt: Prompt, candidate: Candidate, missing_here: int) -> float:
    """Until the blocks that are missing here have come."""
    prefill_s = sum(_prefill(prompt, candidate))
    pull_s = missing_here * prompt.bytes_per_token / candidate.pair.bytes_per_s
    latency_s = ASK_S + 2 * candidate.pair.latency_s
    return max(_queue(candidate), candidate.wait_s) + latency_s + max(prefill_s, pull_s)


def _prefill(prompt: Prompt, place: Place) -> tuple[float, float]:
    """Waiting for a prefix from a holder, if that is worth it, and computing the rest."""
    start_s, _, compute_s = best_prefill(
        place.rates,
        prompt.num_tokens,
        place.cached_tokens,
        place.holders,
        bytes_per_token=prompt.bytes_per_token,
    )
    return start_s, compute_s


def _queue(place: Place) -> float:
    return place.rates.prefill.seconds(place.queued_tokens, 0, place.rates.step_tokens)
