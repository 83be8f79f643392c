"""The number of promised hits that must be missing before the watch reports it."""

from __future__ import annotations

from tandem.router.index.trust import EVIDENCE_TOKENS, REQUESTS_MIN, WINDOW_TOKENS, HitWatch


def test_a_worker_without_any_promised_hit_is_told_at_once_there_is_evidence() -> None:
    watch = HitWatch()
    answers = [watch.observe("w", 256, 0) for _ in range(4)]
    assert answers == [None, None, None, 0.0]
    assert EVIDENCE_TOKENS == 4 * 256
    # And then the window is a new one.
    assert watch.observe("w", 10_000, 0) is None


def test_few_requests_or_few_tokens_are_no_evidence() -> None:
    watch = HitWatch()
    for _ in range(REQUESTS_MIN - 1):
        assert watch.observe("long", 100_000, 0) is None
    for _ in range(15):
        assert watch.observe("short", 64, 0) is None


def test_half_of_the_promise_kept_is_enough() -> None:
    watch = HitWatch()
    for n in range(200):
        assert watch.observe("w", 160, 160 if n % 2 == 0 else 0) is None
    assert watch.observe("more", 160, 500) is None  # more than promised counts as promised


def test_a_good_past_does_not_hide_what_is_so_now() -> None:
    watch = HitWatch()
    for _ in range(1000):
        assert watch.observe("w", 512, 512) is None
    told = [watch.observe("w", 512, 0) for _ in range(2 * WINDOW_TOKENS // 512)]
    first = next(n for n, ratio in enumerate(told) if ratio is not None)
    assert first == WINDOW_TOKENS // 512 // 2


def test_no_promise_says_nothing_and_workers_are_apart() -> None:
    watch = HitWatch()
    for _ in range(100):
        assert watch.observe("none", 0, 0) is None
        assert watch.observe("good", 512, 512) is None
    assert [watch.observe("bad", 512, 0) for _ in range(4)][-1] == 0.0


def test_who_is_gone_is_forgotten() -> None:
    watch = HitWatch()
    for worker_id in ("here", "gone"):
        for _ in range(3):
            watch.observe(worker_id, 512, 0)
    watch.keep({"here"})
    assert watch.observe("gone", 512, 0) is None
    assert watch.observe("here", 512, 0) == 0.0
    for _ in range(3):
        watch.observe("here", 512, 0)
    watch.forget("here")
    assert watch.observe("here", 512, 0) is None
