import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import BadRequest
from tandem.models.tokenizer.stop import StopStrings

# Two letters, so that stop strings overlap one another and themselves.
TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def naive_cut(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], True
    return text, False


@given(pieces=st.lists(TEXT, max_size=8), stops=STOPS)
def test_pieces_are_cut_where_the_whole_text_would_be(pieces, stops):
    stream = StopStrings(stops)
    shown = ""
    hit = False
    for piece in pieces:
        text, hit = stream.push(piece)
        shown += text
    assert (shown + stream.flush(), hit) == naive_cut("".join(pieces), stops)


@given(text=TEXT, stops=STOPS)
def test_only_what_could_begin_a_stop_string_is_held(text, stops):
    stream = StopStrings(stops)
    shown, hit = stream.push(text)
    held = text[len(shown) :]
    if not hit and held:
        assert any(stop.startswith(held) and stop != held for stop in stops)


def test_text_is_held_until_decided_and_then_shown():
    stream = StopStrings(["\n\nUser:"])
    assert stream.push("Hello\n") == ("Hello", False)
    assert stream.push("\nUse") == ("", False)
    assert stream.push("ful") == ("\n\nUseful", False)
    assert stream.flush() == ""


def test_nothing_follows_a_stop():
    stream = StopStrings(["STOP"])
    assert stream.push("a ST") == ("a ", False)
    assert stream.push("OP b") == ("", True)
    assert stream.push("c") == ("", True)
    assert stream.flush() == ""


def test_without_stop_strings_all_text_passes():
    assert StopStrings([]).push("abc") == ("abc", False)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(BadRequest, match="must not be empty"):
        StopStrings(["x", ""])
