"""A worker's requests in its metrics and in their traces."""

from __future__ import annotations

from tandem.common.cached_tokens import CachedTokens
from tandem.common.sampling_params import SamplingParams
from tandem.common.speculation import Speculated, SpeculationStats
from tandem.common.worker_load import TierUse
from tandem.engine.types import (
    EngineStats,
    Mode,
    SequenceSpec,
    StepReport,
    TierStats,
)
from tandem.net.observability.traces import Attributes
from tandem.transfer.reads.messages import PullResult
from tandem.worker.decode.router_stream import RouterStream
from tandem.worker.decode.sequence import DecodeSequence, Submission
from tandem.worker.engine_process.messages import PullsSettled
from tandem.worker.kv_pulls.lease import PullStats
from tandem.worker.metrics.worker import (
    DAMAGE_S,
    TierDamage,
    WorkerMetrics,
    speculation_metrics,
)
from tandem.worker.prefill.leases import Lease


class KeptSpan:
    headers: dict[str, str] = {}
    trace_id = "t"

    def __init__(self) -> None:
        self.stages: list[tuple[str, float, float]] = []
        self.error: str | None = None

    def stage(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes | None = None
    ) -> None:
        if began_s and ended_s:
            self.stages.append((name, began_s, ended_s))

    def end(self, attributes: Attributes | None = None, *, error: str = "") -> None:
        self.error = error


def sequence() -> DecodeSequence:
    spec = SequenceSpec(
        "r#0", [1, 2, 3], 3, Mode.WAITING_FOR_REMOTE_KV, SamplingParams(temperature=0, max_tokens=4)
    )
    made = DecodeSequence(Submission("r", 0), spec, RouterStream(), span=KeptSpan())
    made.submitted_at = 10.0
    return made


def samples(metrics: WorkerMetrics, role: str = "decode") -> dict[str, float]:
    return {
        s.name: s.value
        for family in metrics.collect()
        for s in family.samples
        if s.labels == {"worker": "d0", "role": role}
    }


def test_a_remote_prefills_queue_is_queue_and_its_transfer_is_a_stage() -> None:
    made = sequence()
    metrics = WorkerMetrics(worker_id="d0", role="decode")
    made.admitted_at = 11.0
    made.shared_wait_s = 0.25
    made.pulled = PullStats(
        queue_s=0.5,
        shared_wait_s=0.125,
        tokens_ahead=700,
        began_at=12.0,
        prefilled_at=14.0,
        released_at=15.0,
    )
    made.cached = CachedTokens(device=1, disk=1)
    made.note_first_token(14.0)
    made.num_sent = 1
    metrics.requests.on_first_token(made)
    assert made.timings.queue_ms == 1500
    assert made.timings.shared_wait_ms == 375
    assert (made.timings.prefill_queue_ms, made.timings.tokens_ahead) == (500, 700)
    assert made.timings.prefill_ms == 2500
    made.note_second_token(17.0)
    made.num_sent = 3
    assert made.timings.second_token_ms == 3000
    metrics.requests.on_end(made, 20.0)
    made.end_span(20.0, "length")
    assert isinstance(made.span, KeptSpan)
    assert made.span.stages == [
        ("queue", 10.0, 11.0),
        ("prefill", 11.0, 14.0),
        ("transfer", 12.0, 15.0),
        ("first_decode", 15.0, 17.0),
        ("decode", 17.0, 20.0),
    ]
    found = samples(metrics)
    assert found["tandem_engine_time_to_first_token_seconds_sum"] == 4
    assert found["tandem_request_shared_wait_seconds_sum"] == 0.375
    assert found["tandem_request_queue_time_seconds_sum"] == 1.5
    assert found["tandem_engine_request_time_per_output_token_seconds_sum"] == 3
    assert found["tandem_request_decode_time_seconds_sum"] == 6
    assert found["tandem_engine_e2e_request_latency_seconds_sum"] == 10
    assert found["tandem_prefix_cache_queries_total"] == 3
    assert found["tandem_prefix_cache_hits_total"] == 2


def test_one_cancelled_in_the_queue_has_no_later_stages() -> None:
    made = sequence()
    metrics = WorkerMetrics(worker_id="d0", role="decode")
    made.end_span(12.0, "cancelled")
    metrics.requests.on_end(made, 12.0)
    assert isinstance(made.span, KeptSpan)
    assert (made.span.stages, made.span.error) == ([], "")
    assert samples(metrics)["tandem_engine_e2e_request_latency_seconds_count"] == 0


def test_one_that_failed_is_an_error_in_its_trace() -> None:
    made = sequence()
    made.end_span(12.0, "worker_lost")
    assert isinstance(made.span, KeptSpan)
    assert made.span.error == "worker_lost"


