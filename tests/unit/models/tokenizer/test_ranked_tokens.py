"""Folders that have a tiktoken file, or a tekken.json, and no tokenizer.json."""

from __future__ import annotations

import base64
import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.errors import ConfigError, TandemError
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import BYTE_OF_LETTER, Tokenizer
from tests.harness.models import encode_chat

DOCS = Path(__file__).parents[4] / "docs"
CJK = "東京タワー、中文汉字的文本、한국어 문장, Ünïcödé naïve café ЖУРНАЛ журнал "
TEXTS = [
    "I'LL pay $12345.67  for\n\n the naïve 東京 ½²³ x_y;\t end 🙂 'tis  ",
    "getURLparts/\n naïveCafé HTTPServer's it'S camelCase\r\n\r\n  中文abc汉字 日本語かな",
    "aaaaaaaa ababab \u0301e\u0301 ǅ ʰ ٣٤٥ a\u3000b\u00a0c   ",
    CJK * 2,
    "",
]
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    "llama3": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen": rf"{_WORDS}|\p{{N}}|{_REST}",
    "kimi": (
        rf"\p{{Han}}+|{_BEFORE}[[{_UPPER}]--\p{{Han}}]*[[{_LOWER}]--\p{{Han}}]+{_AFTER}|"
        rf"{_BEFORE}[[{_UPPER}]--\p{{Han}}]+[[{_LOWER}]--\p{{Han}}]*{_AFTER}|"
        rf"\p{{N}}{{1,3}}|{_REST}"
    ),
    "tekken": (
        rf"{_BEFORE}[{_UPPER}]*[{_LOWER}]+|{_BEFORE}[{_UPPER}]+[{_LOWER}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
FILES = {
    "llama3": "tokenizer.model",
    "qwen": "qwen.tiktoken",
    "kimi": "tiktoken.model",
    "tekken": "tekken.json",
}
KIMI = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "eos_token": "[EOS]",
    "chat_template": "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}",
}


@pytest.fixture(scope="module")
def ranked() -> list[bytes]:
    """Tokens in the order of their ranks: all bytes, and those of a trained byte-level BPE."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([(DOCS / "glossary.md").read_text(), CJK * 40], trainer)
    by_id = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(BYTE_OF_LETTER[letter] for letter in token) for token, _ in by_id]
    return sorted(tokens, key=lambda token: len(token) > 1)


def encode(ranked: list[bytes], pattern: str, text: str) -> list[int]:
    """tiktoken's algorithm: the neighbours that make the token of the lowest rank go first."""
    ranks = {token: rank for rank, token in enumerate(ranked)}
    ids = []
    for word in regex.findall(pattern, text, flags=regex.V1):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            joined = [a + b for a, b in pairwise(parts)]
            rank, at = min(
                ((ranks.get(j, len(ranks)), i) for i, j in enumerate(joined)),
                default=(len(ranks), 0),
            )
            if rank == len(ranks):
                break
            parts[at : at + 2] = [joined[at]]
        ids += [ranks[part] for part in parts]
    return ids


def lines(ranked: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(ranked))


def tekken(ranked: list[bytes], num_special: int = 30, **config: Any) -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate([*ranked, b"more", b"than are used"])
    ]
    sizes = {
        "default_vocab_size": len(ranked) + num_special,
        "default_num_special_tokens": num_special,
    }
    return {"vocab": vocab, "config": {"pattern": PATTERNS["tekken"], **sizes, **config}}


def write(folder: Path, family: str, ranked: list[bytes]) -> Path:
    """Writes a folder as the family has it, with a tiny model."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=len(ranked) + 260, num_attention_heads=2, eos_token_id=None, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    content = json.dumps(tekken(ranked)).encode() if family == "tekken" else lines(ranked)
    (folder / FILES[family]).write_bytes(content)
    if family == "kimi":
        names = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>")
        added = {str(len(ranked) + i): {"content": name} for i, name in enumerate(names)}
        added[str(len(ranked) + 9)] = {"content": "<|tool_call_begin|>", "special": False}
        settings = KIMI | {"added_tokens_decoder": added}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("family", FILES)
def test_texts_become_the_tokens_of_the_original(
    family: str, ranked: list[bytes], tmp_path: Path
) -> None:
    folder = write(tmp_path / "My-Model", family, ranked)
    model = resolve(str(folder), cache_dir=tmp_path)
    assert (model.name, model.weight_files) == ("My-Model", (folder / "model.safetensors",))
    assert resolve(str(model.path)) == model  # the folder in the cache
    tokenizer = Tokenizer.of(model)
    offset = 30 if family == "tekken" else 0
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text) if family == "qwen" else text
        wanted = [rank + offset for rank in encode(ranked, PATTERNS[family], composed)]
        assert tokenizer.encode(text, add_special_tokens=False) == wanted
        assert tokenizer.decode(wanted) == composed
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("family", "special", "bos", "ends"),
    [
        (
            "llama3",
            {
                "<|begin_of_text|>": 0,
                "<|eot_id|>": 9,
                "<|reserved_special_token_2|>": 12,
                "<|reserved_special_token_245|>": 255,
            },
            [0],
            [1, 8, 9],
        ),
        ("qwen", {"<|im_start|>": 1, "<|extra_0|>": 3, "<|extra_204|>": 207}, [], [0, 2]),
        (
            "kimi",
            {
                "<|im_end|>": 2,
                "<|im_user|>": 3,
                "<|reserved_token_{4}|>": 4,
                "<|reserved_token_{257}|>": 257,
            },
            [],
            [1],
        ),
    ],
)
def test_special_tokens_come_after_the_others(
    family: str,
    special: dict[str, int],
    bos: list[int],
    ends: list[int],
    ranked: list[bytes],
    tmp_path: Path,
) -> None:
    first = len(ranked)
    model = resolve(str(write(tmp_path / "m", family, ranked)), cache_dir=tmp_path)
    tokenizer = Tokenizer.of(model)
    for name, number in special.items():
        name = name.format(*range(first, first + 258)) if "{" in name else name
        assert tokenizer.encode(name, add_special_tokens=False) == [first + number]
        assert tokenizer.is_special(first + number)
    assert tokenizer.encode("") == [first + number for number in bos]
    assert sorted(tokenizer.eos_token_ids) == [first + number for number in ends]
    assert sorted(model.config.eos_token_ids) == [first + number for number in ends]


def test_special_tokens_of_tekken_come_first(ranked: list[bytes], tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "tekken", ranked)
    tokenizer = Tokenizer.of(resolve(str(folder), cache_dir=tmp_path))
    text = "<s>[INST]a[/INST]b</s><SPECIAL_29>"
    a, b = (30 + ranked.index(letter) for letter in (b"a", b"b"))
    assert tokenizer.encode(text) == [1, 1, 3, a, 4, b, 2, 29]
    assert tokenizer.eos_token_ids == (2,)
    newer = tekken(ranked) | {"special_tokens": [{"rank": 5, "token_str": "[NEW]"}]}
    (folder / "tekken.json").write_text(json.dumps(newer))
    tokenizer = Tokenizer.of(resolve(str(folder), cache_dir=tmp_path))
    assert tokenizer.encode("[NEW][INST]", add_special_tokens=False)[0] == 5


def test_added_tokens_that_are_not_special_are_shown(ranked: list[bytes], tmp_path: Path) -> None:
    """Such as the marks of Kimi's tool calls."""
    folder = write(tmp_path / "m", "kimi", ranked)
    tokenizer = Tokenizer.of(resolve(str(folder), cache_dir=tmp_path))
    ids = tokenizer.encode("a<|tool_call_begin|><|im_end|>", add_special_tokens=False)
    assert ids[1:] == [len(ranked) + 9, len(ranked) + 2]
    assert tokenizer.decode(ids) == "a<|tool_call_begin|>"


