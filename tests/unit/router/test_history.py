"""The 15 minutes of samples that the operators' page draws."""

from __future__ import annotations

import pytest

from tandem.router.metrics.history import COLUMNS, SAMPLES_MAX, STEP_S, History, WorkerSums
from tandem.router.metrics.router import Metrics

NOW = 1_000_000.0


def last(history: History) -> dict[str, float | None]:
    return dict(zip(COLUMNS, history.since(0)[-1], strict=True))


def test_a_sample_has_rates_since_the_one_before() -> None:
    metrics = Metrics()
    metrics.requests.labels(kind="chat", outcome="stop").inc(100)  # before the page was made
    history = History(metrics)
    history.take(NOW, WorkerSums())
    assert last(history)["requests_per_s"] == 0
    for outcome, number in (("stop", 6), ("length", 4), ("queue_full", 5), ("cancelled", 10)):
        metrics.requests.labels(kind="chat", outcome=outcome).inc(number)
    metrics.generation_tokens.inc(1000)
    metrics.pulled_bytes.inc(50_000_000)
    metrics.migrations.labels(reason="crash").inc(2)
    metrics.migrations.labels(reason="drain").inc(3)
    counts = {"num_decoding": 7, "num_in_prefill": 5, "num_queued": 2}
    history.take(NOW + STEP_S, WorkerSums(**counts, num_pulls=3, num_leases=4))
    told = last(history)
    assert told["at"] == NOW + STEP_S
    assert (told["requests_per_s"], told["errors_per_s"], told["cancelled_per_s"]) == (5, 1, 2)
    assert (told["tokens_per_s"], told["pulled_mb_per_s"], told["moves_per_s"]) == (200, 10, 1)
    assert (told["decoding"], told["in_prefill"], told["queued"]) == (7, 5, 2)
    assert (told["num_pulls"], told["num_leases"]) == (3, 4)


def test_latencies_are_real_values_of_the_last_step_alone() -> None:
    metrics = Metrics()
    history = History(metrics)
    metrics.on_first_token(30.0, 2.0)
    history.take(NOW, WorkerSums())
    for ttft_s in (0.31, 0.29, 11.8):
        metrics.on_first_token(ttft_s, 2.0)
    history.take(NOW + STEP_S, WorkerSums())
    told = last(history)
    assert (told["ttft_p50_ms"], told["ttft_max_ms"]) == (310, 11_800)
    assert (told["itl_p50_ms"], told["itl_p95_ms"]) == (None, None)
    metrics.on_next_tokens(0.05, 0.1, 3)
    history.take(NOW + 2 * STEP_S, WorkerSums())
    told = last(history)
    assert told["ttft_p50_ms"] is None
    assert (told["itl_p50_ms"], told["itl_p95_ms"]) == (50, None), "3 values have no percentile"


def test_reused_tokens_are_told_by_tier_and_the_rest_is_the_pools() -> None:
    metrics = Metrics()
    history = History(metrics)
    metrics.prompt_tokens.inc(1000)
    metrics.cached_tokens.inc(600)
    metrics.cached_by_tier.labels(tier="host").inc(200)
    metrics.cached_by_tier.labels(tier="device").inc(100)
    sums = WorkerSums(blocks_total=200, blocks_used=50, blocks_cached=100)
    history.take(NOW, sums)
    told = last(history)
    assert told["cached_share"] == 0.6
    assert (told["cached_device_per_s"], told["cached_host_per_s"]) == (80, 40)
    assert (told["kv_used_share"], told["kv_cached_share"]) == (0.25, 0.5)


def test_what_tiers_hold_is_told_by_tier_and_of_none_where_no_worker_has_it() -> None:
    history = History(Metrics())
    history.take(NOW, WorkerSums(held_shares={"host": 1.0, "disk": 0.123456, "other": 0.5}))
    told = last(history)
    shares = [told[f"kv_{tier}_share"] for tier in ("host", "disk", "store")]
    assert shares == [1.0, 0.1235, None]


def test_the_queues_of_the_last_minute_are_a_mean() -> None:
    history = History(Metrics())
    assert history.queued_s() == {}
    history.take(NOW, WorkerSums(queued_s={"prefill": 100.0}))
    for n in range(11):
        history.take(NOW + n, WorkerSums(queued_s={"prefill": 2.0 * (n % 2), "decode": 1.2}))
    assert history.queued_s() == pytest.approx({"prefill": 110 / 12, "decode": 1.1})
    history.take(NOW + 20, WorkerSums(queued_s={"prefill": 2.0, "decode": 1.2}))
    assert history.queued_s() == pytest.approx({"prefill": 1.0, "decode": 1.2})


def test_no_more_than_15_minutes_are_kept() -> None:
    history = History(Metrics())
    for n in range(SAMPLES_MAX + 20):
        history.take(NOW + n * STEP_S, WorkerSums())
    kept = history.since(0)
    assert len(kept) == SAMPLES_MAX
    assert kept[-1][0] == NOW + (SAMPLES_MAX + 19) * STEP_S
    assert [s[0] for s in history.since(history.num_taken - 2)] == [s[0] for s in kept[-2:]]
    assert history.since(history.num_taken) == []


@pytest.mark.parametrize("name", COLUMNS)
def test_every_column_has_a_value_or_none(name: str) -> None:
    history = History(Metrics())
    history.take(NOW, WorkerSums())
    assert name in last(history)
