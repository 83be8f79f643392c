"""Counts of a worker's engine since the worker's start: plain data that is encoded by msgspec."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from tandem.common.cached_tokens import CachedTokens
from tandem.common.speculation import SpeculationStats

# Upper bounds of the buckets of a histogram of the tokens in a step, as in vLLM. The histogram also
# has a last bucket, for more than 16384 tokens.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Upper bounds of the buckets of histograms of pulls over NIXL:
# - PULL_S: seconds of a whole pull
# - POST_S: seconds that a pull spends in the calls of NIXL that start reads
# - PULL_BYTES, PULL_BLOCKS: bytes and blocks of a pull
PULL_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
POST_S = (0.001, *PULL_S)
PULL_BYTES = tuple(2**exponent for exponent in range(11, 34, 2))
PULL_BLOCKS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10_000, 20_000, 50_000)


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """A histogram: the sum of the observed values, and the number of values in each bucket."""

    total: float = 0.0
    buckets: tuple[int, ...] = ()  # one count for each bucket; the last bucket has no upper bound


class NixlCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of pulls over NIXL, which only grow. The producer counts `num_expired`, and the
    consumer counts everything else."""

    seconds: Observed = Observed()  # duration of each pull, with the bucket bounds PULL_S
    # Seconds that each pull spent in the calls of NIXL that start reads, with the bounds POST_S.
    post_s: Observed = Observed()
    num_bytes: Observed = Observed()  # bytes of each pull, with the bucket bounds PULL_BYTES
    num_blocks: Observed = Observed()  # blocks of each pull, with the bucket bounds PULL_BLOCKS
    num_failed: int = 0  # number of failed pulls; cancelled pulls do not count
    # Number of leases whose release the consumer sent but the producer did not confirm.
    num_unconfirmed: int = 0
    # Number of leases whose KV was computed completely, and which ended without a release.
    num_expired: int = 0


class EngineCounts(msgspec.Struct, frozen=True):
    """Counts that only grow. A prompt is counted by the worker that generates its completion, even
    if another worker prefilled it."""

    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_here: int = 0  # number of prompt tokens whose KV was cached in this worker's KV pool
    cached_elsewhere: int = 0  # number of prompt tokens whose KV came from a tier or a peer
    step_tokens: int = 0  # number of tokens that all steps together have computed
    # Number of steps in each bucket of the histogram with the bounds STEP_TOKENS.
    steps: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    nixl: NixlCounts = NixlCounts()
    speculation: SpeculationStats = msgspec.field(default_factory=SpeculationStats)


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
        self.speculation = SpeculationStats()

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
            speculation=self.speculation,
        )
