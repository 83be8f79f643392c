"""Converts the tokenizer of a GGUF file to tokenizer.json and tokenizer_config.json.

Supported are byte-level BPE (tokenizer.ggml.model = gpt2) and SentencePiece (llama). Byte-level BPE
needs one of the pre-tokenizers listed in this module: a guessed one would silently give wrong
tokens. The names and rules of pre-tokenizers are llama.cpp's
(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tandem.errors import UnsupportedModel
from tandem.models.gguf.end_tokens import CONTROL, UNUSED, USER_DEFINED, token_types
from tandem.models.gguf.metadata import GgufMetadata, special_key

_SPACE = "▁"
# Maximum length of a token in the vocabulary, in characters. The time to find the merges of a token
# grows with the square of the token's length.
_PIECE_MAX = 1024
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"

# o200k_base (GPT-4o): a word is a run of upper-case letters followed by a run of lower-case
# letters, such as HTMLpage, HTML or page.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_AFTER = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}|{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tekken (Mistral): words as in o200k_base, but without suffixes such as 's. Digits are split apart.
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Kimi K2: words as in o200k_base, except that a run of Han characters is a word of its own.
_NOT_HAN = r"&&[^\p{Han}]]"
_UPPER_K2 = _UPPER.removesuffix("]") + _NOT_HAN
_LOWER_K2 = _LOWER.removesuffix("]") + _NOT_HAN
_KIMI_K2 = (
    rf"[\p{{Han}}]+|{_BEFORE}{_UPPER_K2}*{_LOWER_K2}+{_AFTER}|"
    rf"{_BEFORE}{_UPPER_K2}+{_LOWER_K2}*{_AFTER}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# DeepSeek: upper-case, lower-case and title-case letters, except those of some scripts, such as
# Georgian lower-case letters.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8f}\x{2d00}-\x{2d2d}"
    r"\x{a790}-\x{a7ff}\x{ab30}-\x{ab6f}\x{10570}-\x{105bf}\x{10d50}-\x{10d8f}\x{16e40}-\x{16eff}"
    r"\x{1d400}-\x{1d7ff}\x{1df00}-\x{1dfff}]]"
)
_CJK = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_CASED}+",
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)

_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_NFC_NAMES = ("qwen2", "qwen35", "deepseek-r1-qwen", "command-r")
_BEGINNING_WITH_BOS = (*_LLAMA3_NAMES, "tekken")
_IGNORING_MERGES = (*_LLAMA3_NAMES, "tekken")
# Value of tokenizer.ggml.pre -> regular expressions that split a text before BPE. The first one
# splits the text, and each following one splits the pieces further.
_PATTERNS = {
    **dict.fromkeys(("gpt-2", "olmo", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("smollm", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys((*_LLAMA3_NAMES, "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "seed-coder": (_SEED,),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), (_GPT_4O,)),
    "tekken": (_TEKKEN,),
    "kimi-k2": (_KIMI_K2,),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}


def write_tokenizer_json(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json to `folder`. Raises OSError if that fails, unlike `Tokenizer.save`."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def write_tokenizer(metadata: GgufMetadata, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json to `folder`. Raises UnsupportedModel naming a
    tokenizer or pre-tokenizer that is not supported."""
    model = metadata.text("tokenizer.ggml.model", "(none named)")
    pre = metadata.text("tokenizer.ggml.pre", "(none named)")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"GGUF tokenizer {model} is not supported; supported are gpt2 (byte-level BPE) and "
            "llama (SentencePiece). Use the model's Hugging Face folder instead"
        )
    if model == "gpt2" and pre not in _PATTERNS:
        raise UnsupportedModel(
            f"GGUF pre-tokenizer {pre} is not supported; supported are {', '.join(_PATTERNS)}"
        )
    tokens = metadata.tokens()
    if model == "llama":
        tokenizer = _sentence_piece(metadata, tokens)
    else:
        tokenizer = _build(metadata, pre=pre, tokens=tokens)
    _add_special(tokenizer, metadata, tokens)
    special = metadata.special_ids(
        bos_token="bos", eos_token="eos", unk_token="unknown", pad_token="padding"
    )
    _add_boundaries(tokenizer, metadata, pre=pre, tokens=tokens)
    write_tokenizer_json(tokenizer, folder)
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: tokens[token_id] for name, token_id in special.items()},
        "added_tokens_decoder": {
            str(token_id): {"content": tokens[token_id], "normalized": False, "special": True}
            for token_id in dict.fromkeys(special.values())
        },
    }
    template = metadata.text("tokenizer.chat_template", None)
    tool_use = metadata.text("tokenizer.chat_template.tool_use", None)
    if template is not None:
        tokenizer_config["chat_template"] = template
    if template is not None and tool_use is not None:
        named = {"default": template, "tool_use": tool_use}
        tokenizer_config["chat_template"] = [
            {"name": name, "template": text} for name, text in named.items()
        ]
    text = json.dumps(tokenizer_config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _build(metadata: GgufMetadata, *, pre: str, tokens: list[str]) -> Tokenizer:
    vocab = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, token_types(metadata), strict=True))
        if kind != UNUSED
    }
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=_merges(metadata, vocab), ignore_merges=pre in _IGNORING_MERGES
        )
    )
    if pre in _NFC_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pre_tokenizer(pre: str = "", *, pattern: str = "") -> pre_tokenizers.PreTokenizer:
    """Makes a byte-level pre-tokenizer. It splits a text by `pattern` if given, else by the
    patterns in _PATTERNS[pre]."""
    patterns = (pattern,) if pattern else _PATTERNS[pre]
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])


