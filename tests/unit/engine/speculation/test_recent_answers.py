"""What is found in the answers of other sequences, and what never is: text of another tenant."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from tandem.engine.speculation import recent_answers
from tandem.engine.speculation.recent_answers import RecentAnswers, Tenant

ONE, OTHER = Tenant(b"one", ""), Tenant(b"other", "")


def make(**more: int) -> RecentAnswers:
    return RecentAnswers(**{"num_tokens": 3, "context": 4, "answers_max": 5} | more)


def test_finds_what_followed_in_an_answer_and_after_the_end_of_its_prompt() -> None:
    recent = make()
    recent.add(ONE, [1, 2, 3, 4, 5, 6, 7, 8, 9], 6)
    assert recent.find(ONE, [6, 7, 8], 24)[1] == 3
    assert recent.after(recent.find(ONE, [6, 7, 8], 24)[0], 5) == [9]
    assert recent.after(recent.find(ONE, [0, 3, 4, 5, 6], 24)[0], 2) == [7, 8]
    assert recent.find(ONE, [1, 2, 3], 24) == (0, 0)  # too far before the answer
    assert recent.find(ONE, [8, 9], 24) == (0, 0)
    assert recent.find(OTHER, [6, 7, 8], 24) == (0, 0)
    assert recent.find(ONE._replace(adapter="a"), [6, 7, 8], 24) == (0, 0)
    recent.clear()
    assert recent.find(ONE, [6, 7, 8], 24) == (0, 0)
    assert recent.num_bytes == 0


def test_an_answer_without_two_tokens_is_not_kept() -> None:
    recent = make()
    recent.add(ONE, [1, 2, 3, 4, 5], 4)
    recent.add(ONE, [1, 2], 0)
    assert len(recent) == 0
    assert recent.num_bytes == 0


def longest(
    answers: Sequence[tuple[Tenant, list[int]]], tenant: Tenant, tokens: list[int], most: int
) -> tuple[int, list[int]]:
    """The number of equal tokens at the best occurrence, and what follows there."""
    best: tuple[int, list[int]] = (2, [])
    for owner, answer in answers:
        for end in range(1, len(answer) + 1) if owner == tenant else ():
            length = 0
            while (
                length < min(most, end, len(tokens))
                and answer[end - 1 - length] == tokens[-1 - length]
            ):
                length += 1
            if length >= best[0]:
                best = (length, answer[end:])
    return best if best[0] > 2 else (0, [])


@pytest.mark.parametrize("num_tenants", [1, 3, 40])
@pytest.mark.parametrize("num_kinds", [2, 4, 50])
def test_finds_the_longest_and_newest_of_the_tenant_only(
    num_tenants: int, num_kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a search through the last answers, while old ones are overwritten."""
    monkeypatch.setattr(recent_answers, "COMPARED_MAX", 10_000)
    rng = random.Random(num_tenants + num_kinds)
    recent = make(answers_max=12, tokens_max=256)
    kept: deque[tuple[Tenant, list[int]]] = deque()
    # Tenants with one salt and several adapters, and with several salts.
    tenants = [Tenant(b"%d" % (at % 4), str(at // 4)) for at in range(num_tenants)]
    # Each tenant has tokens of its own.
    first = {tenant: 1000 * at for at, tenant in enumerate(tenants)}
    found = 0
    for _ in range(300):
        tenant = rng.choice(tenants)
        num_prompt = rng.randrange(8)
        size = num_prompt + rng.choice((0, 1, 2, 9, 30, 200))
        tokens = [first[tenant] + rng.randrange(num_kinds) for _ in range(size)]
        recent.add(tenant, tokens, num_prompt)
        part = tokens[max(0, num_prompt - 4, size - 128) :]
        if size - num_prompt >= 2 and len(part) >= 3:
            kept.append((tenant, part))
        # Each answer ends with a separator.
        while len(kept) > 12 or sum(len(part) + 1 for _, part in kept) > 256:
            kept.popleft()
        assert len(recent) == len(kept)
        for asking in rng.sample(tenants, min(3, num_tenants)):
            # What is asked for may be another tenant's text.
            source = rng.choice(kept)[1] if kept and rng.random() < 0.5 else []
            base = first[asking]
            tail = [base + rng.randrange(num_kinds) for _ in range(3)]
            last = [*source[:9]] or [*tail, *tail]
            position, length = recent.find(asking, last, 8)
            assert (length, recent.after(position, 300) if position else []) == longest(
                kept, asking, last, 8
            )
            found += bool(position)
            if position:
                assert all(t // 1000 * 1000 == base for t in recent.after(position, 300))
    assert found
