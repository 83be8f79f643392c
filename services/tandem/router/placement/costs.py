"""Prices of placement: the predicted seconds that a request loses on a worker. Pure.

    decode   the prompts queued there + a share for each sequence that runs or waits there
             + the wait until a running slot is free, by the tokens that requests make
             + what it misses of the prompt: loaded from a tier, pulled, or computed there,
               whichever is soonest;
               computing counts again for each that it delays
             + the blocks that it has not free
    prefill  the prompts queued there + a share for each lease that it serves
             + what it misses of the prompt: computed, or loaded from a tier or pulled from a
               holder first;
               computing counts again for each that it delays

A second of computing delays whoever comes behind it: as many, in a steady state, as wait there now.
So long prompts go where nobody waits, and short ones may queue.

Workers tell their rates in their records, and `perf_model/predict.py` turns them into seconds. One
that has measured nothing counts as one like the others; while nobody has, all tell the same guess,
and only the ratios of these prices matter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.common.adapter import Adapter
from tandem.common.perf_model.kv_load import GroupLoad, kv_use, lacking_blocks
from tandem.common.perf_model.predict import (
    Holder,
    believed,
    expect,
    likely_rates,
    prefill_seconds,
    queue_seconds,
    token_seconds,
)
from tandem.common.perf_model.rates import PairRate, TierRate, WorkerRates
from tandem.common.perf_model.soonest import Prompt, Reach, choose_soonest
from tandem.prefix_index.holders import source_of

TOKENS_PER_RUNNING = 24.0  # steps that one more sequence makes longer for the others
TOKENS_PER_WAITING = 64.0
TOKENS_PER_LEASE = 32.0
PULL_PRICE = 0.25  # of a token's KV that is pulled, against one that is computed; unmeasured
ADAPTER_READ_S = 0.05  # a guess: workers that have the adapter go before others like them
SHORTFALL_PRICE = 4.0  # of a token without a free block: somebody is preempted for it


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as the router knows it at the moment it places a request."""

    worker_id: str
    epoch: str
    address: str
    role: str  # "prefill" or "decode"
    state: str  # "starting", "ready" or "draining"
    reachable: bool = True
    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    queued_s: float | None = None  # until those are computed; None: it does not say
    num_leases: int = 0
    num_pulls: int = 0
    num_running_slots: int = 0  # sequences that may run or pull at once; 0: it does not say
    chunk_tokens: int = 0  # of prefill in a step, beside those who decode; 0: it does not say
    blocks_total: int = 0
    blocks_used: int = 0
    groups: tuple[GroupLoad, ...] = ()  # of a model with windows; blocks_* are sums of them
    rates: WorkerRates = field(default_factory=WorkerRates)
    # Peer's worker id -> how its blocks come here.
    pairs: Mapping[str, PairRate] = field(default_factory=dict, hash=False)
    # Workers whose keys differ cannot exchange KV. One of all but during an upgrade.
    compatibility_key: bytes = b""
    placed: float = 0.0  # its share of the prefill of late; only the ratios of shares count
    adapters: frozenset[str] = frozenset()  # digests of those in its memory
    adapters_failed: frozenset[str] = frozenset()  # that it could not read of late
    lora_rank_max: int = 0  # of an adapter that it loads; 0: it loads none
    keeps_deadlines: bool = False  # it refuses by itself what would come too late
    prefill_at: str = ""  # of a decode worker: "remote" or "local" if it has no choice

    @property
    def usable(self) -> bool:
        return self.state == "ready" and self.reachable

    @property
    def kv_use(self) -> float:
        """The share of the KV pool that live sequences reference, 0 to 1."""
        return kv_use(self)

    @property
    def num_requests(self) -> int:
        """Sequences and leases there, whatever they do."""
        return self.num_running + self.num_waiting + self.num_pulls + self.num_leases

    @property
    def queue_s(self) -> float:
        """Seconds until the prompts queued there are computed."""
        if self.queued_s is not None:
            return self.queued_s
        return queue_seconds(self.rates, self.queued_tokens) if self.queued_tokens else 0.0

    def can_run(self, work: "Work") -> bool:
        """Returns whether it has the request's adapter, if any, or may be able to load it."""
        adapter = work.adapter
        if adapter is None or adapter.digest in self.adapters:
            return True
        return adapter.rank <= self.lora_rank_max and adapter.digest not in self.adapters_failed


