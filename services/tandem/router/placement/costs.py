"""Prices of placement: the predicted seconds that a request loses on a worker. Pure.

    decode   its queued prompts + a share for each of its running and waiting sequences
             + the wait for a running slot, by the mean output of requests
             + the missing part of the prompt: loaded from a tier, pulled or computed, whichever is
               fastest; computing counts again for each waiting sequence that it delays
             + a price for each missing free block
    prefill  its queued prompts + a share for each of its leases
             + the missing part of the prompt: computed, or first loaded from a tier or pulled from
               a holder; computing counts again for each lease that it delays

A second of computing delays the requests behind it; in a steady state these are as many as wait
now. So long prompts go to workers where no request waits, and short ones may queue.

`perf_model/predict.py` converts the rates in the workers' records into seconds. A worker without
measurements is assumed to be like the others. If none has measured, all have the same assumed
rates, and only the ratios of these prices matter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tandem.common.adapter import Adapter
from tandem.common.perf_model.predict import (
    Holder,
    believed,
    expect,
    likely_rates,
    prefill_seconds,
    token_seconds,
)
from tandem.common.perf_model.rates import PairRate, TierRate, WorkerRates
from tandem.common.perf_model.soonest import Prompt, TierReach, choose_soonest
from tandem.common.worker_load import NO_LOAD, WorkerLoad
from tandem.prefix_index.holders import source_of

TOKENS_PER_RUNNING = 24.0  # decode steps by which one running sequence lengthens the others' time
TOKENS_PER_WAITING = 64.0
TOKENS_PER_LEASE = 32.0
PULL_PRICE = 0.25  # price of pulling a token's KV relative to computing it, if no rate was measured
ADAPTER_READ_S = 0.05  # assumed; prefers workers that have the adapter among similar ones
# price of a token without a free block, because a sequence is preempted for it
SHORTFALL_PRICE = 4.0


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as the router knows it when it places a request."""

    worker_id: str
    epoch: str
    address: str
    role: str  # "prefill" or "decode"
    state: str  # "starting", "ready" or "draining"
    reachable: bool = True
    load: WorkerLoad = NO_LOAD  # with the work that the router sent since it was reported
    rates: WorkerRates = field(default_factory=WorkerRates)
    # Peer's worker id -> rate of blocks from the peer.
    pairs: Mapping[str, PairRate] = field(default_factory=dict, hash=False)
    # Workers with different keys cannot exchange KV. All have the same key except during an
    # upgrade.
    compatibility_key: bytes = b""
    prefill_share: float = 0.0  # recent share of the prefill; only the ratios of shares matter
    adapters: frozenset[str] = frozenset()  # digests of the adapters in its memory
    # digests of adapters that it recently failed to read
    adapters_failed: frozenset[str] = frozenset()
    lora_rank_max: int = 0  # largest rank of an adapter that it loads; 0: it loads none
    keeps_deadlines: bool = False  # whether it refuses requests that would be too late
    # for a decode worker: "remote" or "local" if its configuration leaves no choice
    prefill_at: str = ""

    @property
    def usable(self) -> bool:
        return self.state == "ready" and self.reachable

    @property
    def queue_s(self) -> float:
        """Seconds until its queued prompts are computed."""
        return self.load.queue_s(self.rates)

    def can_run(self, work: "Work") -> bool:
        """Returns whether it has the request's adapter or may be able to load it. True without
        one.
        """
        adapter = work.adapter
        if adapter is None or adapter.digest in self.adapters:
            return True
        return adapter.rank <= self.lora_rank_max and adapter.digest not in self.adapters_failed


@dataclass(frozen=True, slots=True)
class Work:
    """The properties of a request that placement needs."""

    num_tokens: int  # length of the model's input
    block_size: int = 16
    adapter: Adapter | None = None  # the LoRA adapter of the request
    # largest number of its tokens whose KV a worker keeps; None: all
    budget_tokens: int | None = None
    completion_tokens: float = 0.0  # expected output; 0: unknown

    def num_kept(self, num_tokens: int) -> int:
        """Returns the number of its tokens whose KV a worker keeps."""
        return num_tokens if self.budget_tokens is None else min(num_tokens, self.budget_tokens)


