"""The latencies of the last minute."""

from __future__ import annotations

from tandem.router.metrics.latencies import P95_MIN, STEPS_KEPT, VALUES_MAX, Latencies, Latency


def test_nothing_is_known_without_a_value() -> None:
    latencies = Latencies()
    assert latencies.last_minute() == Latency()
    assert latencies.next_step() == Latency()


def test_each_figure_is_one_of_the_values() -> None:
    latencies = Latencies()
    for n in range(1, P95_MIN + 1):
        latencies.add(n / 10, is_late=n > 18)
    assert latencies.last_minute() == Latency(20, 1000.0, 1900.0, 2000.0, 2)


def test_few_values_have_no_percentile() -> None:
    latencies = Latencies()
    for _ in range(P95_MIN - 1):
        latencies.add(0.5)
    assert latencies.last_minute() == Latency(19, 500.0, None, 500.0, 0)


def test_a_minute_of_steps_is_kept() -> None:
    latencies = Latencies()
    latencies.add(9.0)
    assert latencies.open_step().max_ms == 9000
    assert latencies.next_step().max_ms == 9000
    assert latencies.open_step() == Latency()
    latencies.add(1.0)
    assert latencies.open_step().max_ms == 1000
    assert latencies.last_minute().number == 2
    for _ in range(STEPS_KEPT - 2):
        latencies.next_step()
    assert latencies.last_minute().max_ms == 9000
    latencies.next_step()
    assert latencies.last_minute() == Latency(1, 1000.0, None, 1000.0, 0)


def test_values_are_bounded_and_the_largest_is_exact() -> None:
    latencies = Latencies()
    latencies.add(7.0)
    for _ in range(10 * VALUES_MAX):
        latencies.add(0.1)
    found = latencies.last_minute()
    assert (found.number, found.median_ms, found.max_ms) == (10 * VALUES_MAX + 1, 100, 7000)
    assert len(latencies._steps[-1].values_s) == VALUES_MAX