def test_a_lease_has_its_stages_at_the_producer() -> None:
    metrics = WorkerMetrics(worker_id="d0", role="prefill")
    lease = Lease("r#1", "d1", span=KeptSpan(), opened_at=1.0)
    lease.admitted_at = 2.0
    lease.prefilled_at = 5.0
    lease.end_span(6.0, "released")
    metrics.requests.on_lease_end(lease, 6.0)
    assert isinstance(lease.span, KeptSpan)
    assert [name for name, *_ in lease.span.stages] == ["queue", "prefill", "transfer"]
    found = samples(metrics, "prefill")
    assert found["tandem_lease_seconds_sum"] == 5
    assert found["tandem_request_queue_time_seconds_sum"] == 1
    assert found["tandem_request_prefill_time_seconds_sum"] == 3


def test_pulls_over_nixl_are_in_the_record() -> None:
    metrics = WorkerMetrics(worker_id="d0", role="decode")
    reasons = ("error", "deadline", "cancelled", "")  # a client that left is no failure
    failed = [PullResult("f", False, reason=reason) for reason in reasons]
    done = PullResult("d", True, 4096, 0.25, post_s=0.125, num_blocks=8)
    metrics.on_transfer(PullsSettled([done, *failed]))
    told = metrics.tally.counts.nixl
    assert told.num_failed == 3
    totals = [h.total for h in (told.seconds, told.post_s, told.num_bytes, told.num_blocks)]
    assert totals == [0.25, 0.125, 4096, 8]
    assert sum(told.seconds.buckets) == 1


def test_what_tiers_hold_is_in_the_record() -> None:
    metrics = WorkerMetrics(worker_id="d0", role="decode")
    assert metrics.tiers == ()
    tiers = [TierStats("host", 8, 8, 9, 0, 0, 0), TierStats("disk", 64, 5, 5, 0, 0, 0)]
    metrics.on_step(StepReport(stats=EngineStats(tiers=tiers)))
    assert metrics.tiers == (TierUse("host", 8, 8), TierUse("disk", 64, 5))


def test_blocks_of_tiers_that_could_not_be_read_are_told_of_for_a_while() -> None:
    now = 0.0
    damage = TierDamage(lambda: now)

    def found(num_disk: int, num_store: int = 0) -> tuple[int, int]:
        disk = TierStats("disk", 64, 5, 5, 0, num_disk, 0)
        damage.take([disk, TierStats("store", 64, 5, 5, 0, num_store, 0)])
        return damage.num_blocks("disk"), damage.num_blocks("store")

    assert found(7) == (0, 0)  # left out when the tier was opened
    assert found(8, 3) == (1, 0)
    now = DAMAGE_S - 1
    assert found(10) == (3, 0)
    now += DAMAGE_S - 1
    assert found(10) == (3, 0)
    now += 1
    assert found(10) == (0, 0)
    assert found(11) == (1, 0)


def test_a_lease_that_ends_before_it_is_read_has_expired() -> None:
    metrics = WorkerMetrics(worker_id="d0", role="prefill")
    for transport, is_ahead in (("nixl", True), ("nixl", False), ("grpc", True)):
        lease = Lease("r#1", "d1", transport, is_ahead=is_ahead, opened_at=1.0)
        metrics.requests.on_lease_end(lease, 6.0)
    assert metrics.tally.counts.nixl.num_expired == 1


def test_a_worker_that_changes_its_pool_changes_its_label() -> None:
    metrics = WorkerMetrics(worker_id="d0", role="decode")
    metrics.prefill_tokens.inc(3)
    metrics.role = "prefill"
    assert samples(metrics) == {}
    assert samples(metrics, "prefill")["tandem_prefill_tokens_total"] == 3


def test_speculation_is_counted_by_the_worker_and_told_with_a_request() -> None:
    metrics = WorkerMetrics(worker_id="d0", role="decode")
    metrics.on_step(StepReport(stats=EngineStats(speculation=SpeculationStats(2, 7, 4))))
    metrics.on_step(StepReport())
    found = speculation_metrics({"worker": "d0"}, metrics.tally.counts.speculation)
    values = {s.name: s.value for family in found for s in family.samples}
    assert values == {"tandem_proposed_tokens_total": 7, "tandem_accepted_tokens_total": 4}
    made = sequence()
    made.note_speculated(Speculated(7, 4, 0.5))
    assert made.timings.tokens_proposed == 7
    assert made.timings.tokens_accepted == 4
    assert made.timings.speculation_saved_ms == 500
