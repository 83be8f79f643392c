"""Predicts the cost of a request on a worker in seconds, for placement. Does no I/O.

The cost of a decode worker is the sum of:
- the time to compute the prompts in the worker's queue
- some time for each running and each waiting sequence
- the expected wait for a running slot, if all slots are taken
- the time to obtain the KV of the prompt: loaded from a tier, pulled from a prefill worker or
  computed, whichever is fastest
- a penalty for each needed KV block that is not free

The cost of a prefill worker is the sum of:
- the time to compute the prompts in the worker's queue
- some time for each lease, which is KV that waits to be pulled
- the time to obtain the KV of the prompt, as for a decode worker

The time to compute a prompt is counted once for the request itself, and once for each request that
the prompt delays. The cost assumes that the prompt will delay as many requests as wait at the
worker now. Example: a prompt that takes 2 s costs 2 s on a worker where no sequence waits, and 8 s
on a worker where three sequences wait. So long prompts go to workers where no sequence waits.

The seconds follow from the workers' measured rates (`perf_model/predict.py`). A worker that has not
measured its rates gets the rates of the other workers. While no worker has measured its rates, all
workers get the same assumed rates, so only the ratios of the costs are meaningful.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tandem.common.adapter import Adapter
from tandem.common.kv_tiers import SHARED_TIERS
from tandem.common.perf_model.predict import (
    Holder,
    believed,
    beside_decode,
    expect,
    likely_rates,
    prefill_seconds,
    token_seconds,
)
from tandem.common.perf_model.rates import PairRate, TierRate, WorkerRates
from tandem.common.perf_model.soonest import Prompt, TierReach, choose_soonest, load_seconds
from tandem.common.worker_load import NO_LOAD, WorkerLoad
from tandem.prefix_index.holders import holder_of, source_of

# A worker's load adds to the cost of a request there. Each running sequence costs the time that it
# adds to 24 decode steps. Each waiting sequence costs the time to prefill 64 tokens, and each lease
# the time to prefill 32 tokens.
TOKENS_PER_RUNNING = 24.0
TOKENS_PER_WAITING = 64.0
TOKENS_PER_LEASE = 32.0
# Assumed seconds to pull KV, as a fraction of the seconds to compute it, until a pull was measured.
PULL_PRICE = 0.25
ADAPTER_READ_S = 0.05  # assumed seconds to read a LoRA adapter that is not in a worker's memory
# If a decode worker has too few free KV blocks for a request, each token without a block costs the
# time to prefill this many tokens: another sequence must be preempted and computed again.
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
    # Last reported load, plus the requests that the router has sent to the worker since.
    load: WorkerLoad = NO_LOAD
    rates: WorkerRates = field(default_factory=WorkerRates)
    # worker id of another worker -> measured rate at which this worker pulls KV blocks from there
    pairs: Mapping[str, PairRate] = field(default_factory=dict, hash=False)
    # Only workers with equal keys can exchange KV. Keys differ only during an upgrade.
    compatibility_key: bytes = b""
    # The worker's recent prefill work in weighted seconds, to be compared with that of other
    # workers (`shares.py`).
    prefill_share: float = 0.0
    adapters: frozenset[str] = frozenset()  # digests of the LoRA adapters in the worker's memory
    # Digests of the LoRA adapters that the worker recently failed to read from disk.
    adapters_failed: frozenset[str] = frozenset()
    lora_rank_max: int = 0  # largest rank of a LoRA adapter that the worker can load; 0: none
    keeps_deadlines: bool = False  # True: the worker refuses a request that misses its TTFT limit
    # Where a decode worker's prompts are prefilled. "remote": on a prefill worker. "local": on the
    # decode worker. "": the decode worker chooses for each prompt.
    prefill_at: str = ""
    # True: this is a prefill worker that also decodes requests whose prompts it prefills.
    decodes: bool = False

    @property
    def usable(self) -> bool:
        return self.state == "ready" and self.reachable

    @property
    def queue_s(self) -> float:
        """Seconds until the worker's queued prompts are computed."""
        return self.load.queue_s(self.rates)

    def can_run(self, work: "Work") -> bool:
        """Returns whether the worker has the request's LoRA adapter or may be able to load it.

        Returns True if the request uses no adapter.
        """
        adapter = work.adapter
        if adapter is None or adapter.digest in self.adapters:
            return True
        return adapter.rank <= self.lora_rank_max and adapter.digest not in self.adapters_failed