class Reuse(msgspec.Struct, frozen=True):
    """The first tokens of a prompt that need no computing, and the time until they are in the pool.

    The worker may compute some of them while it loads the others.
    """

    num_tokens: int
    load_s: float = 0.0


class PricedWorker(msgspec.Struct, frozen=True):
    """A worker, and the seconds that one request loses on it."""

    worker: WorkerSnapshot
    reused: Reuse
    cost_s: float


def price_decode(
    work: Work,
    worker: WorkerSnapshot,
    matches: Mapping[str, int],
    *,
    producers: Sequence[str],
) -> PricedWorker:
    """Prices a request that decodes on the worker.

    The cost never falls with more load and never rises with more cached blocks. `producers` are the
    ids of the prefill workers; without any, the worker computes the missing tokens itself.
    """
    reused = reuse(work, worker, matches)
    num_missing = work.num_kept(work.num_tokens - reused.num_tokens) / work.block_size  # blocks
    rates = worker.rates
    load = worker.load
    cost_s = (
        load.queue_s(rates)
        + TOKENS_PER_RUNNING * rates.decode.sequence_s * load.num_running
        + reused.load_s
        + _missing_s(work, worker, reused.num_tokens, num_missing, producers)
    )
    if work.adapter is not None:
        cost_s += _adapter_s(work.adapter, worker)
    if 0 < load.num_running_slots <= load.num_slots_taken + load.num_waiting:
        cost_s += slot_wait_s(work, worker, work.completion_tokens)
    if load.num_waiting:
        cost_s += TOKENS_PER_WAITING * token_seconds(rates) * load.num_waiting
    shortfall = work.block_size * load.lacking_blocks(num_missing)
    if shortfall > 0:
        cost_s += SHORTFALL_PRICE * token_seconds(rates) * shortfall
    return PricedWorker(worker, reused, cost_s)


def slot_wait_s(work: Work, decode: WorkerSnapshot, completion_tokens: float) -> float:
    """Predicts the seconds until enough sequences have ended for this one to get a slot and blocks.

    On a full worker, each running slot becomes free every `completion_tokens` steps.
    """
    load = decode.load
    num_there = load.num_slots_taken + load.num_waiting
    num_to_end = num_there + 1 - load.num_running_slots if load.num_running_slots else 0
    # Waiting sequences have no blocks yet, and all their tokens are queued. If none waits, the
    # queued tokens belong to prompts that have all of their blocks.
    queued = load.queued_tokens if load.num_waiting else 0
    num_blocks = (queued + work.num_kept(work.num_tokens)) / work.block_size
    if load.lacking_blocks(num_blocks, load.num_waiting + 1) > 0:
        num_to_end = max(num_to_end, load.num_waiting + 1)
    if num_to_end <= 0:
        return 0.0
    num_slots_taken = load.num_slots_taken
    num_ending = max(1, min(num_slots_taken, load.num_running_slots or num_slots_taken))
    return num_to_end * completion_tokens * decode.rates.decode.seconds(num_ending) / num_ending


def price_prefill(
    work: Work,
    worker: WorkerSnapshot,
    matches: Mapping[str, int],
    *,
    held: Mapping[str, int] | None = None,
) -> PricedWorker:
    """Prices a request whose prompt the worker computes.

    The cost never falls with more load and never rises with more cached blocks or holders. `held`
    is the number of the prompt's tokens that other workers have (`cached_tokens`), by worker id.
    """
    reused = reuse(work, worker, matches)
    cached = reused.num_tokens
    rates = worker.rates
    pairs = worker.pairs
    holders = held and [
        Holder(tokens, pair)
        for name, tokens in held.items()
        if tokens > cached and (pair := pairs.get(name)) is not None
    ]
    expected = expect(
        rates,
        work.num_tokens,
        cached,
        queue_s=worker.load.queue_s(rates),
        holders=holders or (),
        block_size=work.block_size,
    )
    cost_s = expected.total_s + reused.load_s
    if work.adapter is not None:
        cost_s += _adapter_s(work.adapter, worker)
    if num_leases := worker.load.num_leases:
        cost_s += num_leases * (TOKENS_PER_LEASE * token_seconds(rates) + expected.compute_s)
    return PricedWorker(worker, reused, cost_s)


