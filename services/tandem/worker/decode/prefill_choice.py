"""Chooses where a prompt is prefilled: by which candidate, or on the decode worker itself. Pure.

Both ways are predicted, until the sequence can decode:

    a candidate   what is queued there (or the wait that it named) + computing what it misses
                  + what the pull takes longer than computing, which hides it
    here          what is queued here + computing what is missing here
                  + the same once more for each running sequence: its steps get that much longer

Either may pull the prompt's first blocks from a holder instead of computing them. Here is chosen
only if it is clearly faster: the worker is there to decode, and who comes next finds it free.

A worker with tiers below its pool decides first whether it loads blocks: its engine compares that
with both ways (perf_model/soonest.py). What is missing after a load is planned here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.common.perf_model.predict import ASK_S, Expected, Holder, expect, is_faster_here
from tandem.common.perf_model.rates import PairRate, WorkerRates, default_pair
from tandem.common.perf_model.soonest import Producer

NEAR_BEST = 1.1  # the router's first choice stays first up to this: it spreads the load
_UNMEASURED = default_pair("nixl")


@dataclass(frozen=True, slots=True)
class PrefillPrompt:
    num_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A worker that could prefill the prompt."""

    rates: WorkerRates
    queue_s: float = 0.0  # until what is queued there is computed
    cached_tokens: int = 0  # of the prompt
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Here(PrefillCandidate):
    num_running: int = 0


@dataclass(frozen=True, slots=True)
class Candidate(PrefillCandidate):
    worker_id: str = ""
    pair: PairRate = _UNMEASURED  # from it to here
    wait_s: float = 0.0  # that it named when it refused
    load_s: float = 0.0  # until some of its cached tokens have come from a tier of its own
    given: PairRate = _UNMEASURED  # from here to it


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The candidates to ask, in order, and the predicted time; without any, prefill here."""

    candidates: tuple[str, ...]
    seconds: float
    reason: str


def plan_prefill(prompt: PrefillPrompt, here: Here, candidates: Sequence[Candidate]) -> PrefillPlan:
    """`candidates` come in the router's order."""
    here_s = seconds_here(prompt, here)
    if not candidates:
        return PrefillPlan((), here_s, "nobody to ask")
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
    if is_faster_here(here_s, best_s):
        return PrefillPlan((), here_s, reason)
    worth_it = [w for w in order if not is_faster_here(here_s, costs[w])]
    return PrefillPlan(tuple(worth_it), costs[worth_it[0]], reason)


def seconds_here(prompt: PrefillPrompt, here: Here) -> float:
    """Predicts seconds to prefill the prompt here, with the delay for those who decode here."""
    expected = _expect(prompt, here)
    return expected.total_s + expected.compute_s * here.num_running


def seconds_at(prompt: PrefillPrompt, candidate: Candidate, missing_here: int) -> float:
    """Returns the seconds until the missing blocks have come, pulled while the peer computes."""
    expected = _expect(prompt, candidate, after_s=candidate.wait_s)
    moved_bytes = candidate.rates.moved_bytes(missing_here / prompt.block_size)
    pull_s = moved_bytes / candidate.pair.bytes_per_s
    latency_s = ASK_S + 2 * candidate.pair.latency_s
    made_s = candidate.load_s + expected.pull_s + expected.compute_s
    return expected.queue_s + latency_s + max(made_s, pull_s)


def soonest_producer(prompt: PrefillPrompt, candidates: Sequence[Candidate]) -> Producer | None:
    """Returns the candidate that would have the prompt's KV here soonest, with nothing of it here,
    for an engine that may load some of it instead."""
    if not candidates:
        return None
    best = min(candidates, key=lambda c: seconds_at(prompt, c, prompt.num_tokens))
    expected = _expect(prompt, best, after_s=best.wait_s)
    rates = best.rates
    block_bytes = rates.moved_bytes(1)
    return Producer(
        rates.prefill,
        rates.step_tokens,
        wait_s=expected.queue_s + ASK_S + 2 * best.pair.latency_s,
        num_blocks=expected.start // prompt.block_size,
        there_s=best.load_s + expected.pull_s,
        block_s=block_bytes / best.pair.bytes_per_s,
        given_block_s=block_bytes / best.given.bytes_per_s,
    )


def _expect(prompt: PrefillPrompt, place: PrefillCandidate, *, after_s: float = 0.0) -> Expected:
    return expect(
        place.rates,
        prompt.num_tokens,
        place.cached_tokens,
        queue_s=place.queue_s,
        after_s=after_s,
        holders=place.holders,
        block_size=prompt.block_size,
    )
