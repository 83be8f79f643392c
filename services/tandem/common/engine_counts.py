"""Counts of a worker's engine since the worker's start: plain data that is encoded by msgspec."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from tandem.common.cached_tokens import CachedTokens

# Upper bounds of the buckets for tokens per step, as in vLLM. One more bucket follows without a
# bound.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Upper bounds of the buckets for pulls over NIXL: seconds of a whole pull (PULL_S), seconds in
# NIXL's calls that start its reads (POST_S), bytes of a pull, blocks of a pull.
PULL_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
POST_S = (0.001, *PULL_S)
PULL_BYTES = tuple(2**exponent for exponent in range(11, 34, 2))
PULL_BLOCKS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10_000, 20_000, 50_000)


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """A histogram: the sum of the observations and the number in each bucket."""

    total: float = 0.0
    buckets: tuple[int, ...] = ()  # one count for each bucket; the last bucket has no upper bound


class NixlCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of pulls over NIXL, which only grow. The producer counts `num_expired`, and the
    consumer counts everything else."""

    seconds: Observed = Observed()  # durations of whole pulls, in the buckets of PULL_S
    # seconds that each pull spent in NIXL's calls that start reads, in the buckets of POST_S
    post_s: Observed = Observed()
    num_bytes: Observed = Observed()  # bytes of each pull, in the buckets of PULL_BYTES
    num_blocks: Observed = Observed()  # blocks of each pull, in the buckets of PULL_BLOCKS
    num_failed: int = 0  # number of failed pulls, without cancelled pulls
    num_unconfirmed: int = 0  # number of leases for which `release` was sent and not confirmed
    # number of leases that ended without a release after their KV was complete
    num_expired: int = 0


class EngineCounts(msgspec.Struct, frozen=True):
    """Counts that only grow. Each prompt counts on the worker that generates its tokens."""

    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_here: int = 0  # number of prompt tokens whose KV was in the worker's pool
    cached_elsewhere: int = 0  # number of prompt tokens whose KV a tier or a peer had
    step_tokens: int = 0  # total number of tokens in all steps
    # number of steps in each bucket of STEP_TOKENS
    steps: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    nixl: NixlCounts = NixlCounts()


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._total = 0.0
        self._buckets = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._total += value
        self._buckets[bisect_left(self._bounds, value)] += 1

    @property
    def observed(self) -> Observed:
        return Observed(self._total, tuple(self._buckets))


class NixlTally:
    """Counts pulls over NIXL for a worker's record."""

    def __init__(self) -> None:
        self._seconds = _Histogram(PULL_S)
        self._post_s = _Histogram(POST_S)
        self._num_bytes = _Histogram(PULL_BYTES)
        self._num_blocks = _Histogram(PULL_BLOCKS)
        self._num_failed = self._num_unconfirmed = self._num_expired = 0

    def add_pull(self, *, seconds: float, post_s: float, num_bytes: int, num_blocks: int) -> None:
        self._seconds.observe(seconds)
        self._post_s.observe(post_s)
        self._num_bytes.observe(num_bytes)
        self._num_blocks.observe(num_blocks)

    def add_failed(self) -> None:
        self._num_failed += 1

    def add_unconfirmed(self) -> None:
        self._num_unconfirmed += 1

    def add_expired(self) -> None:
        self._num_expired += 1

    @property
    def counts(self) -> NixlCounts:
        """The counts so far."""
        return NixlCounts(
            seconds=self._seconds.observed,
            post_s=self._post_s.observed,
            num_bytes=self._num_bytes.observed,
            num_blocks=self._num_blocks.observed,
            num_failed=self._num_failed,
            num_unconfirmed=self._num_unconfirmed,
            num_expired=self._num_expired,
        )


class EngineTally:
    """Counts the work of an engine for a worker's record."""

    def __init__(self) -> None:
        self._num_preemptions = 0
        self._prompt_tokens = 0
        self._cached = CachedTokens()
        self._step_tokens = 0
        self._steps = [0] * (len(STEP_TOKENS) + 1)
        self.nixl = NixlTally()

    def add_step(self, num_tokens: int) -> None:
        self._step_tokens += num_tokens
        self._steps[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def add_prompt(self, num_tokens: int, cached: CachedTokens) -> None:
        self._prompt_tokens += num_tokens
        self._cached += cached

    def add_preemptions(self, num_preemptions: int) -> None:
        self._num_preemptions += num_preemptions

    @property
    def counts(self) -> EngineCounts:
        """The counts so far."""
        return EngineCounts(
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_here=self._cached.device,
            cached_elsewhere=self._cached.total - self._cached.device,
            step_tokens=self._step_tokens,
            steps=tuple(self._steps),
            nixl=self.nixl.counts,
        )
