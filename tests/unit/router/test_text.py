from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.parsers.formats import REASONING_TAGS, TOOL_FORMATS
from tandem.router.parsers.model_format import make_answer_parser
from tandem.router.request.text import Piece, TextStream

EOS = 2


@cache
def load() -> Tokenizer:
    return Tokenizer(resolve("smollm2").path)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return load()


def run(stream: TextStream, token_ids: list[int], step: int, reason: str) -> list[Piece]:
    """Pushes `step` tokens at a time until the stream ends."""
    pieces = []
    for start in range(0, len(token_ids), step):
        last = start + step >= len(token_ids)
        pieces.append(stream.push(token_ids[start : start + step], reason if last else ""))
        if pieces[-1].finish_reason:
            break
    return pieces


@given(st.text(min_size=1, max_size=40), st.integers(1, 5))
def test_text_is_whole_however_it_is_cut(text: str, step: int) -> None:
    tokenizer = load()
    ids = tokenizer.encode(text)
    for stop in ((), ("never in it \x00",)):
        pieces = run(TextStream(tokenizer, stop), [*ids, EOS], step, "stop")
        assert "".join(p.text for p in pieces) == tokenizer.decode(ids)
        assert [i for p in pieces for i in p.token_ids] == [*ids, EOS]
        assert pieces[-1].finish_reason == "stop"


@pytest.mark.parametrize("step", [1, 2, 100])
def test_tokens_after_a_stop_string_do_not_count(tokenizer: Tokenizer, step: int) -> None:
    ids = tokenizer.encode("one two three four five")
    pieces = run(TextStream(tokenizer, ["thr"]), ids, step, "length")
    assert "".join(p.text for p in pieces) == "one two "
    assert [i for p in pieces for i in p.token_ids] == tokenizer.encode("one two three")
    assert pieces[-1].finish_reason == "stop"


@pytest.mark.parametrize("step", [3, 100])
def test_tokens_after_the_only_call_do_not_count(tokenizer: Tokenizer, step: int) -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    ids = tokenizer.encode(call + " more text")

    def read(step: int) -> tuple[list[int], list[str]]:
        parser = make_answer_parser(
            TOOL_FORMATS["hermes"], REASONING_TAGS["none"], schemas={"now": {}}, one_call_only=True
        )
        pieces = run(TextStream(tokenizer, (), parser), [*ids, EOS], step, "stop")
        assert pieces[-1].finish_reason == "tool_calls"
        calls = [call for piece in pieces for call in piece.tool_calls]
        assert "".join(call.arguments for call in calls) == "{}"
        return [i for p in pieces for i in p.token_ids], [call.name for call in calls if call.name]

    one_by_one = read(1)
    assert len(one_by_one[0]) < len(ids)
    assert read(step) == one_by_one


def test_a_held_back_beginning_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    pieces = run(TextStream(tokenizer, [" two!"]), tokenizer.encode("one two"), 1, "length")
    assert [p.text for p in pieces] == ["one", " two"]
    assert pieces[-1].finish_reason == "length"


def test_the_token_that_stopped_counts_and_is_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two")
    piece = TextStream(tokenizer, []).push(ids, "stop")
    assert (piece.text, piece.token_ids) == ("one", ids)


def test_half_a_character_is_never_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    stream = TextStream(tokenizer, [])
    assert [stream.push([i], "").text for i in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert TextStream(tokenizer, []).push(ids[:-1], "length").text == ""
    assert TextStream(tokenizer, ["x"]).push(ids[:-1], "length").text == ""


@pytest.mark.parametrize("step", [1, 2, 100])
def test_the_stop_string_is_told_and_may_be_shown(tokenizer: Tokenizer, step: int) -> None:
    ids = tokenizer.encode("one two three four five")
    for shows_stop, text in ((False, "one two "), (True, "one two thr")):
        stream = TextStream(tokenizer, ["thr"], shows_stop=shows_stop)
        pieces = run(stream, ids, step, "length")
        assert "".join(p.text for p in pieces) == text
        assert pieces[-1].stop_reason == "thr"


def test_a_stop_token_of_the_client_is_told_and_may_be_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    hidden = TextStream(tokenizer, [], stop_token_ids=[ids[-1]]).push(ids, "stop")
    assert (hidden.text, hidden.stop_reason) == ("one two", ids[-1])
    shown = TextStream(tokenizer, [], shows_stop=True).push(ids, "stop")
    assert (shown.text, shown.stop_reason) == ("one two three", None)


@pytest.mark.parametrize("step", [1, 2, 100])
def test_no_stop_string_ends_the_first_tokens(tokenizer: Tokenizer, step: int) -> None:
    ids = tokenizer.encode("one two one two")
    stream = TextStream(tokenizer, ["two"], min_tokens=len(tokenizer.encode("one two")))
    assert "".join(p.text for p in run(stream, ids, step, "length")) == "one two one "


def test_special_tokens_may_have_their_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, [], skip_special_tokens=False, shows_stop=True)
    assert stream.push([*tokenizer.encode("one"), EOS], "stop").text == "one<|im_end|>"


@pytest.mark.parametrize("step", [1, 2, 3, 100])
@pytest.mark.parametrize("stop", [(), ("Three",)])
def test_tokens_of_reasoning_are_counted_with_their_tags(
    tokenizer: Tokenizer, step: int, stop: tuple[str, ...]
) -> None:
    thought = tokenizer.encode("<think>\nOne two.\n</think>")
    ids = [*thought, *tokenizer.encode("Three four.")]
    parser = make_answer_parser(None, REASONING_TAGS["think"], schemas={})
    pieces = run(TextStream(tokenizer, stop, parser), [*ids, EOS], step, "stop")
    assert "".join(p.reasoning for p in pieces) == "One two."
    assert "".join(p.text for p in pieces) == ("" if stop else "Three four.")
    assert pieces[-1].num_reasoning == len(thought)
    num_tokens = len(thought) + 1 if stop else len(ids) + 1
    assert sum(len(p.token_ids) for p in pieces) == num_tokens


def test_an_answer_that_does_not_think_has_no_tokens_of_reasoning(tokenizer: Tokenizer) -> None:
    for text in ("<b>", "<thin", "Three"):
        parser = make_answer_parser(None, REASONING_TAGS["think"], schemas={})
        pieces = run(TextStream(tokenizer, (), parser), tokenizer.encode(text), 1, "length")
        assert ("".join(p.text for p in pieces), pieces[-1].num_reasoning) == (text, 0)


@pytest.mark.parametrize("step", [1, 100])
def test_a_stop_string_behind_the_only_call_is_not_what_stopped(
    tokenizer: Tokenizer, step: int
) -> None:
    parser = make_answer_parser(TOOL_FORMATS["json"], None, schemas={"f": {}}, one_call_only=True)
    ids = tokenizer.encode('{"name": "f", "arguments": {}} and more')
    pieces = run(TextStream(tokenizer, ["more"], parser), ids, step, "length")
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("tool_calls", None)