def _adapter_s(adapter: Adapter, worker: WorkerSnapshot) -> float:
    """Returns the seconds until the request's adapter is in the worker's memory."""
    return 0.0 if adapter.digest in worker.adapters else ADAPTER_READ_S


def reuse(work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> Reuse:
    """Returns the part of the prompt that the worker has in its pool or loads from its tiers.

    A tier is used only where that is faster than computing. The worker decides by the same
    function.
    """
    held = cached_tokens(work, worker, matches)
    rates = worker.rates
    if not rates.tiers:
        return Reuse(held)
    in_pool = matches.get(worker.worker_id, 0)
    tiers = []
    for tier in rates.tiers:
        depth = matches.get(source_of(worker.worker_id, tier.name), 0)
        # the last token is always computed
        depth = min(depth, (work.num_tokens - 1) // work.block_size)
        if depth > in_pool:
            tiers.append(
                TierReach(depth, _load_s(rates, tier, depth - in_pool) / (depth - in_pool))
            )
    if not tiers or held < in_pool * work.block_size:  # the pool has the whole prompt
        return Reuse(held)
    choice = choose_soonest(
        Prompt(
            work.num_tokens,
            work.block_size,
            in_pool,
            rates.prefill,
            rates.step_tokens,
            num_delayed=worker.load.num_waiting,
        ),
        tiers,
        load_queue_s=rates.load_queue_s,
    )
    if not choice.loads:
        return Reuse(held)
    return Reuse(choice.end * work.block_size, choice.there_s)


def _load_s(rates: WorkerRates, tier: TierRate, num_blocks: int) -> float:
    """Returns the seconds to load a prompt's last blocks. Groups with windows load only the last
    ones.
    """
    seconds = tier.seconds(num_blocks, rates.block_bytes)
    if not rates.windows:
        return seconds
    return seconds * rates.moved_bytes(num_blocks) / (num_blocks * rates.block_bytes)


def computing_s(work: Work, worker: WorkerSnapshot, missing: int) -> float:
    """Predicts the seconds to compute the prompt's last `missing` tokens with an empty queue."""
    return prefill_seconds(worker.rates, work.num_tokens, work.num_tokens - missing)


def cached_tokens(work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> int:
    """Returns the number of the prompt's tokens in the worker's pool.

    A completely cached prompt recomputes its last token.
    """
    held = matches.get(worker.worker_id, 0) * work.block_size
    return held if held < work.num_tokens else max(0, work.num_tokens - 1)


def with_likely_rates(workers: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Gives each worker without measurements the median prefill rate of the others."""
    if all(w.rates.measured for w in workers):
        return list(workers)
    likely = likely_rates(w.rates for w in workers)
    return [w if w.rates.measured else replace(w, rates=believed(w.rates, likely)) for w in workers]


def _missing_s(
    work: Work,
    worker: WorkerSnapshot,
    cached: int,
    num_missing: float,
    producers: Sequence[str],
) -> float:
    """Returns the seconds to obtain `num_missing` blocks: pulled from a producer, or computed.

    The eviction of other blocks has no price. In Mooncake's trace, twice the memory saves only 1.5%
    of the computing, so an evicted token costs little compared with a computed one.
    """
    rates = worker.rates
    computed_s = (1 + worker.load.num_waiting) * prefill_seconds(rates, work.num_tokens, cached)
    if not producers:
        return computed_s
    num_bytes = rates.moved_bytes(num_missing)
    pairs = worker.pairs
    pulled_s = [pair.seconds(num_bytes) for name in producers if (pair := pairs.get(name))]
    return min(computed_s, min(pulled_s)) if pulled_s else PULL_PRICE * computed_s