@dataclass(frozen=True, slots=True)
class Work:
    """The properties of a request that placement needs."""

    num_tokens: int  # of the model's input
    block_size: int = 16
    adapter: Adapter | None = None  # that computes it
    budget_tokens: int | None = None  # whose KV a worker keeps of it at most; None: all
    completion_tokens: float = 0.0  # that a request is likely to make; 0: not known

    def num_kept(self, num_tokens: int) -> int:
        """Returns of how many of its tokens a worker keeps the KV."""
        return num_tokens if self.budget_tokens is None else min(num_tokens, self.budget_tokens)


def decode_cost(
    work: Work,
    worker: WorkerSnapshot,
    matches: Mapping[str, int],
    *,
    producers: Sequence[WorkerSnapshot],
) -> float:
    """Cost in seconds; it is never lower with more load, never higher with more cached blocks.

    `producers` are the prefill workers; without any, what is missing is computed there.
    """
    reused = reuse(work, worker, matches)
    missing = work.num_tokens - reused.num_tokens
    rates = worker.rates
    queue_s = worker.queued_s
    if queue_s is None:
        queue_s = queue_seconds(rates, worker.queued_tokens)
    cost_s = (
        queue_s
        + TOKENS_PER_RUNNING * rates.decode.sequence_s * worker.num_running
        + reused.load_s
        + _missing_s(work, worker, reused.num_tokens, producers)
    )
    if work.adapter is not None:
        cost_s += _adapter_s(work.adapter, worker)
    if 0 < worker.num_running_slots <= worker.num_running + worker.num_pulls + worker.num_waiting:
        cost_s += slot_wait_s(work, worker, work.completion_tokens)
    if worker.num_waiting:
        cost_s += TOKENS_PER_WAITING * token_seconds(rates) * worker.num_waiting
    shortfall = work.block_size * lacking_blocks(worker, work.num_kept(missing) / work.block_size)
    if shortfall > 0:
        cost_s += SHORTFALL_PRICE * token_seconds(rates) * shortfall
    return cost_s


def slot_wait_s(work: Work, decode: WorkerSnapshot, completion_tokens: float) -> float:
    """Predicts the seconds until enough sequences have ended there. In a full worker, one ends
    every `completion_tokens` steps for each running slot."""
    num_there = decode.num_running + decode.num_pulls + decode.num_waiting
    num_to_end = num_there + 1 - decode.num_running_slots if decode.num_running_slots else 0
    # What waits there has no blocks yet; all its tokens are queued. Without it, what is queued is
    # of prompts that have all of theirs.
    queued = decode.queued_tokens if decode.num_waiting else 0
    num_blocks = (queued + work.num_kept(work.num_tokens)) / work.block_size
    if lacking_blocks(decode, num_blocks, decode.num_waiting + 1) > 0:
        num_to_end = max(num_to_end, decode.num_waiting + 1)
    if num_to_end <= 0:
        return 0.0
    num_slots_taken = decode.num_running + decode.num_pulls
    num_ending = max(1, min(num_slots_taken, decode.num_running_slots or num_slots_taken))
    return num_to_end * completion_tokens * decode.rates.decode.seconds(num_ending) / num_ending


def prefill_cost(
    work: Work,
    worker: WorkerSnapshot,
    matches: Mapping[str, int],
    *,
    held: Mapping[str, int] | None = None,
) -> float:
    """Cost in seconds; never lower with more load, never higher with more cached blocks or holders.

    `held` is the prompt's tokens that others have (`cached_tokens`), by worker id.
    """
    reused = reuse(work, worker, matches)
    rates = worker.rates
    pairs = worker.pairs
    holders = held and [
        Holder(tokens, pairs[name])
        for name, tokens in held.items()
        if tokens > reused.num_tokens and name in pairs
    ]
    expected = expect(
        rates,
        work.num_tokens,
        reused.num_tokens,
        queue_s=worker.queue_s,
        holders=holders or (),
        block_size=work.block_size,
    )
    cost_s = expected.total_s + reused.load_s
    if work.adapter is not None:
        cost_s += _adapter_s(work.adapter, worker)
    if num_leases := worker.num_leases:
        cost_s += num_leases * (TOKENS_PER_LEASE * token_seconds(rates) + expected.compute_s)
    return cost_s


