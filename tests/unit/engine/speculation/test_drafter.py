"""What a sequence proposes: repeated text, cut where the sequence ends or must stop."""

from __future__ import annotations

import random
from typing import Any

from tandem.common.perf_model.step_time import DraftPrice
from tandem.common.speculation import Speculation
from tandem.engine.speculation.acceptance import Acceptance, Source, kind_of
from tandem.engine.speculation.depth import num_worthwhile
from tandem.engine.speculation.drafter import Drafter
from tandem.engine.speculation.recent_answers import RecentAnswers, Tenant
from tests.engine_driver import make_spec

TEXT = [*range(20, 40)]


def make_drafter(
    shared: Acceptance | None = None,
    recent: RecentAnswers | None = None,
    factor: float | None = None,
    **more: Any,
) -> Drafter:
    setting = Speculation("suffix", tokens_max=6, match_min=3, match_max=24, factor=factor)
    spec = make_spec("a", TEXT, **{"max_tokens": 100} | more)
    return Drafter(setting, shared or Acceptance(), spec, 1000, recent)


def test_proposes_what_followed() -> None:
    drafter = make_drafter()
    assert drafter.propose(TEXT).token_ids == []
    assert drafter.propose([*TEXT, 25, 26]).token_ids == []
    proposal = drafter.propose([*TEXT, 25, 26, 27])
    assert proposal.token_ids == [28, 29, 30, 31, 32, 33]
    assert proposal.probabilities == sorted(proposal.probabilities, reverse=True)


def test_a_text_that_repeats_itself_is_continued() -> None:
    assert make_drafter().propose([*TEXT, 7, 8, 7, 8, 7, 8]).token_ids == [7, 8] * 3


def test_a_proposal_leaves_a_token_to_sample_and_has_no_stop_token() -> None:
    tokens = [*TEXT, 25, 26, 27]
    assert make_drafter(max_tokens=6).propose(tokens).token_ids == [28, 29]
    assert make_drafter(max_tokens=4).propose(tokens).token_ids == []
    assert make_drafter(stop_token_ids=[30]).propose(tokens).token_ids == [28, 29]


def test_a_factor_limits_the_tokens_for_each_equal_one() -> None:
    tokens = [*TEXT, 25, 26, 27]
    assert make_drafter(factor=1.4).propose(tokens).token_ids == [28, 29, 30, 31]
    assert make_drafter(factor=0.0).propose(tokens).token_ids == []


def test_takes_the_source_with_more_equal_tokens_and_then_the_more_accepted_one() -> None:
    recent = RecentAnswers(num_tokens=3, context=24, answers_max=10)
    tenant = Tenant(b"", "")
    recent.add(tenant, [24, 25, 26, 27, 70, 71], 1)
    recent.add(Tenant(b"other", ""), [23, 24, 25, 26, 27, 60, 61], 1)
    # Four tokens are equal in the answer, three in the prompt.
    longer = [*TEXT, 5, 24, 25, 26, 27]
    assert make_drafter(recent=recent).propose(longer).token_ids[:2] == [28, 29]
    recent.add(tenant, [3, 24, 25, 26, 27, 70, 71], 1)
    tokens = [*TEXT, 3, 24, 25, 26, 27]
    drafter = make_drafter(recent=recent)
    assert drafter.propose(tokens).token_ids == [70, 71]
    drafter.propose([*tokens, 70, 71])
    shared = Acceptance()
    shared.observe(kind_of(4, Source.RECENT), True)
    assert make_drafter(shared, recent).propose(longer).token_ids == [70, 71]
    for _ in range(9):
        shared.observe(kind_of(4, Source.RECENT), False)
    assert make_drafter(shared, recent).propose(longer).token_ids[:2] == [28, 29]


def test_acceptance_follows_the_tokens_that_came() -> None:
    """Also of proposals that no step has verified."""
    good, bad = make_drafter(), make_drafter()
    tokens = [*TEXT, 25, 26, 27]
    before = good.propose(tokens).probabilities[0]
    good.propose([*tokens, 28, 29])
    bad.propose(tokens)
    bad.propose([*tokens, 5, 6])
    assert bad.propose([*tokens, 5, 6, 25, 26, 27]).probabilities[0] < before
    assert good.propose([*tokens, 28, 29, 6, 25, 26, 27]).probabilities[0] > before


def test_a_new_sequence_starts_from_the_acceptance_of_the_others() -> None:
    shared = Acceptance()
    for _ in range(50):
        shared.observe(kind_of(3), False)
    assert Acceptance(shared).probability(kind_of(3)) < 0.1
    assert Acceptance(shared).probability(kind_of(8)) > 0.6
    own = Acceptance(shared)
    for _ in range(50):
        own.observe(kind_of(3), True)
    assert own.probability(kind_of(3)) > 0.8


def test_the_depth_follows_price_and_probability() -> None:
    def chosen(gains: list[float], num_sequences: int = 1, **more: float) -> int:
        price = DraftPrice(step_s=1.0, **{"fixed_s": 0.05, "token_s": 0.1} | more)
        return num_worthwhile(gains, num_sequences=num_sequences, price=price)

    assert chosen([0.9, 0.8, 0.7]) == 3
    assert chosen([0.9, 0.8, 0.7, 0.1]) == 3
    assert chosen([0.1, 0.01]) == 0
    assert chosen([0.9, 0.8, 0.7], token_s=1.0) == 0
    # Thirty sequences in a step: a token is worth less, relative to the step.
    assert chosen([0.9, 0.8, 0.7], num_sequences=30) == 0
    assert chosen([]) == 0
    # The step may take only so much longer.
    assert chosen([0.9, 0.8, 0.7], most_s=0.251) == 2
    assert chosen([0.9, 0.8, 0.7], most_s=0.1) == 0


def test_high_estimates_from_few_tokens_are_corrected() -> None:
    """Of many sequences that all copy 4 of 10 tokens, some copy several in a row at first."""
    rng = random.Random(5)
    shared = Acceptance()
    kind = kind_of(3)
    num_high = 0
    for number in range(400):
        own = Acceptance(shared)
        for _ in range(20):
            num_high += number > 100 and own.probability(kind) > 0.55
            own.observe(kind, rng.random() < 0.4)
    assert num_high < 20  # 429 are higher without the correction
    good = Acceptance(shared)
    for _ in range(60):
        good.observe(kind, True)
    assert good.probability(kind) > 0.8
