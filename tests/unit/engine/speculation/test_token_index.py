"""Where the last tokens occurred before, compared with a search through the whole list."""

from __future__ import annotations

import random

import pytest

from tandem.engine.speculation import token_index
from tandem.engine.speculation.token_index import TokenIndex


def longest(tokens: list[int], least: int, most: int) -> tuple[int, int]:
    """The newest of the earlier occurrences with the most equal tokens."""
    best, best_length = 0, 0
    for end in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(most, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > best_length:
            best, best_length = end, length
    return (best, best_length) if best_length >= least else (0, 0)


@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("num_kinds", [2, 5, 1 << 30])
def test_finds_the_longest_occurrence(
    least: int, num_kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_index, "COMPARED_MAX", 10_000)
    rng = random.Random(least + num_kinds)
    index = TokenIndex(least)
    tokens: list[int] = []
    found = 0
    while len(tokens) < 1500:
        tokens += [rng.randrange(num_kinds) for _ in range(rng.choice((1, 1, 5, 200)))]
        start = rng.randrange(len(tokens))
        tokens += tokens[start : start + rng.randrange(20)]
        index.extend(tokens)
        assert index.find(tokens, 12) == longest(tokens, least, 12)
        found += index.find(tokens, 12) != (0, 0)
    assert found


def test_many_tokens_at_once_give_the_same_index_as_one_by_one() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(6) for _ in range(900)]
    at_once, singly = TokenIndex(3), TokenIndex(3)
    at_once.extend(tokens)
    for end in range(1, len(tokens) + 1):
        singly.extend(tokens[:end])
    assert at_once._before == singly._before
    for _ in range(50):
        tokens.append(rng.randrange(6))
        at_once.extend(tokens)
        singly.extend(tokens)
        assert at_once.find(tokens, 24) == singly.find(tokens, 24)


def test_compares_a_bounded_number_of_occurrences() -> None:
    tokens = [7, 8, 9, 1, 2, 3, *[1, 2, 3] * 100, 7, 8, 9, 1, 2, 3]
    index = TokenIndex(3)
    index.extend(tokens)
    assert index.find(tokens, 24)[1] < 6  # the oldest occurrence has 6 equal tokens
