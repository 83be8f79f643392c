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
    metrics.requests_pending.inc(1)
    history.take(NOW + STEP_S, WorkerSums(num_running=7, num_waiting=2, num_pulls=3, num_leases=4))
    told = last(history)
    assert told["at"] == NOW + STEP_S
    assert (told["requests_per_s"], told["errors_per_s"], told["cancelled_per_s"]) == (5, 1, 2)
    assert (told["tokens_per_s"], told["pulled_mb_per_s"], told["moves_per_s"]) == (200, 10, 1)
    assert (told["running"], told["waiting"]) == (7, 6)
    assert (told["num_pulls"], told["num_leases"]) == (3, 4)


def test_percentiles_are_interpolated_in_the_buckets_of_the_last_step_alone() -> None:
    metrics = Metrics()
    for _ in range(1000):
        metrics.ttft_s.observe(30.0)  # long ago
    history = History(metrics)
    for _ in range(10):
        metrics.ttft_s.observe(0.05)  # in the bucket from 0.04 to 0.06
    history.take(NOW, WorkerSums())
    assert last(history)["ttft_p50_ms"] == 50
    assert last(history)["ttft_p95_ms"] == 59
    assert last(history)["itl_p50_ms"] is None
    metrics.itl_s.observe(1e9)  # above all bounds
    history.take(NOW + STEP_S, WorkerSums())
    assert last(history)["ttft_p50_ms"] is None
    assert last(history)["itl_p50_ms"] == 10_000


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
