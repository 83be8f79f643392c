"""Makes a tokenizer.json for a folder that has its tokenizer only in another format.

    file                                             format
    tokenizer.model, tiktoken.model, NAME.tiktoken   tiktoken: one line per token, with the token in
                                                     base64 and its rank
    tekken.json                                      Mistral's: tokens and ranks in JSON, with the
                                                     pre-tokenizer's pattern

Both formats are byte-level BPE in which the neighbours whose concatenation has the lowest rank are
merged first. In tokenizer.json, each pair of tokens whose concatenation is a token becomes a merge,
and merges are sorted by the rank of the concatenation. For example, the token "the" of rank 12
gives the merges ("t", "he") and ("th", "e"), before those of the token of rank 13. A tiktoken file
has no pattern and no special tokens; this module has both for each supported model family.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import shutil
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.config.fields import size
from tandem.models.files import naming, read_json, read_json_if_any
from tandem.models.gguf.convert import CONVERSION_FILE, cache_root, keep_conversion, write_json
from tandem.models.gguf.tokenizer import pre_tokenizer, write_tokenizer_json
from tandem.models.tokenizer.tokenizer import BYTE_OF_LETTER
from tandem.models.tokenizer_settings import read_tokenizer_settings

# Part of the key of cached folders. It must be incremented with each change of this module that
# changes the written files.
_VERSION = 1
# Maximum length of a token in bytes. The longest tokens of published models have 128 bytes.
_TOKEN_BYTES_MAX = 1024
_SPECIAL_MAX = 1 << 16
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*")
_COPIED = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")
_WRITTEN = ("tokenizer_config.json", "generation_config.json")
_LETTER_OF_BYTE = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}


@dataclass(frozen=True, slots=True)
class _Family:
    """The tokenizer settings of a model family that are not in its tiktoken file."""

    pre: str  # name of the pre-tokenizer in GGUF files
    special: Sequence[str]  # first special tokens; their ids follow the ids of the ranked tokens
    reserved: str  # format string for the names of the other special tokens, with {id} or {number}
    num_special: int
    reserved_from: int = 0
    bos: str = ""
    ends: Sequence[str] = ()
    composes: bool = False  # True: text is normalized to NFC.
    begins_with_bos: bool = False


_LLAMA3 = _Family(
    pre="llama-bpe",
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"),
        *("<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|step_id|>"),
        *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
        *("<|python_tag|>", "<|image|>"),
    ),
    reserved="<|reserved_special_token_{number}|>",
    num_special=256,
    reserved_from=2,
    bos="<|begin_of_text|>",
    ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    begins_with_bos=True,
)
_QWEN = _Family(
    pre="qwen2",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    reserved="<|extra_{number}|>",
    num_special=208,
    ends=("<|endoftext|>", "<|im_end|>"),
    composes=True,
)
_KIMI = _Family(
    pre="kimi-k2",
    special=("[BOS]", "[EOS]"),
    reserved="<|reserved_token_{id}|>",
    num_special=258,
    bos="[BOS]",
    ends=("[EOS]",),
)
_BY_NUM_RANKS = {128_000: _LLAMA3, 151_643: _QWEN, 163_584: _KIMI}
# Text that occurs in the name of the tokenizer's class or code file (tokenizer_config.json) ->
# model family.
_BY_CODE = {"kimi": _KIMI, "moonshot": _KIMI, "qwen": _QWEN}
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"),
)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A tokenizer's contents, before they are written as a tokenizer.json."""

    ranked: Mapping[bytes, int]  # token -> id, in the order of the tokens' ranks
    special: Mapping[str, int]
    pre: Any
    composes: bool
    bos: str
    ends: Sequence[str]
    begins_with_bos: bool
    shown: Container[str] = ()  # added tokens that `skip_special_tokens` does not remove


def tokenizer_file(folder: Path) -> Path | None:
    """Returns a folder's tokenizer file in the tiktoken or tekken format; None if it has none."""
    names = [
        "tekken.json",
        "tiktoken.model",
        *sorted(file.name for file in folder.glob("*.tiktoken")),
    ]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    file = folder / "tokenizer.model"  # This name is used for tiktoken and for SentencePiece files.
    if file.is_file():
        with file.open("rb") as stream:
            return file if _LINE.fullmatch(stream.readline(1000)) else None
    return None