@dataclass(frozen=True, slots=True)
class Work:
    """The properties of a request that placement needs."""

    num_tokens: int  # number of prompt tokens (after a migration also the generated tokens)
    block_size: int = 16
    adapter: Adapter | None = None  # LoRA adapter; None: the request uses the base model
    # A worker keeps the KV of at most this many of the request's tokens. None: no limit.
    budget_tokens: int | None = None
    completion_tokens: float = 0.0  # expected number of output tokens; 0: unknown
    # True: the request is a turn of a session, so it prefers the decode worker that has the
    # session's KV.
    is_of_session: bool = False

    def num_kept(self, num_tokens: int) -> int:
        """Returns for how many of `num_tokens` tokens a worker keeps the KV."""
        return num_tokens if self.budget_tokens is None else min(num_tokens, self.budget_tokens)


class Reuse(msgspec.Struct, frozen=True):
    """How many leading tokens of a prompt a worker reuses, and how long loading their KV takes.

    KV in the block pool is usable at once. `load_s` is the number of seconds to load further KV
    from a tier; 0 if none is loaded.
    """

    num_tokens: int
    load_s: float = 0.0


class PrefixHolder(msgspec.Struct, frozen=True):
    """A worker from which others can pull a prompt's first `num_blocks` blocks.

    Before the pull, the worker loads the blocks that its pool lacks from its own tiers, which takes
    `load_s` seconds. 0: all blocks are in the pool.
    """

    worker: WorkerSnapshot
    num_blocks: int
    load_s: float = 0.0

    def num_tokens(self, work: Work) -> int:
        """Returns the number of the prompt's tokens in these blocks. The last token of the prompt
        does not count, because it is always computed."""
        return min(self.num_blocks * work.block_size, max(0, work.num_tokens - 1))


class PricedWorker(msgspec.Struct, frozen=True):
    """A worker, and the cost of one request there in seconds."""

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
    """Returns the cost of a request that decodes on the worker.

    More load never lowers the cost, and more cached blocks never raise the cost. `producers` are
    the ids of the prefill workers that may prefill the prompt. If `producers` is empty, the decode
    worker computes the missing tokens itself.
    """
    reused = reuse(work, worker, matches)
    # number of blocks, fractions included
    num_missing = work.num_kept(work.num_tokens - reused.num_tokens) / work.block_size
    rates = worker.rates
    load = worker.load
    cost_s = (
        load.queue_s(rates)
        + TOKENS_PER_RUNNING * rates.decode.sequence_s * load.num_others
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
    """Predicts the seconds until a decode worker has a running slot and KV blocks for a request.

    On a full worker, each running slot becomes free after `completion_tokens` decode steps.
    Example: 10 slots are taken by requests of 100 output tokens, and a decode step takes 0.02 s.
    Then a slot becomes free every 0.2 s, and a request behind 4 waiting sequences waits for 1 s.
    """
    load = decode.load
    num_there = load.num_slots_taken + load.num_waiting
    num_to_end = num_there + 1 - load.num_running_slots if load.num_running_slots else 0
    # `queued_tokens` counts the prompts of waiting sequences, which still need KV blocks. If no
    # sequence waits, it counts only prompts in computation, which have all their blocks already.
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
    held: Iterable[tuple[str, int, float]] = (),
) -> PricedWorker:
    """Returns the cost of a request whose prompt the worker prefills.

    More load never lowers the cost, and more cached blocks never raise the cost. `held` has other
    workers from which this worker may pull KV: (worker id, number of the prompt's tokens that are
    cached there, seconds to load them from a tier).
    """
    reused = reuse(work, worker, matches)
    cached = reused.num_tokens
    load = worker.load
    # A prefill worker may also decode (decode_at.py).
    rates = worker.rates
    if load.num_others:
        rates = beside_decode(rates, load.chunk_tokens, load.num_others)
    pairs = worker.pairs
    holders = [
        Holder(tokens, pair, load_s)
        for name, tokens, load_s in held
        if tokens > cached and (pair := pairs.get(name)) is not None
    ]
    expected = expect(
        rates,
        work.num_tokens,
        cached,
        queue_s=load.queue_s(worker.rates),
        holders=holders,
        block_size=work.block_size,
    )
    cost_s = expected.total_s + reused.load_s
    if work.adapter is not None:
        cost_s += _adapter_s(work.adapter, worker)
    if num_leases := load.num_leases:
        cost_s += num_leases * (TOKENS_PER_LEASE * token_seconds(rates) + expected.compute_s)
    return PricedWorker(worker, reused, cost_s)