def _adapter_s(adapter: Adapter, worker: WorkerSnapshot) -> float:
    """Seconds until the request's adapter is in the worker's memory."""
    return 0.0 if adapter.digest in worker.adapters else ADAPTER_READ_S


@dataclass(frozen=True, slots=True)
class Reuse:
    """The first tokens of a prompt that a worker has or loads, and the time until they are in its
    pool; it may compute some of them while it loads the others."""

    num_tokens: int
    load_s: float = 0.0


def reuse(work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> Reuse:
    """Returns what the worker's pool holds of the prompt, and what it loads from tiers below, where
    that is sooner than computing. The worker decides by the same function."""
    held = cached_tokens(work, worker, matches)
    rates = worker.rates
    in_pool = matches.get(worker.worker_id, 0)
    tiers = []
    for tier in rates.tiers:
        depth = matches.get(source_of(worker.worker_id, tier.name), 0)
        depth = min(depth, (work.num_tokens - 1) // work.block_size)  # the last token is computed
        if depth > in_pool:
            tiers.append(Reach(depth, _load_s(rates, tier, depth - in_pool) / (depth - in_pool)))
    if not tiers or held < in_pool * work.block_size:  # the pool has the whole prompt
        return Reuse(held)
    choice = choose_soonest(
        Prompt(
            work.num_tokens,
            work.block_size,
            in_pool,
            rates.prefill,
            rates.step_tokens,
            num_delayed=worker.num_waiting,
        ),
        tiers,
        load_queue_s=rates.load_queue_s,
    )
    if not choice.loads:
        return Reuse(held)
    return Reuse(choice.end * work.block_size, choice.there_s)


def _load_s(rates: WorkerRates, tier: TierRate, num_blocks: int) -> float:
    """Returns the seconds to load a prompt's last blocks; of windows only the last ones come."""
    seconds = tier.seconds(num_blocks, rates.block_bytes)
    if not rates.windows:
        return seconds
    return seconds * rates.moved_bytes(num_blocks) / (num_blocks * rates.block_bytes)


def computing_s(work: Work, worker: WorkerSnapshot, missing: int) -> float:
    """Predicts the seconds of the prompt's last `missing` tokens there, with nothing queued."""
    return prefill_seconds(worker.rates, work.num_tokens, work.num_tokens - missing)


def cached_tokens(work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> int:
    """Returns the prompt's tokens in the worker's pool; a prompt cached whole recomputes its last
    token."""
    held = matches.get(worker.worker_id, 0) * work.block_size
    return held if held < work.num_tokens else max(0, work.num_tokens - 1)


def with_likely_rates(workers: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Gives a worker that has measured nothing the median prefill rate of the others."""
    if all(w.rates.measured for w in workers):
        return list(workers)
    likely = likely_rates(w.rates for w in workers)
    return [w if w.rates.measured else replace(w, rates=believed(w.rates, likely)) for w in workers]


def _missing_s(
    work: Work, worker: WorkerSnapshot, cached: int, producers: Sequence[WorkerSnapshot]
) -> float:
    """Seconds to have the missing blocks there: pulled from a producer, or computed.

    That a copy pushes out other blocks is not priced: twice the memory saves 1.5% of the computing
    of Mooncake's trace, so a token pushed out costs little next to one that is computed.
    """
    rates = worker.rates
    missing = work.num_tokens - cached
    computed_s = (1 + worker.num_waiting) * prefill_seconds(rates, work.num_tokens, cached)
    if not producers:
        return computed_s
    num_bytes = rates.moved_bytes(work.num_kept(missing) / work.block_size)
    ways = worker.pairs
    pulled_s = [way.seconds(num_bytes) for s in producers if (way := ways.get(s.worker_id))]
    return min(computed_s, min(pulled_s)) if pulled_s else PULL_PRICE * computed_s
