"""Histograms of the requests that a worker served, under vLLM's names with `tandem_` before them.

Of a decode worker they are of whole requests, of a prefill worker of its leases: queue and prefill
time. A request that was moved counts at each worker for what it did there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram

if TYPE_CHECKING:
    from tandem.worker.decode.sequence import DecodeSequence
    from tandem.worker.prefill.leases import Lease

_FAST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TTFT_S = (*_FAST_S, 20, 40, 80, 160, 640)
_TPOT_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class RequestMetrics:
    """Seconds of requests and leases that are over, and the hits of this worker's own cache."""

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(
                f"tandem_{name}", help_text, list(labels), buckets=buckets, registry=registry
            )
            return made.labels(**labels)

        def counter(name: str, help_text: str) -> Counter:
            made = Counter(f"tandem_{name}", help_text, list(labels), registry=registry)
            return made.labels(**labels)

        self._ttft = histogram(
            "time_to_first_token_seconds", "From its submission here to its first token", _TTFT_S
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Until the engine had blocks for it", _TTFT_S
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "From the queue to the first token", _TTFT_S
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token to the last", _WHOLE_S
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From its submission here to its end", _WHOLE_S
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "Mean time between a request's tokens after its first",
            _TPOT_S,
        )
        self._lease = histogram("lease_seconds", "Of a Prefill stream, opened to ended", _WHOLE_S)
        self._queries = counter(
            "prefix_cache_queries", "Prompt tokens of requests that had their first token here"
        )
        self._hits = counter(
            "prefix_cache_hits", "Of those, the ones whose KV was cached here or at a peer"
        )

    def on_first_token(self, sequence: DecodeSequence) -> None:
        self._ttft.observe(sequence.first_token_at - sequence.submitted_at)
        self._queue.observe(sequence.timings.queue_ms / 1000)
        self._prefill.observe(sequence.timings.prefill_ms / 1000)
        self._queries.inc(sequence.spec.num_prompt_tokens)
        self._hits.inc(sequence.cached_tokens)

    def on_end(self, sequence: DecodeSequence, now: float) -> None:
        if not sequence.num_sent:
            return
        decode_s = now - sequence.first_token_at
        self._decode.observe(decode_s)
        self._e2e.observe(now - sequence.submitted_at)
        if sequence.num_sent > 1:
            self._tpot.observe(decode_s / (sequence.num_sent - 1))

    def on_lease_end(self, lease: Lease, now: float) -> None:
        self._lease.observe(now - lease.opened_at)
        if lease.admitted_at:
            self._queue.observe(lease.queue_s)
        if lease.prefilled_at:
            self._prefill.observe(lease.prefilled_at - lease.admitted_at)