def with_tokenizer_json(folder: Path, file: Path, *, cache_dir: Path | None = None) -> Path:
    """Returns a cached folder with a tokenizer.json made from `file` and copies of the model
    folder's small files. Raises ConfigError if a file is invalid, UnsupportedModel if the model
    family is unknown."""
    digest = hashlib.blake2b(str(_VERSION).encode(), digest_size=8)
    for each in (file, *_copied(folder, file)):
        content = each.read_bytes()
        digest.update(f" {each.name} {len(content)} ".encode() + content)
    place = (cache_dir or cache_root()) / "models" / f"{folder.name}-{digest.hexdigest()}"

    def convert(made: Path) -> None:
        settings = read_tokenizer_settings(folder / "tokenizer_config.json")
        with naming(file):
            tokens = _tekken(file) if file.suffix == ".json" else _tiktoken(settings, file)
            write_tokenizer_json(_build(tokens), made)
        _write_settings(folder, made, file, settings, tokens)
        conversion = {"name": folder.name, "source": str(folder.resolve()), "version": _VERSION}
        write_json(made / CONVERSION_FILE, conversion)

    return keep_conversion(place, folder, convert)


def _tiktoken(settings: Mapping[str, Any], file: Path) -> _Tokens:
    ranked: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line:
            continue
        if not _LINE.fullmatch(line):
            raise ConfigError(
                f"line {number} is {line[:80]!r}; each line must have a token in base64, a "
                "space and the merge rank of the token"
            )
        token, rank = line.split()
        ranked[_decode_token(token, f"line {number}")] = int(rank)
    _check_ranks(ranked)
    family = _family(settings, file, len(ranked))
    first = len(ranked)
    num_named = len(family.special)
    special = {name: first + index for index, name in enumerate(family.special)}
    for index in range(num_named, family.num_special):
        number = index - num_named + family.reserved_from
        special[family.reserved.format(number=number, id=first + index)] = first + index
    if added := {each["content"]: int(id_) for id_, each in _added(settings).items()}:
        ids = set(added.values())
        special = added | {name: id_ for name, id_ in special.items() if id_ not in ids}
    return _Tokens(
        ranked,
        special,
        pre_tokenizer(family.pre),
        family.composes,
        family.bos,
        family.ends,
        family.begins_with_bos,
        shown={
            each["content"] for each in _added(settings).values() if each.get("special") is False
        },
    )


def _family(settings: Mapping[str, Any], file: Path, num_ranks: int) -> _Family:
    """Returns the family of a tiktoken file's model. Raises UnsupportedModel if it is unknown."""
    code = str(settings.get("auto_map") or settings.get("tokenizer_class") or "").lower()
    by_code = next((family for name, family in _BY_CODE.items() if name in code), None)
    if by_code is None and settings.get("auto_map"):
        raise UnsupportedModel(
            f"the tokenizer needs the Python code {code:.80}, and such code is never run. "
            "Save the tokenizer as tokenizer.json. Without that file, only the tiktoken "
            "files of Llama 3, Qwen and Kimi are supported"
        )
    by_name = _KIMI if file.name == "tiktoken.model" else _LLAMA3
    by_name = _QWEN if file.suffix == ".tiktoken" else by_name
    return by_code or _BY_NUM_RANKS.get(num_ranks, by_name)


def _tekken(file: Path) -> _Tokens:
    content = read_json(file)
    config = content.get("config")
    vocab = content.get("vocab")
    if not isinstance(config, dict) or not isinstance(vocab, list):
        raise ConfigError("the file must have the object config and the list vocab")
    num_special = size(config, "default_num_special_tokens")
    num_ranked = size(config, "default_vocab_size") - num_special
    if not 0 < num_ranked <= len(vocab) or num_special > _SPECIAL_MAX:
        raise ConfigError(
            f"default_vocab_size is {config['default_vocab_size']} and default_num_special_tokens "
            f"is {num_special}; default_vocab_size - default_num_special_tokens must be from 1 to "
            f"{len(vocab)}, and default_num_special_tokens must be at most {_SPECIAL_MAX}"
        )
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise ConfigError(f"config.pattern is {pattern!r:.80}; it must be a string")
    ranked: dict[bytes, int] = {}
    for number, each in enumerate(vocab[:num_ranked]):
        token = each.get("token_bytes") if isinstance(each, dict) else None
        if not isinstance(token, str) or each.get("rank") != number:
            raise ConfigError(
                f"entry {number} of vocab is {each!r:.80}; it must be an object with the rank "
                f"{number} and token_bytes, a string in base64"
            )
        ranked[_decode_token(token.encode(), f"vocab {number}")] = number
    _check_ranks(ranked)
    return _Tokens(
        {token: rank + num_special for token, rank in ranked.items()},
        _tekken_special_tokens(content.get("special_tokens"), num_special),
        pre_tokenizer(pattern=pattern),
        composes=False,
        bos="<s>",
        ends=("</s>",),
        begins_with_bos=True,
    )


