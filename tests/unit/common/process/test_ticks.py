"""Sleeps until a tick end together, and about one interval after each other."""

import asyncio
import time

import pytest

from tandem.common.process.ticks import sleep_until_tick, until_tick_s


@pytest.mark.parametrize(
    ("now", "expected_s"), [(7.0, 1.0), (7.25, 0.75), (7.5, 0.5), (7.625, 1.375), (7.875, 1.125)]
)
def test_a_sleep_ends_at_a_tick(
    now: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert until_tick_s(1.0) == expected_s


@pytest.mark.parametrize(("now", "expected_s"), [(7.0, 1.25), (7.25, 1.0), (7.625, 0.625)])
def test_a_sleep_may_end_somewhat_after_a_tick(
    now: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert until_tick_s(1.0, after_s=0.25) == expected_s


async def test_sleeps_that_began_at_different_times_end_together() -> None:
    ends: list[float] = []

    async def sleep_after(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await sleep_until_tick(2.0)
        ends.append(time.monotonic())

    # All begin in the first half of an interval, so that all end at the same tick.
    await asyncio.sleep(until_tick_s(2.0))
    await asyncio.gather(*(sleep_after(0.1 * number) for number in range(5)))
    assert max(ends) - min(ends) < 0.15
