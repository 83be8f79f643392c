"""Matchers on the built-in model's tokenizer: rebuilt anywhere, bounded, and never stuck."""

from __future__ import annotations

import json
import random
import threading
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tandem.errors import BadRequest
from tandem.models.grammars import masks
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.grammars.masks import GrammarMasks, GrammarMatcher
from tandem.models.grammars.text import StructuredOutput, grammar_text
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer

FOLDER = resolve("smollm2")
ENDS = set(FOLDER.config.eos_token_ids)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["é"]}}},
    "required": ["name", "tags"],
}
TEXTS = [
    grammar_text(StructuredOutput("x", "json_schema", json.dumps(SCHEMA))),
    grammar_text(StructuredOutput("x", "regex", r"[a-z]{2,9}(-\d+){0,3}")),
    grammar_text(StructuredOutput("x", "choice", json.dumps(["yes", "yes, but", 'no\n"é']))),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """The compiler of the built-in model."""
    return GrammarCompiler.of(FOLDER)


@pytest.fixture
def grammars(compiler: GrammarCompiler) -> GrammarMasks:
    """An engine's grammars."""
    return GrammarMasks(compiler, FOLDER.config.vocab_size)


AMBIGUOUS = grammar_text(StructuredOutput("x", "grammar", 'start: start start | "a" | ""'))


def optional(num_properties: int) -> str:
    """Returns a schema's grammar, with properties that may all be left out."""
    properties = {f"key_{number}": {"type": "string"} for number in range(num_properties)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return grammar_text(StructuredOutput("x", "json_schema", json.dumps(schema)))


def test_the_work_for_a_mask_is_bounded(compiler: GrammarCompiler) -> None:
    """An ambiguous grammar has more to look at with each token, for everyone in the batch."""
    (letter,) = Tokenizer(FOLDER.path).encode("a")
    matcher = compiler.compile(AMBIGUOUS)
    num_tokens = 0
    while not matcher.is_error():
        matcher.compute_bitmask()
        matcher.consume_tokens([letter])
        num_tokens += 1
    assert 100 < num_tokens < 500
    assert "max is 800" in matcher.get_error()


def test_a_form_whose_beginning_is_too_large_is_refused_at_once(compiler: GrammarCompiler) -> None:
    assert compiler.check(optional(190)) == ""
    assert "max is 800" in compiler.check(optional(210))


def updated(grammars: GrammarMasks, *matchers: GrammarMatcher | None) -> None:
    grammars.start(matcher for matcher in matchers if matcher is not None)
    grammars.wait()


def allowed(matcher: GrammarMatcher) -> list[int]:
    return [i for i in range(FOLDER.config.vocab_size) if matcher.mask[i // 32] >> i % 32 & 1]


@settings(max_examples=12, deadline=None)
@given(text=st.sampled_from(TEXTS), seed=st.integers(0, 999), share=st.floats(0, 1))
def test_a_matcher_is_rebuilt_from_any_split_of_the_tokens(
    compiler: GrammarCompiler, text: str, seed: int, share: float
) -> None:
    grammars = GrammarMasks(compiler, FOLDER.config.vocab_size)
    draw = random.Random(seed)
    whole = grammars.matcher(text, [])
    assert whole is not None
    made: list[int] = []
    seen = []
    while len(made) < 12 and not ENDS.intersection(made):
        updated(grammars, whole)
        assert not whole.error
        seen.append(whole.mask)
        made.append(draw.choice(allowed(whole)))
        whole.append(made[-1])
    split = round(share * (len(made) - 1))
    moved = GrammarMasks(compiler, FOLDER.config.vocab_size).matcher(text, made[:split])
    assert moved is not None
    for token_id, mask in zip(made[split:], seen[split:], strict=True):
        updated(grammars, moved)
        assert moved.mask.tobytes() == mask.tobytes()
        moved.append(token_id)


def test_what_is_complete_may_only_end(grammars: GrammarMasks) -> None:
    matcher = grammars.matcher(TEXTS[2], Tokenizer(FOLDER.path).encode("yes"))
    updated(grammars, matcher)
    assert matcher is not None
    assert ENDS.issubset(allowed(matcher))
    for token_id in Tokenizer(FOLDER.path).encode(", but"):
        matcher.append(token_id)
    updated(grammars, matcher)
    assert set(allowed(matcher)) == ENDS
    unfinished = grammars.matcher(TEXTS[2], [])
    updated(grammars, unfinished)
    assert unfinished is not None
    assert ENDS.isdisjoint(allowed(unfinished))


def test_a_token_that_is_not_allowed_fails_its_matcher_alone(grammars: GrammarMasks) -> None:
    token_ids = Tokenizer(FOLDER.path).encode("maybe")
    wrong = grammars.matcher(TEXTS[2], token_ids)
    right = grammars.matcher(TEXTS[2], [])
    broken = grammars.matcher('{"grammars": [{"lark_grammar": "start: ("}]}', [])
    updated(grammars, wrong, broken, right)
    assert wrong is not None
    assert broken is not None
    assert right is not None
    assert wrong.error
    assert broken.error
    assert not right.error


def test_compiled_grammars_are_bounded(
    grammars: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "GRAMMARS_MAX", 3)
    matchers = [grammars.matcher(TEXTS[number % 3], []) for number in range(9)]
    assert len({id(matcher._compiled) for matcher in matchers if matcher is not None}) == 3
    texts = [grammar_text(StructuredOutput("x", "regex", "a" * n)) for n in range(1, 9)]
    for text in texts:
        grammars.matcher(text, [])
    assert len(grammars._compiled) == 3
    monkeypatch.setattr(masks, "GRAMMAR_BYTES_MAX", len(texts[-1]))
    grammars.matcher(texts[0], [])
    assert list(grammars._compiled) == [texts[0]]


def test_a_long_grammar_is_compiled_beside_short_ones(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    compile_now = GrammarCompiler.compile
    long_text = grammar_text(StructuredOutput("x", "regex", "a" * (masks.LONG_TEXT_BYTES + 1)))

    def compile_later(compiler: GrammarCompiler, text: str) -> LLMatcher:
        assert text != long_text or go_on.wait(60)
        return compile_now(compiler, text)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_later)
    grammars = GrammarMasks(compiler, FOLDER.config.vocab_size)
    long = grammars.matcher(long_text, [])
    short = grammars.matcher(TEXTS[1], [])
    assert long is not None
    assert short is not None
    assert short._compiled.matcher.result(60)
    assert not long.is_compiled
    go_on.set()
    assert long._compiled.matcher.result(60)


def test_a_grammar_whose_matcher_failed_is_compiled_anew(grammars: GrammarMasks) -> None:
    """Its matchers share a lexer, which stays as the failure left it."""
    failed = grammars.matcher(TEXTS[1], Tokenizer(FOLDER.path).encode("A"))
    updated(grammars, failed)
    assert failed is not None
    assert failed.error
    next_one = grammars.matcher(TEXTS[1], [])
    assert next_one is not None
    assert next_one._compiled is not failed._compiled
    updated(grammars, next_one)
    assert not next_one.error


def test_masks_go_on_behind_one_that_is_held_up(
    grammars: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    update = GrammarMatcher.update
    held = grammars.matcher(TEXTS[0], [])
    other = grammars.matcher(TEXTS[1], [])
    assert held is not None
    assert other is not None

    def hold(matcher: GrammarMatcher) -> None:
        assert matcher is not held or go_on.wait(60)
        update(matcher)

    monkeypatch.setattr(GrammarMatcher, "update", hold)
    grammars.start([held, other])
    while other.is_late:
        grammars.wait_for_any([other])
    assert held.is_late
    assert not other.error
    go_on.set()
    grammars.start([held])  # it is begun already
    grammars.wait()
    assert not held.is_late


def test_a_long_forced_text_is_spelled_as_its_beginning_is(grammars: GrammarMasks) -> None:
    """All of a text may be forced: the work for a token does not grow with it."""
    text = "<|im_start|> some words " * 60
    form = f'start: {json.dumps(text)} <|im_start|> {json.dumps(text)} <|im_start|> "a"'
    matcher = grammars.matcher(grammar_text(StructuredOutput("x", "grammar", form)), [])
    assert matcher is not None
    token_ids: list[int] = []
    while (forced := matcher.find_forced()) is not None:
        grammars.search_s = 0.0
        token_ids.append(forced)
        matcher.append(forced)
    assert not matcher.error
    tokenizer = Tokenizer(FOLDER.path)
    made = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert len(made) > 1.9 * len(text)  # its last token may go on
    assert f"{text}<|im_start|>{text}<|im_start|>a<|im_end|>".startswith(made)
    (start,) = tokenizer.encode("<|im_start|>")  # twice as a token; in quotes it is plain text
    assert token_ids.count(start) in (1, 2)


def test_an_engine_without_a_tokenizer_refuses_grammars() -> None:
    with pytest.raises(BadRequest, match="no tokenizer"):
        GrammarMasks(None, 203).matcher(TEXTS[0], [])


@pytest.mark.parametrize(
    ("kind", "form", "text"),
    [
        ("choice", '["a<|im_start|>b"]', "a<|im_start|>b"),
        ("json_schema", '{"const": "<|im_end|>"}', '"<|im_end|>"'),
    ],
)
def test_plain_text_may_be_spelled_like_a_special_token(
    grammars: GrammarMasks, kind: Literal["choice", "json_schema"], form: str, text: str
) -> None:
    matcher = grammars.matcher(grammar_text(StructuredOutput("x", kind, form)), [])
    assert matcher is not None
    token_ids: list[int] = []
    eos = FOLDER.config.eos_token_ids
    while not token_ids or token_ids[-1] not in eos:
        updated(grammars, matcher)
        assert not matcher.error
        token_ids.append(allowed(matcher)[0])
        matcher.append(token_ids[-1])
        assert len(token_ids) < 30
    tokenizer = Tokenizer(FOLDER.path)
    assert all(token_id > 16 for token_id in token_ids[:-1])  # the first 17 are special
    assert tokenizer.decode(token_ids[:-1]) == text
