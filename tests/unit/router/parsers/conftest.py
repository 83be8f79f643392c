"""Answers that are drawn from the real masks of a grammar, over the real vocabulary."""

# DeepSeek's tokens have full-width bars.
# ruff: noqa: RUF001

from __future__ import annotations

import random
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.parsers.formats import REASONING_TAGS, TOOL_FORMATS

EOS = 2
TOKENS_MAX = 600


@pytest.fixture(scope="module", params=[False, True], ids=["text", "tokens"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model; then with every string of the formats as a token of its own."""
    folder: Path = tmp_path_factory.mktemp("model")
    for file in resolve("smollm2").path.iterdir():
        if file.name != "tokenizer.json" or not request.param:
            (folder / file.name).symlink_to(file)
        else:
            shutil.copyfile(file, folder / file.name)
    if request.param:
        backend = Tokenizer(folder)._tokenizer
        states = [s for f in TOOL_FORMATS.values() for s in f.states.values()]
        strings = {mark for s in states for mark in s.marks}
        marks = {t for t in strings if t[0] in "<[" and t[-1] in ">]"}
        marks |= {tag for tags in REASONING_TAGS.values() if tags for tag in tags.marks}
        # Some models have one token inside their tags, and not a token for each tag.
        inside = {"｜DSML｜", "]<]minimax[>[", "<|channel>"}
        marks = {mark for mark in marks if not any(token in mark for token in inside)} | inside
        backend.add_tokens(sorted(m for m in marks if m.startswith("<t")))
        backend.add_special_tokens(sorted(m for m in marks if not m.startswith("<t")))
        backend.save(str(folder / "tokenizer.json"))
    return folder


@lru_cache(maxsize=2)
def vocabulary(folder: Path) -> tuple[Tokenizer, GrammarCompiler]:
    """Returns the tokenizer of a folder and a compiler for it, which take a second to read."""
    tokenizer = Tokenizer(folder)
    compiler = GrammarCompiler(folder / "tokenizer.json", tokenizer.vocab_size, [EOS])
    return tokenizer, compiler


def allowed(matcher: LLMatcher, size: int) -> np.ndarray[Any, Any]:
    """Returns the ids of the tokens that may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert not matcher.is_error(), matcher.get_error()
    return np.nonzero(np.unpackbits(bits, bitorder="little")[:size])[0]


def drawn(
    tokenizer: Tokenizer, matcher: LLMatcher, seed: int, begun: list[int]
) -> list[int] | None:
    """Draws an answer that goes on from `begun`; None for one without an end. It ends when it may,
    half of the times."""
    draw = random.Random(seed)
    ids = list(begun)
    matcher.consume_tokens(begun)
    while len(ids) < TOKENS_MAX:
        next_ids = allowed(matcher, tokenizer.vocab_size)
        ends = EOS in next_ids and (len(next_ids) == 1 or draw.random() < 0.5)
        token_id = EOS if ends else int(draw.choice(next_ids))
        ids.append(token_id)
        if token_id == EOS:
            return ids
        matcher.consume_tokens([token_id])
    return None
