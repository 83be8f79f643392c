"""Chooses whether a prompt is prefilled by a candidate or by the decode worker. Does no I/O.

A candidate is a prefill worker that the router named. This module predicts how many seconds each
worker needs until the sequence can decode:

    worker           predicted seconds
    candidate        queue + latency + max(compute, pull)
    decode worker    queue + compute + running * compute

    queue      seconds until the worker can start the prompt
    latency    seconds to open the lease and to start a pull
    compute    seconds to compute the tokens that the worker has not cached
    pull       seconds to pull the KV from the candidate, which overlaps with the computation
    running    number of sequences that decode on the decode worker; prefill delays each of them

If a candidate refused a lease, the candidate named a wait, and its queue counts as at least that
long. If a third worker (a holder) has cached the first of the missing tokens, the seconds to pull
these tokens from the holder can replace the seconds to compute them.

For example, a candidate with queue 0.03, latency 0.01, compute 0.10 and pull 0.04 needs 0.14 s. A
decode worker with queue 0, compute 0.10 and two running sequences counts as 0.30 s, so the
candidate is chosen. The decode worker is chosen only if it is clearly faster, because it should
stay free to decode.

A decode worker with tiers can also load blocks from a tier. The engine makes that choice first
(perf_model/soonest.py). This module then plans the prefill of the tokens that are still missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.common.perf_model.predict import ASK_S, Expected, Holder, expect, is_local_faster
from tandem.common.perf_model.rates import PairRate, WorkerRates, default_pair
from tandem.common.perf_model.soonest import Producer

# The order in which the router names the candidates spreads the load over them. So the first of
# them is also tried first, unless another one is clearly faster. For example, a first candidate
# with 0.105 s is tried before another one with 0.100 s, because 0.105 <= NEAR_BEST * 0.100.
NEAR_BEST = 1.1
_UNMEASURED = default_pair("nixl")


@dataclass(frozen=True, slots=True)
class PrefillPrompt:
    num_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class PrefillOption:
    """A worker that could prefill the prompt."""

    rates: WorkerRates
    queue_s: float = 0.0  # seconds until the worker has computed the prompts in its queue
    cached_tokens: int = 0  # number of the prompt's tokens that the worker has cached
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalWorker(PrefillOption):
    """The decode worker itself."""

    num_running: int = 0


@dataclass(frozen=True, slots=True)
class Candidate(PrefillOption):
    """A prefill worker that the router named."""

    worker_id: str = ""
    pair: PairRate = _UNMEASURED  # rate at which the decode worker pulls from the candidate
    wait_s: float = 0.0  # seconds to wait, named by the candidate when it refused; 0: no refusal
    load_s: float = 0.0  # seconds in which the candidate loads its cached tokens from a tier
    given: PairRate = _UNMEASURED  # rate at which the candidate pulls from the decode worker


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The candidates to try, in order. If there are none, the decode worker prefills the prompt.

    `seconds` is the time predicted for the first candidate, or for local prefill. `local_s` is the
    cost of local prefill, and `remote_s` is that of the first candidate or, if there is none, of
    the cheapest one; 0: not compared.
    """

    candidates: tuple[str, ...]
    seconds: float
    reason: str
    local_s: float = 0.0
    remote_s: float = 0.0


def plan_prefill(
    prompt: PrefillPrompt, local: LocalWorker, candidates: Sequence[Candidate]
) -> PrefillPlan:
    """Returns the plan for a prompt. `candidates` are in the router's order."""
    local_s = local_seconds(prompt, local)
    if not candidates:
        return PrefillPlan((), local_s, "there is no prefill worker")
    num_missing = prompt.num_tokens - local.cached_tokens
    costs = {c.worker_id: candidate_seconds(prompt, c, num_missing) for c in candidates}
    # Candidates with equal costs stay in the router's order, because sorted() is stable.
    order = sorted(costs, key=lambda worker_id: costs[worker_id])
    best_s = costs[order[0]]
    first = candidates[0].worker_id
    if costs[first] <= NEAR_BEST * best_s:
        order.remove(first)
        order.insert(0, first)
    costs_text = ", ".join(f"{w} {costs[w] * 1000:.0f} ms" for w in order)
    reason = f"this worker {local_s * 1000:.0f} ms, {costs_text}; {num_missing} tokens missing"
    if is_local_faster(local_s, best_s):
        return PrefillPlan((), local_s, reason, local_s, best_s)
    worthwhile = [w for w in order if not is_local_faster(local_s, costs[w])]
    first_s = costs[worthwhile[0]]
    return PrefillPlan(tuple(worthwhile), first_s, reason, local_s, first_s)


def local_seconds(prompt: PrefillPrompt, local: LocalWorker) -> float:
    """Returns the cost of local prefill: its predicted seconds plus the delay of running sequences.

    For example, a local prefill of 0.1 s delays each of 2 running sequences by 0.1 s, so the cost
    is 0.3 s.
    """
    expected = _expect(prompt, local)
    return expected.total_s + expected.compute_s * local.num_running


def candidate_seconds(prompt: PrefillPrompt, candidate: Candidate, num_missing: int) -> float:
    """Returns the predicted seconds until the decode worker has pulled the KV from a candidate.

    The pull overlaps with the candidate's computation. `num_missing` is the number of tokens whose
    KV is pulled.
    """
    expected = _expect(prompt, candidate, after_s=candidate.wait_s)
    moved_bytes = candidate.rates.moved_bytes(num_missing / prompt.block_size)
    pull_s = moved_bytes / candidate.pair.bytes_per_s
    latency_s = ASK_S + 2 * candidate.pair.latency_s
    made_s = candidate.load_s + expected.pull_s + expected.compute_s
    return expected.queue_s + latency_s + max(made_s, pull_s)


def soonest_producer(prompt: PrefillPrompt, candidates: Sequence[Candidate]) -> Producer | None:
    """Returns the candidate that would deliver all of the prompt's KV soonest.

    Returns None if there is no candidate. The engine compares the result with loading blocks from
    a tier.
    """
    if not candidates:
        return None
    best = min(candidates, key=lambda c: candidate_seconds(prompt, c, prompt.num_tokens))
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


def _expect(prompt: PrefillPrompt, option: PrefillOption, *, after_s: float = 0.0) -> Expected:
    return expect(
        option.rates,
        prompt.num_tokens,
        option.cached_tokens,
        queue_s=option.queue_s,
        after_s=after_s,
        holders=option.holders,
        block_size=prompt.block_size,
    )