def _adapter_s(adapter: Adapter, worker: WorkerSnapshot) -> float:
    """Returns the seconds until the request's adapter is in the worker's memory."""
    return 0.0 if adapter.digest in worker.adapters else ADAPTER_READ_S


def reuse(work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> Reuse:
    """Returns the tokens of the prompt that the worker has in its block pool or loads from a tier.

    Blocks are loaded from a tier only if that is faster than computing them. The worker's engine
    makes the same decision with the same code (`perf_model/soonest.py`).
    """
    held = cached_tokens(work, worker, matches)
    rates = worker.rates
    if not rates.tiers:
        return Reuse(held)
    in_pool = matches.get(worker.worker_id, 0)
    tiers = []
    for tier in rates.tiers:
        depth = matches.get(source_of(worker.worker_id, tier.name), 0)
        # The last token of a prompt is always computed, so the block of this token is not loaded.
        depth = min(depth, (work.num_tokens - 1) // work.block_size)
        if depth > in_pool:
            tiers.append(
                TierReach(depth, _load_s(rates, tier, depth - in_pool) / (depth - in_pool))
            )
    # Nothing is loaded if no tier has more blocks of the prompt than the block pool, or if the
    # block pool has the whole prompt (`cached_tokens` has then subtracted the last token).
    if not tiers or held < in_pool * work.block_size:
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


def loadable(work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> list[PrefixHolder]:
    """Returns what others can pull from a worker once it has loaded blocks from its own tiers: for
    each tier, the blocks of this tier and the faster ones, if they are more than those of the pool.

    Tiers that all workers share are left out, because each worker can load from them itself.
    """
    rates = worker.rates
    in_pool = deepest = matches.get(worker.worker_id, 0)
    found: list[PrefixHolder] = []
    tiers: list[TierReach] = []
    for tier in rates.tiers:
        depth = min(
            matches.get(holder_of(worker.worker_id, tier.name), 0),
            (work.num_tokens - 1) // work.block_size,
        )
        if tier.name in SHARED_TIERS or depth <= deepest:
            continue
        deepest = depth
        num_blocks = depth - in_pool
        tiers.append(TierReach(depth, _load_s(rates, tier, num_blocks) / num_blocks))
        load_s = rates.load_queue_s + load_seconds(tiers, in_pool, depth)
        found.append(PrefixHolder(worker, depth, load_s))
    return found


def _load_s(rates: WorkerRates, tier: TierRate, num_blocks: int) -> float:
    """Returns the seconds to load the last `num_blocks` blocks of a prefix from a tier.

    For a layer with sliding-window attention, only the blocks in the window are loaded.
    """
    seconds = tier.seconds(num_blocks, rates.block_bytes)
    if not rates.windows:
        return seconds
    return seconds * rates.moved_bytes(num_blocks) / (num_blocks * rates.block_bytes)


def computing_s(work: Work, worker: WorkerSnapshot, missing: int) -> float:
    """Predicts the seconds to compute the prompt's last `missing` tokens with an empty queue."""
    return prefill_seconds(worker.rates, work.num_tokens, work.num_tokens - missing)


def cached_tokens(work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> int:
    """Returns the number of the prompt's tokens that the worker has in its block pool.

    The last token of the prompt does not count, because it is always computed.
    """
    held = matches.get(worker.worker_id, 0) * work.block_size
    return held if held < work.num_tokens else max(0, work.num_tokens - 1)


def with_likely_rates(workers: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Returns the workers. Those without measured rates get the median rates of the others."""
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
    """Returns the seconds to obtain `num_missing` blocks, pulled from a producer or computed.

    The new blocks may evict cached blocks of other prompts, which costs nothing here. A replay of
    Mooncake's trace shows why: twice the memory for cached blocks saves only 1.5% of the prefill.
    """
    rates = worker.rates
    computed_s = (1 + worker.load.num_waiting) * prefill_seconds(rates, work.num_tokens, cached)
    if not producers:
        return computed_s
    num_bytes = rates.moved_bytes(num_missing)
    pairs = worker.pairs
    pulled_s = [pair.seconds(num_bytes) for name in producers if (pair := pairs.get(name))]
    return min(computed_s, min(pulled_s)) if pulled_s else PULL_PRICE * computed_s
