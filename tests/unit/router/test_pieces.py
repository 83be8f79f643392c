from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import RenderedText, Tokenizer
from tandem.router.request.prompt import pieces
from tandem.router.request.prompt.pieces import (
    CONTEXT_CHARACTERS,
    PIECE_CHARACTERS,
    at_least,
    cut,
    find_cut,
    is_counted_first,
)

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
    return saved(backend, tmp_path_factory.mktemp("tokenizer"))


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

    @settings(max_examples=100, deadline=None)
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
    text = " 1x" * 42_500
    assert len(list(cut(text))) == 4
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


@pytest.fixture(scope="module")
def unigram_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose pieces are chosen together over a whole word, with `bos` and `eos`."""
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocab += [(piece, -3.0 - len(piece) % 3) for piece in ("▁", "a", "1", "▁a", "aa", "1a", "▁1x")]
    vocab += [(piece, -5.0) for piece in ("x", "h", "e", "l", "o", "▁hello", "ab", "c", "▁c", "=")]
    backend = Backend(models.Unigram(vocab, unk_id=0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return saved(backend, tmp_path_factory.mktemp("unigram"))


@pytest.fixture(scope="module")
def joining_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with a token that has a space inside: no text is cut before one after an `a`."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "▁", "a", "b", "▁a", "a▁a", "▁b"])}
    merges = [("▁", "a"), ("a", "▁a"), ("▁", "b")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    return saved(backend, tmp_path_factory.mktemp("joining"))


def saved(backend: Backend, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "config.json"):
        (folder / name).write_text("{}")
    return Tokenizer(folder)


def last_ids(tokenizer: Tokenizer, text: str, kept: int, *, adds: bool) -> list[int] | None:
    """Tokenizes the end of a text part by part, as the router does in its processes."""
    found: list[int] = []
    start = len(text)
    while start and len(found) < kept:
        stop = start
        cut_at = find_cut(text, start, tokenizer.joined)
        if cut_at is None:
            return None
        start = cut_at
        left = max(0, cut_at - CONTEXT_CHARACTERS)
        window = RenderedText(text[left : stop + CONTEXT_CHARACTERS], add_special_tokens=adds)
        part = tokenizer.encode_part(window, start - left, stop - left)
        if part is None:
            return None
        found = part + found
    return found[-kept:]


@pytest.mark.parametrize(
    "name", ["tokenizer", "stripping_tokenizer", "unigram_tokenizer", "joining_tokenizer"]
)
@pytest.mark.parametrize("adds", [False, True])
def test_the_last_tokens_are_those_of_the_whole_text(
    name: str, adds: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 200)
    tokenizer: Tokenizer = request.getfixturevalue(name)
    num_cut = 0

    @settings(max_examples=200, deadline=None)
    @given(RUNS, st.sampled_from([1, 2, 10, 100, 10**6]))
    def check(runs: list[tuple[str, int]], kept: int) -> None:
        nonlocal num_cut
        text = "".join(string * times for string, times in runs)
        found = last_ids(tokenizer, text, kept, adds=adds)
        if found is not None:
            num_cut += len(text) > 400
            assert found == tokenizer.encode(text, add_special_tokens=adds)[-kept:]

    check()
    assert num_cut > 20  # about a quarter of the random texts have a place to cut


def test_a_text_is_not_cut_where_a_token_may_lie_across(joining_tokenizer: Tokenizer) -> None:
    assert joining_tokenizer.joined == {b"a "}
    text = " a" * (2 * PIECE_CHARACTERS)
    assert find_cut(text, len(text), joining_tokenizer.joined) is None
    assert last_ids(joining_tokenizer, text, 1, adds=False) is None
    assert find_cut(" b" * (2 * PIECE_CHARACTERS), len(text), joining_tokenizer.joined)


@pytest.mark.parametrize("word", ["a", "東京", "1", " ", "\n", "=. "])
def test_a_text_without_words_has_no_place_to_cut(tokenizer: Tokenizer, word: str) -> None:
    text = word * (10 * PIECE_CHARACTERS)
    assert find_cut(text, len(text), tokenizer.joined) is None
