"""The score of proposals for the recorded tool loops, and the share of tokens inside repeats."""

from __future__ import annotations

import pytest

from benchmarks.engine.speculation import share_in_repeats
from benchmarks.engine.tool_loops import read_turns, replay
from tandem.models.tokenizer.tokenizer import Tokenizer
from tests.tiny_models import make_random_speaker


def test_tool_loops_take_fewer_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_random_speaker(tmp_path_factory.mktemp("speaker"))
    turns = read_turns(Tokenizer(folder.path))
    assert len(turns) == 160  # four turns of the assistant in each of forty loops
    num_tokens = sum(len(answer) - 1 for _, answer in turns)
    plain = replay(turns[:8], "off")
    assert plain.num_steps == plain.num_tokens
    assert plain.speed == pytest.approx(1.0)
    score = replay(turns, "auto")
    assert score.num_tokens == num_tokens
    assert score.num_steps + score.num_accepted == num_tokens
    assert score.num_tokens > 2.5 * score.num_steps
    assert score.speed > 1.5


def test_tokens_inside_repeats() -> None:
    assert share_in_repeats([1, 2, 3, 4, 5], [9, 2, 3, 4, 5, 6]) == pytest.approx(1 / 6)
    assert share_in_repeats([], [7] * 10) == pytest.approx(6 / 10)
    assert share_in_repeats([1, 2, 3], [4, 5, 6]) == 0
