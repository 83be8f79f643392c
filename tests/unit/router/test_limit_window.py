"""The sliding minute: nobody exceeds a limit in any 60 s, and what was used comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import RateLimited
from tandem.net.security.limits import NO_LIMITS, Limits
from tandem.router.limits.status import Standing, duration, limit_headers, refusal
from tandem.router.limits.window import (
    BUCKET_MS,
    WINDOW_MS,
    Share,
    Use,
    Window,
    bucket_of,
    exceeded,
    share_of,
    window_of,
)

MINUTE_MS = 60_000
LIMITS = Limits(requests_per_minute=20, tokens_per_minute=1000)
arrivals = st.lists(
    st.tuples(st.integers(0, 5_000), st.integers(1, 1000), st.floats(0, 1)), max_size=150
)


@given(arrivals, st.integers(0, 5_000))
def test_no_minute_holds_more_than_the_limit(
    wanted: list[tuple[int, int, float]], start_ms: int
) -> None:
    """Whatever came and was given back, at whatever offset from the buckets."""
    window = Window()
    now_ms = start_ms
    admitted = []
    for gap_ms, tokens, part in wanted:
        now_ms += gap_ms
        window.forget(now_ms)
        if exceeded(LIMITS, window.use(), tokens) is None:
            window.add(bucket_of(now_ms), 1, tokens)
            taken = max(1, int(tokens * part))
            window.add(bucket_of(now_ms), 0, taken - tokens)
            admitted.append((now_ms, taken))
    for began_ms, _ in admitted:
        minute = [t for at_ms, t in admitted if began_ms <= at_ms < began_ms + MINUTE_MS]
        assert len(minute) <= LIMITS.requests_per_minute
        assert sum(minute) <= LIMITS.tokens_per_minute


@given(arrivals)
def test_what_was_used_is_free_after_a_window_and_not_before_a_minute(
    wanted: list[tuple[int, int, float]],
) -> None:
    window = Window()
    now_ms = 0
    for gap_ms, tokens, _ in wanted:
        now_ms += gap_ms
        window.add(bucket_of(now_ms), 1, tokens)
    used = window.use()
    for kind, count in (("requests", used.requests), ("tokens", used.tokens)):
        if count:
            free_ms = window.frees_at_ms(kind, count)  # type: ignore[arg-type]
            assert MINUTE_MS < free_ms - now_ms <= WINDOW_MS
            later = window_of(window.flat())
            later.forget(free_ms - 1)
            assert later.use() != Use()
            later.forget(free_ms)
            assert later.use() == Use()


def test_a_clock_that_is_set_back_does_not_lock_a_tenant_out() -> None:
    window = Window({1000: [5, 50], 3700: [20, 1000]})
    window.forget(1000 * BUCKET_MS)
    assert window.use() == Use(5, 50)


def test_what_is_given_back_twice_or_too_late_frees_nothing() -> None:
    window = Window()
    window.add(5, 1, 100)
    window.add(5, 0, -60)
    assert window.use() == Use(1, 40)
    window.forget((5 + 61) * BUCKET_MS)
    window.add(5, -1, -40)
    assert window.use() == Use()


@given(st.lists(st.integers(0, 50), min_size=2, max_size=5))
def test_the_shares_of_all_routers_are_one(requests: list[int]) -> None:
    uses = [Use(n, 10 * n) for n in requests]
    total = Use(sum(requests), 10 * sum(requests))
    shares = [
        share_of(own, Use(total.requests - own.requests, total.tokens - own.tokens)) for own in uses
    ]
    if not total.requests:
        assert shares == [None] * len(uses)
    else:
        assert sum(share.requests for share in shares if share) == pytest.approx(1)
        assert sum(share.tokens for share in shares if share) == pytest.approx(1)


@pytest.mark.parametrize(
    ("limits", "use", "share", "kind"),
    [
        (NO_LIMITS, Use(10**9, 10**9, 10**9), Share(), None),
        (LIMITS, Use(19, 0), Share(), None),
        (LIMITS, Use(20, 0), Share(), "requests"),
        (LIMITS, Use(0, 900), Share(), None),
        (LIMITS, Use(0, 901), Share(), "tokens"),
        (LIMITS, Use(10, 0), Share(0.5, 0.5), "requests"),
        (LIMITS, Use(0, 401), Share(0.5, 0.5), "tokens"),
        (Limits(max_concurrent=2), Use(9, 9, 1), Share(), None),
        (Limits(max_concurrent=2), Use(9, 9, 2), Share(), "concurrent"),
        (Limits(max_concurrent=1), Use(9, 9, 0), Share(0.1, 0.1), None),
        (Limits(max_concurrent=1), Use(9, 9, 0), Share(0.0, 0.0), "concurrent"),
    ],
)
def test_which_limit_is_exceeded(limits: Limits, use: Use, share: Share, kind: str | None) -> None:
    assert exceeded(limits, use, 100, share) == kind


def test_a_refusal_says_when_to_come_again_and_what_is_left() -> None:
    window = Window({100: [15, 700], 130: [5, 300]})
    standing = Standing(LIMITS, window, 3, 140_500)
    error = refusal("tokens", standing, 500)
    assert isinstance(error, RateLimited)
    assert error.message == (
        "the limit of 1000 tokens per minute is reached: 1000 used, and this request needs 500; "
        "try again in 21 s"
    )
    assert error.retry_after_s == 20.5  # bucket 100 is gone at 161 s
    assert error.headers == limit_headers(standing)
    assert error.headers == {
        "x-ratelimit-limit-requests": "20",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "51s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "51s",
    }
    assert refusal("tokens", standing, 800).retry_after_s == 50.5


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0s"), (-5, "0s"), (120, "120ms"), (1000, "1s"), (59_001, "1m0s"), (360_000, "6m0s")],
)
def test_durations_have_openais_form(ms: float, text: str) -> None:
    assert duration(ms) == text
