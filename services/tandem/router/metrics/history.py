"""Keeps samples of a router's metrics of the last 15 minutes, for the operators' page. No I/O.

A sample is taken every `STEP_S` seconds. Each sample has two kinds of values:
- rates and latencies since the previous sample, from the router's counters and `latencies.py`
- sums over the workers that are ready, at the time of the sample
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter

from tandem.common.kv_tiers import KV_TIERS
from tandem.common.worker_load import held_shares
from tandem.net.store.traffic import Traffic
from tandem.router.metrics.latencies import STEPS_KEPT

if TYPE_CHECKING:
    from tandem.router.workers.known_worker import KnownWorker

STEP_S = 5.0
SAMPLES_MAX = 180  # number of samples in 15 minutes
_WELL = ("stop", "length")
_NO_ERRORS = (*_WELL, "cancelled")
_KV_TIERS = tuple(tier.name for tier in KV_TIERS)
_TIERS = (*_KV_TIERS, "peer")
# The columns of a sample. A column named `..._share` is a fraction, 0 to 1. A value is None if it
# cannot be measured, such as a TTFT without requests or the use of a tier that no worker has.
COLUMNS = (
    "at",  # time of the sample, in seconds since 1970
    *("requests_per_s", "errors_per_s", "cancelled_per_s"),
    *("decoding", "in_prefill", "queued"),  # as in `WorkerSums`
    *("ttft_p50_ms", "ttft_max_ms", "itl_p50_ms", "itl_p95_ms", "tokens_per_s"),
    *("cached_share", "cached_device_per_s", *(f"cached_{tier}_per_s" for tier in _TIERS)),
    *("kv_used_share", "kv_cached_share", *(f"kv_{tier}_share" for tier in _KV_TIERS)),
    *("pulled_mb_per_s", "num_pulls", "num_leases", "moves_per_s"),
)
Sample = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class WorkerSums:
    """Counts of blocks, pulls and leases, summed over all workers, and of open requests.

    An open request is in one of three numbers. A completion counts as a request of its own.
    """

    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    num_decoding: int = 0
    num_in_prefill: int = 0  # its prompt is being computed, or the KV of its prompt is on its way
    num_queued: int = 0  # in this router, or in the queue of a decode worker
    num_pulls: int = 0  # number of sequences that await the KV of their prompt
    num_leases: int = 0
    # name of a KV tier -> used fraction of the tier's capacity, 0 to 1
    held_shares: Mapping[str, float] = field(default_factory=dict)
    # role -> seconds that the queued prompts of a worker take, on average
    queued_s: Mapping[str, float] = field(default_factory=dict)


def sums_of(workers: Iterable[KnownWorker], num_in_router: int) -> WorkerSums:
    """Adds up the loads of the workers. `num_in_router` is `RequestLog.num_in_router`."""
    workers = list(workers)
    loads = [worker.load for worker in workers]
    # Most prompts at a prefill worker belong to requests that a decode worker counts.
    decode = [worker for worker in workers if worker.record.role == "decode"]
    queued_s: dict[str, list[float]] = {}
    for worker, load in zip(workers, loads, strict=True):
        queued_s.setdefault(worker.record.role, []).append(load.queue_s(worker.record.rates))
    return WorkerSums(
        blocks_total=sum(load.blocks_total for load in loads),
        blocks_used=sum(load.blocks_used for load in loads),
        blocks_cached=sum(load.blocks_cached for load in loads),
        num_decoding=sum(w.load.num_decoding for w in workers if w.record.has_kv),
        num_in_prefill=sum(worker.load.num_in_prefill for worker in decode),
        num_queued=sum(worker.num_queued for worker in decode) + num_in_router,
        num_pulls=sum(load.num_pulls for load in loads),
        num_leases=sum(load.num_leases for load in loads),
        held_shares=held_shares(worker.record.tiers for worker in workers),
        queued_s={role: fmean(found) for role, found in queued_s.items()},
    )


class History:
    """The samples of one router. The argument `metrics` has the attributes of `Metrics`."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._queued_s: deque[Mapping[str, float]] = deque(maxlen=STEPS_KEPT)
        self._before = self._read()
        self._before_at: float | None = None
        self.num_taken = 0

    def take(self, now: float, sums: WorkerSums) -> None:
        """Takes a sample. `now` is in seconds since 1970."""
        read = self._read()
        elapsed_s = STEP_S if self._before_at is None else max(0.001, now - self._before_at)
        self._samples.append(self._sample(now, elapsed_s, self._before, read, sums))
        self._queued_s.append(sums.queued_s)
        self._before = read
        self._before_at = now
        self.num_taken += 1

    def traffic(self, num_in_router: int) -> Traffic:
        """Returns the router's totals since its start, as of the last sample, with the current
        `RequestLog.num_in_router`."""
        read = self._before
        return Traffic(
            num_requests=round(sum(read.outcomes.values())),
            prompt_tokens=round(read.prompt),
            cached_tokens=round(read.cached),
            output_tokens=round(read.tokens),
            num_in_router=num_in_router,
        )

    def queued_s(self) -> dict[str, float]:
        """Returns role -> seconds that the queued prompts of a worker took, as the mean of the last
        minute's samples."""
        roles = {role for sample in self._queued_s for role in sample}
        return {role: fmean(s.get(role, 0.0) for s in self._queued_s) for role in roles}

    def since(self, num_taken: int) -> list[Sample]:
        """Returns the samples that were taken after the first `num_taken` samples.

        Samples older than 15 minutes are missing.
        """
        new = min(self.num_taken - num_taken, len(self._samples))
        return list(self._samples)[len(self._samples) - new :] if new > 0 else []

    def _read(self) -> _Reading:
        metrics = self._metrics
        outcomes: dict[str, float] = {}
        for labels, value in _counts(metrics.requests):
            outcomes[labels["outcome"]] = outcomes.get(labels["outcome"], 0.0) + value
        return _Reading(
            outcomes=outcomes,
            tokens=_total(metrics.generation_tokens),
            prompt=_total(metrics.prompt_tokens),
            cached=_total(metrics.cached_tokens),
            tiers={labels["tier"]: value for labels, value in _counts(metrics.cached_by_tier)},
            pulled_bytes=_total(metrics.pulled_bytes),
            moves=_total(metrics.migrations),
        )

    def _sample(
        self, now: float, elapsed_s: float, before: _Reading, read: _Reading, sums: WorkerSums
    ) -> Sample:
        def rate(value: Callable[[_Reading], float]) -> float:
            return round(max(0.0, value(read) - value(before)) / elapsed_s, 3)

        def of_tier(tier: str) -> float:
            return rate(lambda r: r.tiers.get(tier, 0.0))

        first = self._metrics.first_tokens.next_step()
        following = self._metrics.next_tokens.next_step()
        prompt = read.prompt - before.prompt
        total = sums.blocks_total
        by_tier = [of_tier(tier) for tier in _TIERS]
        return (
            round(now, 1),
            rate(lambda r: sum(r.outcomes.values())),
            rate(lambda r: sum(n for o, n in r.outcomes.items() if o not in _NO_ERRORS)),
            rate(lambda r: r.outcomes.get("cancelled", 0.0)),
            *(sums.num_decoding, sums.num_in_prefill, sums.num_queued),
            *(first.median_ms, first.max_ms, following.median_ms, following.p95_ms),
            rate(lambda r: r.tokens),
            round((read.cached - before.cached) / prompt, 4) if prompt > 0 else None,
            round(max(0.0, rate(lambda r: r.cached) - sum(by_tier)), 3),
            *by_tier,
            round(sums.blocks_used / total, 4) if total else None,
            round(sums.blocks_cached / total, 4) if total else None,
            *(_rounded(sums.held_shares.get(tier)) for tier in _KV_TIERS),
            round(rate(lambda r: r.pulled_bytes) / 1e6, 3),
            sums.num_pulls,
            sums.num_leases,
            rate(lambda r: r.moves),
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """Cumulative values of the router's counters and histograms at one moment. No value is smaller
    in a later reading."""

    outcomes: dict[str, float]
    tokens: float
    prompt: float
    cached: float
    tiers: dict[str, float]
    pulled_bytes: float
    moves: float


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _counts(metric: Counter) -> Iterable[tuple[dict[str, str], float]]:
    for family in metric.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield sample.labels, sample.value


def _total(metric: Any) -> float:
    return sum(value for _, value in _counts(metric))
