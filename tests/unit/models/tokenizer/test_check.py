"""Rules of a tokenizer.json that never end, or make a flood, are refused when it is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tandem.errors import ConfigError
from tandem.models.source import resolve
from tandem.models.tokenizer import check as tokenizer_check
from tandem.models.tokenizer.check import check_file
from tandem.router.request.prompt import prompts

Change = Callable[[dict[str, Any]], None]


def split_by(expression: str) -> Change:
    rule = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
    return lambda file: file.update(pre_tokenizer=rule | {"invert": False})


def replace(pattern: dict[str, str], content: str, num: int = 1) -> Change:
    rule = {"type": "Replace", "pattern": pattern, "content": content}
    return lambda file: file.update(normalizer={"type": "Sequence", "normalizers": [rule] * num})


def around(num: int) -> Change:
    special = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    rule = {
        "type": "TemplateProcessing",
        "single": [special] * num + [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    return lambda file: file.update(post_processor=rule)


HOSTILE: dict[str, tuple[Change, str]] = {
    "splits": (split_by("(a+)+c"), "fails or does not end on the text"),
    "looks ahead": (split_by("(?=(x+x+)+y)"), "fails or does not end on the text"),
    "words": (split_by(r"^(\w+\s?)*$"), "fails or does not end on the text"),
    "replaces": (replace({"Regex": "(a+)+c"}, "b"), "fails or does not end on the text"),
    "two marks": (split_by(r"(\w+\s?)+!!"), "fails or does not end on the text"),
    "a megabyte": (replace({"String": "a"}, "b" * 1_000_000), "1e.06 times longer"),
    "doubles": (replace({"String": "a"}, "aa", 18), "2.62e.05 times longer"),
    "doubles a word": (replace({"String": "word"}, "wordword", 30), "1.07e.09 times longer"),
    "grows by an expression": (replace({"Regex": "q[ij]"}, "b" * 300), "300 times longer"),
    "prepends": (
        lambda file: file.update(normalizer={"type": "Prepend", "prepend": "b" * 100_000}),
        "makes .* tokens of the text",
    ),
    "around": (around(20_000), "adds 20000 tokens to each text"),
    "decodes": (
        lambda file: file.update(
            decoder={"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10**6}
        ),
        "decoder can make a text 1e.06 times longer",
    ),
    "no JSON": (lambda file: file.clear(), "loading it fails"),
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Change], Path]:
    """Writes a tokenizer.json of a few letters, changed."""
    vocab = {piece: i for i, piece in enumerate(["<s>", *"abcxy1 !", "aa"])}
    backend = Tokenizer(models.BPE(vocab, [("a", "a")], unk_token="<s>"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<s>")])

    def write(change: Change) -> Path:
        file = json.loads(backend.to_str())
        change(file)
        for name in ("config.json", "tokenizer_config.json"):
            (tmp_path / name).write_text("{}")
        (tmp_path / "tokenizer.json").write_text(json.dumps(file))
        return tmp_path / "tokenizer.json"

    return write


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_rule_is_named(kind: str, write: Callable[[Change], Path]) -> None:
    change, message = HOSTILE[kind]
    with pytest.raises(ConfigError, match=rf"tokenizer.json cannot be used: .*{message}"):
        check_file(write(change))


def test_what_is_harmless_passes(write: Callable[[Change], Path]) -> None:
    """Truncation and padding of the file are never used."""
    check_file(resolve("smollm2").path / "tokenizer.json")
    pad = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    check_file(write(lambda file: file.update(padding=pad, truncation=cut)))


@pytest.mark.slow
def test_memory_is_bounded(
    write: Callable[[Change], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_check, "MEMORY_BYTES", 1 << 30)
    with pytest.raises(ConfigError, match="fails or does not end on the text"):
        check_file(write(replace({"String": "a"}, "aa", 40)))


@pytest.mark.parametrize("kind", ["splits", "a megabyte", "around"])
async def test_a_router_tries_the_rules_in_its_tokenizer_process(
    kind: str, write: Callable[[Change], Path]
) -> None:
    change, message = HOSTILE[kind]
    folder = write(change).parent
    tokenizer = prompts.Tokenizer(folder)
    preparer = prompts.PromptPreparer(folder, tokenizer, num_processes=1)
    try:
        with pytest.raises(ConfigError, match=rf"tokenizer.json cannot be used: .*{message}"):
            await preparer.check()
    finally:
        preparer.close()