def test_a_chat_is_rendered_by_the_folders_template(ranked: list[bytes], tmp_path: Path) -> None:
    first = len(ranked)
    folder = write(tmp_path / "m", "kimi", ranked)
    tokenizer = Tokenizer.of(resolve(str(folder), cache_dir=tmp_path))
    hello = encode(ranked, PATTERNS["kimi"], "the <|im_end|>")
    chat = [{"role": "user", "content": "the <|im_end|>"}]  # plain text, as the client wrote it
    assert encode_chat(tokenizer, chat) == [first + 3, *hello, first + 2]


def test_a_changed_file_is_converted_again(ranked: list[bytes], tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "kimi", ranked)
    before = resolve(str(folder), cache_dir=tmp_path).path
    assert resolve(str(folder), cache_dir=tmp_path).path == before
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "x"}))
    assert resolve(str(folder), cache_dir=tmp_path).path != before


def test_what_cannot_be_read_is_named(ranked: list[bytes], tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "llama3", ranked)
    file = folder / "tokenizer.model"
    settings = folder / "tokenizer_config.json"
    code = {"auto_map": {"AutoTokenizer": ["tokenization_other.Other", None]}}
    for content, said, message in (
        (b"\x0a\x09SentencePiece", {}, "has no tokenizer.json"),
        (
            lines(ranked) + b"x\n",
            {},
            f"line {len(ranked) + 1} is b'x'; each line must have a token in base64",
        ),
        (lines(ranked) + b"YQ 900\n", {}, "is not base64|must have a token in base64"),
        (lines(ranked[1:]), {}, "has no token for the byte"),
        (
            lines(ranked) + b"bW9yZQ== 5\n",
            {},
            r"the merge ranks of the \d+ tokens must be the integers from 0 to",
        ),
        (
            lines(ranked),
            {"added_tokens_decoder": {"7": {"content": "<x>"}}},
            "special token '<x>' and another token have the same id, 7",
        ),
        (
            lines(ranked),
            code,
            "tokenization_other.*only the tiktoken files of Llama 3, Qwen",
        ),
        (
            lines(ranked),
            {"added_tokens_decoder": {"x": 1}},
            r"added_tokens_decoder is \{'x': 1\}; it must be",
        ),
    ):
        file.write_bytes(content)
        settings.write_text(json.dumps(said))
        with pytest.raises(TandemError, match=message) as raised:
            resolve(str(folder), cache_dir=tmp_path)
        assert "Error:" not in raised.value.message
    file.unlink()
    settings.unlink()
    whole = tekken(ranked)
    for changed, message in (
        ({"vocab": None}, "must have the object config and the list vocab"),
        (tekken(ranked, default_vocab_size="x"), "default_vocab_size is 'x'"),
        (
            tekken(ranked, default_vocab_size=9999),
            "default_vocab_size is 9999 and .* is 30; default_vocab_size - ",
        ),
        (tekken(ranked, 1 << 40), "is 1099511627776; .* must be at most 65536"),
        (tekken(ranked, pattern=5), r"config\.pattern is 5; it must be a string"),
        (
            {"vocab": [{"rank": 7}] * 1000},
            "entry 0 of vocab is .*; it must be an object with the rank 0",
        ),
        (
            {"special_tokens": [5]},
            r"special_tokens has the entry 5; .* a rank \(an integer from 0 to 29\)",
        ),
    ):
        (folder / "tekken.json").write_text(json.dumps(whole | changed))
        with pytest.raises(ConfigError, match=message) as raised:
            resolve(str(folder), cache_dir=tmp_path)
        assert str(folder / "tekken.json") in raised.value.message
        assert "Error:" not in raised.value.message
