"""What a request loses on a worker, in predicted seconds: the prices behind placement. Pure.

    decode   the prompts queued there + a share for each sequence that runs or waits there
             + what it misses of the prompt: pulled, or computed there, whichever is faster;
               computing counts again for each that it delays
             + the blocks that it has not free
    prefill  the prompts queued there + a share for each lease that it serves
             + what it misses of the prompt: computed, or pulled from a holder first;
               computing counts again for each that it delays

A second of computing delays whoever comes behind it: as many, in a steady state, as wait there now.
So long prompts go where nobody waits, and short ones may queue.

Workers tell their rates in their records. One that has measured nothing counts as one like the
others; while nobody has, a token costs `TOKEN_S`, and only the ratios of these prices matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

import msgspec

from tandem.cost_model import Holder, PairRate, WorkerRates, best_prefill, prefill_seconds

TOKEN_S = 1e-3  # of prefill, while nobody has measured
TOKENS_PER_RUNNING = 24.0  # steps that one more sequence makes longer for the others
TOKENS_PER_WAITING = 64.0
TOKENS_PER_LEASE = 32.0
PULL_PRICE = 0.25  # of a token's KV that is pulled, against one that is computed; unmeasured
SHORTFALL_PRICE = 4.0  # of a token without a free block: somebody is preempted for it


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
    num_pulls: int = 0
    num_seats: int = 0  # sequences that may run or pull at once; 0: it does not say
    chunk_tokens: int = 0  # of prefill in a step, beside those who decode; 0: it does not say
    blocks_total: int = 0
    blocks_used: int = 0
    rates: WorkerRates = field(default_factory=WorkerRates)
    # Peer's worker id -> how its blocks come here.
    pairs: Mapping[str, PairRate] = field(default_factory=dict, hash=False)
    # Workers whose keys differ cannot exchange KV. One of all but during an upgrade.
    pairing_key: bytes = b""
    placed: float = 0.0  # its share of the prefill of late; only the ratios of shares count

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


def decode_cost(
    work: Work,
    worker: WorkerSnapshot,
    matches: Mapping[str, int],
    *,
    sources: Sequence[WorkerSnapshot],
) -> float:
    """Never lower with more load, never higher with more cached blocks.

    `sources` are the prefill workers; without any, what is missing is computed there.
    """
    cached = cached_tokens(work, worker, matches)
    missing = work.num_tokens - cached
    rates = worker.rates
    if rates.measured:
        missing_s = _missing_s(work, worker, cached, sources)
    else:
        missing_s = (PULL_PRICE if sources else 1.0) * TOKEN_S * missing
    cost_s = (
        queue_s(worker)
        + TOKENS_PER_RUNNING * rates.decode.sequence_s * worker.num_running
        + missing_s
    )
    if worker.num_waiting:
        cost_s += TOKENS_PER_WAITING * _token_s(rates) * worker.num_waiting
    shortfall = missing - (worker.blocks_total - worker.blocks_used) * work.block_size
    if shortfall > 0 and worker.blocks_total:
        cost_s += SHORTFALL_PRICE * _token_s(rates) * shortfall
    return cost_s


def prefill_cost(
    work: Work,
    worker: WorkerSnapshot,
    matches: Mapping[str, int],
    *,
    held: Mapping[str, int] | None = None,
) -> float:
    """Never lower with more load, never higher with more cached blocks or holders.

    `held` is the prompt's tokens that others have (`cached_tokens`), by worker id.
    """
    cached, num_tokens = cached_tokens(work, worker, matches), work.num_tokens
    rates, num_leases = worker.rates, worker.num_leases
    base_s = queue_s(worker)
    if num_leases:
        base_s += TOKENS_PER_LEASE * _token_s(rates) * num_leases
    if not rates.measured:
        return base_s + TOKEN_S * (num_tokens - cached)
    if held:
        pairs = worker.pairs
        holders = [
            Holder(tokens, pairs[name])
            for name, tokens in held.items()
            if tokens > cached and name in pairs
        ]
        if holders:
            wait_s, _, computed_s = best_prefill(
                rates,
                num_tokens,
                cached,
                holders,
                bytes_per_token=rates.block_bytes / work.block_size,
            )
            return base_s + wait_s + (1 + num_leases) * computed_s
    computed_s = rates.prefill.seconds(num_tokens - cached, cached, rates.step_tokens)
    return base_s + (1 + num_leases) * computed_s


def computing_s(work: Work, worker: WorkerSnapshot, missing: int) -> float:
    """What the last `missing` tokens of the prompt take there, with nobody ahead."""
    if not worker.rates.measured:
        return TOKEN_S * missing
    return prefill_seconds(worker.rates, work.num_tokens, work.num_tokens - missing)


def cached_tokens(work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> int:
    """A prompt that is cached whole still recomputes its last token."""
    held = matches.get(worker.worker_id, 0) * work.block_size
    return held if held < work.num_tokens else max(0, work.num_tokens - 1)


def with_likely_rates(workers: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Gives one that has measured nothing the prefill rate in the middle of the others'."""
    known = [w.rates.prefill for w in workers if w.rates.measured]
    if not known or len(known) == len(workers):
        return list(workers)
    middle = median_low(rate.token_s for rate in known)
    likely = next(rate for rate in known if rate.token_s == middle)
    return [
        w
        if w.rates.measured
        else replace(w, rates=msgspec.structs.replace(w.rates, prefill=likely, measured=True))
        for w in workers
    ]


def _missing_s(
    work: Work, worker: WorkerSnapshot, cached: int, sources: Sequence[WorkerSnapshot]
) -> float:
    """What it costs to have the missing blocks there: pulled from a source, or computed.

    That a copy pushes out other blocks is not priced: twice the memory saves 1.5% of the computing
    of Mooncake's trace, so a token pushed out costs little next to one that is computed.
    """
    rates, missing = worker.rates, work.num_tokens - cached
    prompt_s = rates.prefill.seconds(missing, cached, rates.step_tokens)
    computed_s = (1 + worker.num_waiting) * prompt_s
    if not sources:
        return computed_s
    num_bytes = missing * rates.block_bytes / work.block_size
    ways = worker.pairs
    pulled_s = [way.seconds(num_bytes) for s in sources if (way := ways.get(s.worker_id))]
    return min(computed_s, min(pulled_s)) if pulled_s else PULL_PRICE * computed_s


def queue_s(worker: WorkerSnapshot) -> float:
    rates, queued = worker.rates, worker.queued_tokens
    if not rates.measured:
        return TOKEN_S * queued
    return rates.prefill.seconds(queued, 0, rates.step_tokens) if queued else 0.0


def _token_s(rates: WorkerRates) -> float:
    """Of prefill: a step's own time is spread over its tokens; attention is left out."""
    if not rates.measured:
        return TOKEN_S
    return rates.prefill.token_s + rates.prefill.step_s / rates.step_tokens
