from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tandem.models.source import resolve
from tandem.models.tokenizer import RenderedText, Tokenizer
from tandem.router.request.prompt import pieces
from tandem.router.request.prompt.pieces import PIECE_CHARACTERS, at_least, cut, is_counted_first

# Runs of one of these, so that merges, words and special tokens span the cuts.
RUNS = st.lists(
    st.tuples(
        st.sampled_from(
            [" 1x", "hello ", "a", "=", " ", "\n\n", "東京", "🙂", "é", "<|im_end|>", "ab c", "\t"]
        ),
        st.integers(1, 120),
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("smollm2").path)


@pytest.fixture(scope="module")
def stripping_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer without words, one of whose special tokens swallows the spaces around it."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "▁", "a", "▁a"])}
    backend = Backend(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    backend.add_special_tokens([AddedToken("<|im_end|>", lstrip=True, rstrip=True)])
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "config.json"):
        (folder / name).write_text("{}")
    return Tokenizer(folder)


def count(tokenizer: Tokenizer, text: str) -> int:
    """The certain number of tokens, as the router counts it."""
    counts = [tokenizer.count_tokens(RenderedText(piece)) for piece in cut(text)]
    return at_least(sum(counts), len(counts))


@pytest.mark.parametrize("name", ["tokenizer", "stripping_tokenizer"])
def test_the_count_is_never_above_the_number_of_tokens(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 100)
    # A cut of the worst of these texts adds 8 tokens. CUT_TOKENS leaves room for worse ones.
    monkeypatch.setattr(pieces, "CUT_TOKENS", 16)
    tokenizer: Tokenizer = request.getfixturevalue(name)

    @settings(max_examples=300, deadline=None)
    @given(RUNS)
    def check(runs: list[tuple[str, int]]) -> None:
        text = "".join(string * times for string, times in runs)
        assert count(tokenizer, text) <= len(tokenizer.encode(text))

    check()


def test_spaces_that_a_special_token_swallows_do_not_count(stripping_tokenizer: Tokenizer) -> None:
    text = "<|im_end|>" + " " * (10 * PIECE_CHARACTERS)
    assert len(stripping_tokenizer.encode(text)) < 5
    assert count(stripping_tokenizer, text) <= 0


def test_the_count_is_close(tokenizer: Tokenizer) -> None:
    text = " 1x" * 170_000
    assert len(list(cut(text))) == 16
    assert count(tokenizer, text) >= 0.99 * len(tokenizer.encode(text))


@given(st.text(st.sampled_from("a \n"), max_size=400))
def test_pieces_are_the_text_and_are_cut_before_spaces(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_CHARACTERS", 20)
        parts = list(cut(text))
    assert "".join(parts) == text
    assert all(0 < len(part) <= 20 for part in parts)
    for part, after in pairwise(parts):
        assert after[0] in " \n" or not set(part[-5:]) & set(" \n")


def test_what_may_well_fit_is_not_tokenized_twice() -> None:
    assert not is_counted_first(4 * 8192, 8192)
    assert is_counted_first(4 * 8192 + 1, 8192)
    assert not is_counted_first(PIECE_CHARACTERS, 16)
