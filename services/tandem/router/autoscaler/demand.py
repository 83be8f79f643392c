"""The autoscaler's observations: demand, latencies and the state of the pools. Does no I/O.

Each router reports its `Demand`, which consists of counters that only grow:
- The sum of the routers' counters is the demand on the cluster.
- The difference between two reports is the demand between them, even if a report in between is
  lost.

Latencies are counted in the buckets of a histogram, as multiples of the SLO limit. For example, a
TTFT of 0.45 s with a limit of 1 s is counted in the bucket 0.4 to 0.5.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from tandem.common.perf_model.rates import DecodeRate

# Upper edges of the latency buckets, as multiples of the SLO limit. A further bucket counts the
# latencies above the last edge.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
NO_COUNTS = (0,) * (len(EDGES) + 1)
Counts = tuple[int, ...]
_LATE = 50  # number of recent requests that `output_tokens_mean` averages, approximately


class Demand(msgspec.Struct, frozen=True):
    """Counters since a router started, or their sum over all routers."""

    num_requests: int = 0  # all requests, including refused ones
    # Seconds that one worker would need to prefill the uncached prompt tokens of all requests,
    # computed from the workers' measured rates.
    prefill_s: float = 0.0
    num_ended: int = 0
    output_tokens: int = 0  # output tokens of all ended requests
    ttft: Counts = NO_COUNTS  # number of first tokens in each latency bucket
    itl: Counts = NO_COUNTS  # number of tokens after the first in each latency bucket

    def plus(self, other: Demand) -> Demand:
        return self._with(other, 1)

    def since(self, earlier: Demand) -> Demand:
        """Returns the growth since `earlier`.

        A counter that is lower than in `earlier` shows that the router has restarted and counts
        from 0 again. In this case the whole current counts are the growth.
        """
        grown = self._with(earlier, -1)
        went_back = grown.num_requests < 0 or grown.num_ended < 0 or min(grown.ttft) < 0
        return self if went_back else grown

    def _with(self, other: Demand, sign: int) -> Demand:
        return Demand(
            self.num_requests + sign * other.num_requests,
            self.prefill_s + sign * other.prefill_s,
            self.num_ended + sign * other.num_ended,
            self.output_tokens + sign * other.output_tokens,
            tuple(a + sign * b for a, b in zip(self.ttft, other.ttft, strict=True)),
            tuple(a + sign * b for a, b in zip(self.itl, other.itl, strict=True)),
        )


class DemandMeter:
    """Counts the demand on one router, or in one simulation."""

    def __init__(self) -> None:
        # Mean number of output tokens of the last ended requests; 0 if no request has ended.
        self.output_tokens_mean = 0.0
        self._num_requests = self._num_ended = self._output_tokens = 0
        self._prefill_s = 0.0
        self._ttft = list(NO_COUNTS)
        self._itl = list(NO_COUNTS)

    def new_request(self, prefill_s: float) -> None:
        self._num_requests += 1
        self._prefill_s += prefill_s

    def first_token(self, share: float) -> None:
        """Counts a first token whose TTFT was `share` times the TTFT limit."""
        self._ttft[bisect_left(EDGES, share)] += 1

    def next_tokens(self, share: float, count: int = 1) -> None:
        """Counts tokens after the first whose latency was `share` times the ITL limit."""
        self._itl[bisect_left(EDGES, share)] += count

    def ended(self, output_tokens: int) -> None:
        self._num_ended += 1
        self._output_tokens += output_tokens
        late = 1 / min(self._num_ended, _LATE)
        self.output_tokens_mean += late * (output_tokens - self.output_tokens_mean)

    def demand(self) -> Demand:
        return Demand(
            self._num_requests,
            self._prefill_s,
            self._num_ended,
            self._output_tokens,
            tuple(self._ttft),
            tuple(self._itl),
        )


class PoolSeen(msgspec.Struct, frozen=True):
    """The current state of one pool."""

    wanted: int  # the configured number of workers, including workers that are starting
    num_ready: int
    queued_s: float = 0.0  # seconds that one worker would need to prefill all queued prompts
    num_waiting: int = 0  # number of sequences in the queues of all workers of the pool
    kv_use: float = 0.0  # used fraction of a worker's KV cache, 0 to 1; median over the workers
    # Number of sequences, KV pulls and leases that hold KV blocks, summed over the pool's workers.
    num_running: int = 0

    @property
    def is_idle(self) -> bool:
        """True if no worker of the pool has work."""
        return not (self.num_running or self.num_waiting or self.queued_s)


class Observation(msgspec.Struct, frozen=True):
    """Everything that the autoscaler observes at one moment.

    `now_s` is the time of any monotonic clock.
    """

    now_s: float
    demand: Demand
    prefill: PoolSeen
    decode: PoolSeen
    decode_rate: DecodeRate = DecodeRate()  # measured duration of decode steps by batch size
    num_held: int = 0  # requests that routers hold because a pool is empty


def quantile(counts: Counts, share: float) -> float:
    """Returns the `share` quantile of the latencies, as a multiple of the SLO limit.

    Example: the 0.9 quantile is 1.5 if 90% of the latencies are at most 1.5 times the limit. The
    result is the upper edge of a bucket, 16 for latencies above the last edge, and 0 if there are
    no latencies.
    """
    total = sum(counts)
    seen = 0
    for edge, count in zip(EDGES, counts, strict=False):
        seen += count
        if total and seen >= share * total:
            return edge
    return 2 * EDGES[-1] if total else 0.0
