"""A decode sequence's states."""

from __future__ import annotations

from itertools import product

import pytest

from tandem.common.cached_tokens import CachedTokens
from tandem.common.sampling_params import SamplingParams
from tandem.common.states import ForbiddenTransition
from tandem.engine.types import Mode, Reserved, SequenceSpec
from tandem.worker.decode.router_stream import RouterStream
from tandem.worker.decode.sequence import TRANSITIONS, DecodeSequence, SequenceState, Submission


@pytest.mark.parametrize(("state", "to"), list(product(SequenceState, SequenceState)))
def test_only_the_tables_transitions_are_allowed(state: SequenceState, to: SequenceState) -> None:
    spec = SequenceSpec(
        "r#0", [1, 2, 3], 3, Mode.WAITING_FOR_REMOTE_KV, SamplingParams(temperature=0, max_tokens=4)
    )
    sequence = DecodeSequence(Submission("r", 0), spec, RouterStream(), state=state)
    if to in TRANSITIONS[state]:
        sequence.to(to)
        assert sequence.state is to
        return
    with pytest.raises(ForbiddenTransition):
        sequence.to(to)
    assert sequence.state is state


def test_cached_tokens_here_are_counted_up_to_the_end_of_the_prompt() -> None:
    spec = SequenceSpec(
        "r#0", [1] * 40, 30, Mode.LOCAL, SamplingParams(temperature=0, max_tokens=40)
    )
    sequence = DecodeSequence(Submission("r", 0), spec, RouterStream())
    sequence.note_cached(Reserved("r#0", 32, [], CachedTokens(device=16, host=16)))
    assert sequence.cached == CachedTokens(device=16, host=14)
    # More came to the pool after the first admission.
    sequence.note_cached(Reserved("r#0", 32, [], CachedTokens(host=16)))
    assert sequence.cached == CachedTokens(device=14, host=16)


def test_every_state_can_end_and_nothing_comes_after_it() -> None:
    assert set(TRANSITIONS) == set(SequenceState)
    for state, ways in TRANSITIONS.items():
        assert (SequenceState.ENDED in ways) == (state is not SequenceState.ENDED)
    assert not TRANSITIONS[SequenceState.ENDED]