def _tekken_special_tokens(given: Any, num: int) -> dict[str, int]:
    names = dict(enumerate(_TEKKEN_SPECIAL))
    if isinstance(given, list):
        names = {}
        for each in given:
            rank, name = (
                (each.get("rank"), each.get("token_str")) if isinstance(each, dict) else (0, 0)
            )
            if type(rank) is not int or not 0 <= rank < num or not isinstance(name, str):
                raise ConfigError(
                    f"special_tokens has the entry {each!r:.80}; an entry must have a rank "
                    f"(an integer from 0 to {num - 1}) and a token_str (a string)"
                )
            names[rank] = name
    return {names.get(rank, f"<SPECIAL_{rank}>"): rank for rank in range(num)}


def _added(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the added tokens of a tokenizer_config.json, by id."""
    added: Mapping[str, Any] = settings.get("added_tokens_decoder") or {}
    return added


def _decode_token(token: bytes, place: str) -> bytes:
    try:
        decoded = base64.b64decode(token, validate=True)
    except binascii.Error as error:
        raise ConfigError(f"{place} is {token[:80]!r}, which is not base64: {error}") from error
    if not 1 <= len(decoded) <= _TOKEN_BYTES_MAX:
        raise ConfigError(
            f"{place} is a token of {len(decoded)} bytes; it must have 1 to {_TOKEN_BYTES_MAX}"
        )
    return decoded


def _check_ranks(ranked: Mapping[bytes, int]) -> None:
    if sorted(ranked.values()) != list(range(len(ranked))):
        raise ConfigError(
            f"the merge ranks of the {len(ranked)} tokens must be the integers from 0 to "
            f"{len(ranked) - 1}, each once"
        )
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranked]:
        raise ConfigError(
            f"the tokenizer has no token for the byte {missing[0]}; each byte must have a token"
        )


def _build(tokens: _Tokens) -> Tokenizer:
    ids = set(tokens.ranked.values())
    if clash := [name for name, token_id in tokens.special.items() if token_id in ids]:
        raise ConfigError(
            f"the special token {clash[0]!r:.80} and another token have the same id, "
            f"{tokens.special[clash[0]]}"
        )
    spelled = {_as_letters(token): token_id for token, token_id in tokens.ranked.items()}
    model = models.BPE(
        vocab={**spelled, **tokens.special},
        merges=_merges(tokens.ranked, tokens.special),
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    if tokens.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = tokens.pre
    tokenizer.decoder = decoders.ByteLevel()
    in_order = sorted(tokens.special, key=tokens.special.__getitem__)
    tokenizer.add_tokens(
        [AddedToken(name, special=name not in tokens.shown, normalized=False) for name in in_order]
    )
    if tokens.begins_with_bos and tokens.bos in tokens.special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens.bos, "$A"], special_tokens=[(tokens.bos, tokens.special[tokens.bos])]
        )
    return tokenizer


def _merges(ranked: Mapping[bytes, int], special: Container[str]) -> list[tuple[str, str]]:
    """Returns all pairs of tokens whose concatenation is a token, in the order of the
    concatenations' ids. A pair is left out if a token or the concatenation has the text of a
    special token."""
    found = [
        (token_id, ranked[token[:cut]], ranked[token[cut:]], token[:cut], token[cut:])
        for token, token_id in ranked.items()
        for cut in range(1, len(token))
        if token[:cut] in ranked and token[cut:] in ranked
    ]
    pairs = ((_as_letters(left), _as_letters(right)) for *_, left, right in sorted(found))
    return [
        (left, right)
        for left, right in pairs
        if not (left in special or right in special or left + right in special)
    ]


def _as_letters(token: bytes) -> str:
    return "".join(map(_LETTER_OF_BYTE.__getitem__, token))


def _copied(folder: Path, file: Path) -> list[Path]:
    """Returns the small files of the folder to copy beside the new tokenizer.json. The tokenizer
    file `file` and weight indexes are left out."""
    found = (each for pattern in _COPIED for each in sorted(folder.glob(pattern)))
    return [each for each in found if each != file and not each.name.endswith(".index.json")]


def _write_settings(
    folder: Path, made: Path, file: Path, settings: Mapping[str, Any], tokens: _Tokens
) -> None:
    for each in _copied(folder, file):
        if each.name not in _WRITTEN:
            copy = made / each.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(each, copy)
    own = {"eos_token": tokens.ends[0]} | ({"bos_token": tokens.bos} if tokens.bos else {})
    added = {
        str(token_id): {
            "content": name,
            "normalized": False,
            "special": name not in tokens.shown,
        }
        for name, token_id in tokens.special.items()
    }
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}
    given = {name: value for name, value in settings.items() if name != "auto_map"}
    write_json(made / "tokenizer_config.json", own | given | kind)
    generation = read_json_if_any(folder / "generation_config.json")
    eos = generation.get("eos_token_id")
    named = [] if eos is None else eos if isinstance(eos, list) else [eos]
    ends = [tokens.special[end] for end in tokens.ends if end in tokens.special]
    write_json(made / "generation_config.json", generation | {"eos_token_id": named + ends})
