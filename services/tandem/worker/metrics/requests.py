"""Histograms of the requests that a worker served, under vLLM's names prefixed with `tandem_`.

A decode worker measures whole requests. A prefill worker measures the queue and prefill times of
its leases. A request that migrated counts on each of its workers, with the time it spent there.
"""

from collections.abc import Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry

from tandem.common.cached_tokens import CachedTokens
from tandem.common.engine_counts import EngineTally
from tandem.engine.types import SequenceSpec
from tandem.net.observability.metrics import E2E_S, ITL_S, TTFT_S, MetricSet, counter, histogram
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb


class ServedSequence(Protocol):
    """The measured fields of a decode worker's sequence. Times are monotonic seconds."""

    spec: SequenceSpec
    timings: pb.SequenceTimings
    cached: CachedTokens
    num_sent: int
    submitted_at: float
    first_token_at: float


class ServedLease(Protocol):
    """The measured fields of a prefill worker's lease. Times are monotonic seconds; 0 means not
    reached yet.
    """

    transport: str
    opened_at: float
    admitted_at: float
    shared_wait_s: float
    prefilled_at: float
    is_ahead: bool

    @property
    def queue_s(self) -> float: ...


class RequestMetrics(MetricSet):
    """Durations of ended requests and leases, and how many prompt tokens were cached."""

    _ttft = histogram(
        "tandem_engine_time_to_first_token_seconds",
        "Seconds from the submission to this worker to the first token",
        TTFT_S,
    )
    _queue = histogram(
        "tandem_request_queue_time_seconds",
        "Seconds until the engine had KV blocks for the request",
        TTFT_S,
    )
    _shared_wait = histogram(
        "tandem_request_shared_wait_seconds",
        "Part of the queue time, in seconds, for which a request waited for KV blocks that "
        "other requests computed",
        TTFT_S,
    )
    _prefill = histogram(
        "tandem_request_prefill_time_seconds",
        "Seconds from the end of the queue to the first token",
        TTFT_S,
    )
    _decode = histogram(
        "tandem_request_decode_time_seconds", "Seconds from the first token to the last", E2E_S
    )
    _e2e = histogram(
        "tandem_engine_e2e_request_latency_seconds",
        "Seconds from the submission to this worker to the end of the request",
        E2E_S,
    )
    _tpot = histogram(
        "tandem_engine_request_time_per_output_token_seconds",
        "Mean seconds between the tokens of a request after its first token",
        ITL_S,
    )
    _lease = histogram(
        "tandem_lease_seconds", "Duration of the leases that this worker served, in seconds", E2E_S
    )
    _queries = counter(
        "tandem_prefix_cache_queries",
        "Prompt tokens of the requests that had their first token on this worker",
    )
    _hits = counter(
        "tandem_prefix_cache_hits",
        "Prompt tokens of these requests whose KV was cached on this or another worker",
    )

    def __init__(
        self, registry: CollectorRegistry, common: Mapping[str, str], tally: EngineTally
    ) -> None:
        super().__init__(registry, common)
        self._tally = tally

    def on_first_token(self, sequence: ServedSequence) -> None:
        self._ttft.observe(sequence.first_token_at - sequence.submitted_at)
        self._queue.observe(sequence.timings.queue_ms / 1000)
        if sequence.timings.shared_wait_ms:
            self._shared_wait.observe(sequence.timings.shared_wait_ms / 1000)
        self._prefill.observe(sequence.timings.prefill_ms / 1000)
        self._queries.inc(sequence.spec.num_prompt_tokens)
        self._hits.inc(sequence.cached.total)
        self._tally.add_prompt(sequence.spec.num_prompt_tokens, sequence.cached)

    def on_end(self, sequence: ServedSequence, now: float) -> None:
        if not sequence.num_sent:
            return
        decode_s = now - sequence.first_token_at
        self._decode.observe(decode_s)
        self._e2e.observe(now - sequence.submitted_at)
        if sequence.num_sent > 1:
            self._tpot.observe(decode_s / (sequence.num_sent - 1))

    def on_lease_end(self, lease: ServedLease, now: float) -> None:
        self._lease.observe(now - lease.opened_at)
        if lease.admitted_at:
            self._queue.observe(lease.queue_s)
            if lease.shared_wait_s:
                self._shared_wait.observe(lease.shared_wait_s)
        if lease.prefilled_at:
            self._prefill.observe(lease.prefilled_at - lease.admitted_at)
        if lease.is_ahead and lease.transport != "grpc":
            self._tally.nixl.add_expired()
