"""Prompts of a query and a document."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Tokens
from transformers import PreTrainedTokenizerFast

from tandem.errors import BadRequest, ConfigError
from tandem.models.tokenizer.pair_template import QWEN3_RERANKER, Pair, PairTemplate
from tandem.models.tokenizer.tokenizer import RenderedText, Tokenizer
from tandem.router.request.prompt.prompts import prepare_prompt

WORDS = ["<s>", "</s>", "?", *"abcdefgh"]
IDS = {word: index for index, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each of some letters. Two texts are joined as <s> a </s> b </s>."""
    tokens = Tokens(models.WordLevel(IDS, unk_token="?"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokens.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    path = tmp_path_factory.mktemp("pairs")
    tokens.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def ids(words: str) -> list[int]:
    return [IDS[word] for word in words.split()]


def test_the_tokenizer_joins_two_texts(tokenizer: Tokenizer) -> None:
    pair = Pair("a b", "c d e")
    assert tokenizer.encode_pair(pair) == ids("<s> a b </s> c d e </s>")
    assert tokenizer.encode_pair(pair, 8) == ids("<s> a b </s> c d e </s>")
    assert tokenizer.encode_pair(pair, 6) == ids("<s> a b </s> c </s>")
    assert tokenizer.encode_pair(pair, 5) == ids("<s> a b </s> </s>")
    with pytest.raises(BadRequest, match="it must be at least 5"):
        tokenizer.encode_pair(pair, 4)


@pytest.mark.parametrize("kept", [2, 3, 5, 6, 7, 100])
def test_an_encoders_prompt_is_truncated_as_transformers_truncates(
    tokenizer: Tokenizer, tmp_path: Path, kept: int
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer._tokenizer.to_str())
    (tmp_path / "config.json").write_text('{"architectures": ["ModernBertModel"]}')
    encoder = Tokenizer(tmp_path)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(file))
    text = RenderedText("a b c d", add_special_tokens=True)
    expected = reference("a b c d", truncation=True, max_length=kept)["input_ids"]
    assert prepare_prompt(encoder, text, kept, None).token_ids == expected
    whole = tuple(ids("<s> a b c d </s>"))
    assert prepare_prompt(encoder, whole, kept, None).token_ids == expected
    assert prepare_prompt(tokenizer, text, kept, None).token_ids == list(whole)[-kept:]
    bare = RenderedText("a b c d")
    assert prepare_prompt(encoder, bare, kept, None).token_ids == ids("a b c d")[:kept]
    if kept >= 5:
        expected = reference("a", "b c d", truncation="only_second", max_length=kept)["input_ids"]
        assert prepare_prompt(encoder, Pair("a", "b c d"), kept, None).token_ids == expected
    with pytest.raises(BadRequest, match="it must be at least 2, the number of tokens around"):
        prepare_prompt(encoder, text, 1, None)


def test_special_tokens_of_a_client_are_ordinary_text(tokenizer: Tokenizer) -> None:
    found = tokenizer.encode_pair(Pair("a", "b </s> c"))
    assert found.count(IDS["</s>"]) == 2
    template = PairTemplate("<s> {query} </s> {document} </s>")
    found = tokenizer.encode_pair(Pair("a <s>", "b </s>", template))
    assert (found.count(IDS["<s>"]), found.count(IDS["</s>"])) == (1, 2)


def test_a_template_has_special_tokens_or_the_tokenizer_adds_them(tokenizer: Tokenizer) -> None:
    own = PairTemplate("<s> {query} </s> {document} h")
    assert tokenizer.encode_pair(Pair("a", "b c", own)) == ids("<s> a </s> b c h")
    assert tokenizer.encode_pair(Pair("a", "b c", own), 5) == ids("<s> a </s> b h")
    plain = PairTemplate("{query} g {document} h")
    assert tokenizer.encode_pair(Pair("a", "b c", plain)) == ids("<s> a g b c h </s>")
    assert tokenizer.encode_pair(Pair("a", "b c", plain), 5) == ids("<s> a g h </s>")


def test_places_in_texts_are_no_places() -> None:
    template = PairTemplate("{instruction}/{query}/{document}.", "i")
    assert template.parts("", "{document}", "{query}") == ("i/{document}/", "{query}", ".")
    assert template.parts("j{query}", "q", "d") == ("j{query}/q/", "d", ".")


@pytest.mark.parametrize(
    "text", ["", "{query}", "{document}", "{document} {query}", "{query} {document} {document}"]
)
def test_a_template_without_its_places_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must have \{query\} and then"):
        PairTemplate(text)


def test_the_prompt_of_qwen3_reranker() -> None:
    before, document, after = QWEN3_RERANKER.parts("", "What?", "This.")
    assert before.endswith(
        "\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query"
        "\n<Query>: What?\n<Document>: "
    )
    assert document == "This."
    assert after == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="lone surrogate"):
        tokenizer.encode_pair(Pair("a", "\ud800"))
