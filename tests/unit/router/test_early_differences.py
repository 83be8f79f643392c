from __future__ import annotations

import pytest

from tandem.router.request.early_differences import TOKENS_MAX, EarlyDifference, RecentPrompts

LONG = list(range(1000, 3000))


def with_counter(counter: int, at: int = 20) -> list[int]:
    return [*LONG[:at], counter, *LONG[at:]]


def compare(*prompts: list[int]) -> EarlyDifference | None:
    """Compares the last prompt with those before it, one a minute."""
    recent = RecentPrompts()
    found = None
    for number, prompt in enumerate(prompts):
        found = recent.compare(b"", prompt, 60.0 * number)
    return found


def test_says_from_which_token_on_a_prompt_differs() -> None:
    found = compare(with_counter(1), LONG[::-1], with_counter(2))
    assert found == EarlyDifference(20, 120.0)
    assert "differs from token 21 on from a prompt seen 2 minutes ago" in found.sentence


def test_a_difference_may_shift_the_rest() -> None:
    assert compare(with_counter(1), [*LONG[:20], 7, 8, 9, *LONG[20:]]) == EarlyDifference(20, 60.0)
    assert compare(LONG, [5, *LONG]) == EarlyDifference(0, 60.0)


def test_a_prompt_that_can_be_reused_has_no_early_difference() -> None:
    assert compare(LONG, LONG) is None
    assert compare(LONG, [*LONG, 1]) is None
    assert compare(with_counter(1), with_counter(2), with_counter(2)) is None
    assert compare(LONG, [*LONG[:1500], 1, *LONG[1500:]]) is None


def test_other_prompts_are_not_alike() -> None:
    assert compare(LONG, LONG[::-1]) is None
    assert compare(LONG, [*LONG[:20], *range(5000, 7000)]) is None
    assert compare(LONG[:100], with_counter(1)[:100]) is None  # too short to matter


def test_prompts_of_another_root_are_not_compared() -> None:
    recent = RecentPrompts()
    assert recent.compare(b"a", with_counter(1)) is None
    assert recent.compare(b"b", with_counter(2)) is None
    assert recent.compare(b"a", with_counter(3)) is not None


def test_only_the_first_tokens_of_a_long_prompt_are_kept() -> None:
    rest = list(range(10**5, 10**5 + 2 * TOKENS_MAX))
    assert compare([1, *rest], [2, *rest]) == EarlyDifference(0, 60.0)
    recent = RecentPrompts()
    for number in range(200):
        recent.compare(b"", [number, *rest])
    assert sum(len(seen.tokens) for seen in recent._seen) <= 64 * TOKENS_MAX * 4


@pytest.mark.parametrize(
    ("ago_s", "words"),
    [(0.2, "1 second"), (59.9, "59 seconds"), (60, "1 minute"), (7300, "2 hours")],
)
def test_times_in_words(ago_s: float, words: str) -> None:
    assert f" seen {words} ago." in EarlyDifference(3, ago_s).sentence