def _merges(metadata: GgufMetadata, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the BPE merges in order of priority."""
    merges = metadata.items("tokenizer.ggml.merges", str)
    if merges is None:
        raise UnsupportedModel(
            "the GGUF file lacks tokenizer.ggml.merges, the list of pairs of tokens; "
            "tokenizer.ggml.model gpt2 requires this list"
        )
    pairs = []
    for number, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not (space and left in vocab and right in vocab and left + right in vocab):
            raise UnsupportedModel(
                f"entry {number} of tokenizer.ggml.merges is {merge!r:.80}; it must be two "
                "tokens with a space between them. Both tokens joined without the space must "
                "be a token, too"
            )
        pairs.append((left, right))
    return pairs


def _add_special(tokenizer: Tokenizer, metadata: GgufMetadata, tokens: list[str]) -> None:
    types = token_types(metadata)
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, token_kind in zip(tokens, types, strict=True)
                if token_kind == kind
            ]
        )


def _add_boundaries(
    tokenizer: Tokenizer, metadata: GgufMetadata, *, pre: str, tokens: list[str]
) -> None:
    """Adds a post-processor that puts the bos token before each text, the eos token after it, or
    both. The file's settings decide which; if neither, no post-processor is added."""
    bos, eos = (metadata.token_id(special_key(name)) for name in ("bos", "eos"))
    is_default = pre in _BEGINNING_WITH_BOS or metadata.get("tokenizer.ggml.model") == "llama"
    add_bos = metadata.flag("tokenizer.ggml.add_bos_token", is_default)
    add_eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
    before = [bos] if add_bos and bos is not None else []
    after = [eos] if add_eos and eos is not None else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)],
            special_tokens=[(tokens[i], i) for i in dict.fromkeys([*before, *after])],
        )


def _sentence_piece(metadata: GgufMetadata, tokens: Sequence[str]) -> Tokenizer:
    """Makes a tokenizer from the file's pieces and scores, without special tokens.

    llama.cpp repeatedly merges the two neighbours whose concatenation has the highest score
    (https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp). This is byte-pair
    encoding with merges ordered by the score of the concatenation. Raises UnsupportedModel if the
    file has no scores.
    """
    scores = metadata.items("tokenizer.ggml.scores", float, len(tokens))
    if scores is None:
        raise UnsupportedModel(
            "the GGUF file lacks tokenizer.ggml.scores, a score for each token; "
            "tokenizer.ggml.model llama requires these scores"
        )
    unknown = metadata.token_id(special_key("unknown"))
    if (longest := max(map(len, tokens))) > _PIECE_MAX:
        raise UnsupportedModel(
            f"tokenizer.ggml.tokens has a token of {longest} characters; a token may have at most "
            f"{_PIECE_MAX}"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_sentence_piece_merges(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    to_pieces = normalizers.Replace(" ", _SPACE)
    from_pieces: list[Any] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if adds_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_pieces])
        from_pieces.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_pieces
    tokenizer.decoder = decoders.Sequence(from_pieces)
    return tokenizer


def _sentence_piece_merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns all pairs of pieces whose concatenation is a piece. The pairs are ordered by the
    concatenation's score (highest first), then by its length (longest first)."""
    found = [
        (-scores[token_id], -len(piece), token_id, cut, piece)
        for piece, token_id in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(piece[:cut], piece[cut:]) for *_, cut, piece in sorted(found)]
