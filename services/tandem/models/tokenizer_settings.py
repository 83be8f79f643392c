"""Reads a model folder's tokenizer settings: special tokens and end tokens."""

from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.models.config.model import read_eos_token_ids
from tandem.models.files import naming, read_json_if_any


def end_token_ids(path: Path) -> tuple[int, ...]:
    """Returns the ids of all tokens that end an answer of the model in the folder `path`.

    The ids come from generation_config.json, from config.json and from the tokenizer's `eos_token`.
    The tokenizer's end token is needed because a fine-tuned model may keep its base model's config
    files and end turns with another token. Raises ConfigError naming a file that cannot be read,
    UnsupportedModel for invalid ids.
    """
    with naming(path / "config.json"):
        ids = read_eos_token_ids(
            read_json_if_any(path / "config.json"),
            read_json_if_any(path / "generation_config.json"),
        )
    own = _end_token_of_tokenizer(path)
    return ids if own is None else tuple(dict.fromkeys([*ids, own]))


def _end_token_of_tokenizer(path: Path) -> int | None:
    """Returns the id of the tokenizer's `eos_token`; None if the tokenizer has no `eos_token`."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = read_tokenizer_settings(path / name)
        token = settings.get("eos_token")
        text = token["content"] if isinstance(token, dict) else token
        if text is None:
            continue
        for token_id, each in (settings.get("added_tokens_decoder") or {}).items():
            if each["content"] == text:
                return int(token_id)
        return _id_of(text, path / "tokenizer.json")
    return None


def _id_of(token: str, file: Path) -> int | None:
    """Returns the id of an added or ordinary token in a tokenizer.json; None if the file has no
    such token."""
    tokenizer = read_json_if_any(file)
    with naming(file):
        for each in tokenizer.get("added_tokens") or []:
            if each["content"] == token:
                return int(each["id"])
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, list):  # Unigram: a list of (piece, score), indexed by token id.
            vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
        token_id = vocabulary.get(token)
        return token_id if type(token_id) is int else None


def read_tokenizer_settings(file: Path) -> dict[str, Any]:
    """Reads a tokenizer_config.json or special_tokens_map.json; {} if the file does not exist.
    Raises ConfigError naming a field that has the wrong type."""
    settings = read_json_if_any(file)
    for name, is_allowed, allowed in (
        *((f"{role}_token", is_token, _TOKEN_FORMS) for role in _TOKEN_ROLES),
        ("chat_template", _is_template, "a text, or a list of objects with a name and a template"),
        ("additional_special_tokens", _is_list_of_tokens, f"a list; each item is {_TOKEN_FORMS}"),
        (
            "extra_special_tokens",
            lambda value: _is_list_of_tokens(value) or _is_object_of_tokens(value),
            f"a list, or an object of names; each item is {_TOKEN_FORMS}",
        ),
        ("added_tokens_decoder", _is_decoder, "an object of ids and objects with a content"),
    ):
        value = settings.get(name)
        if value is not None and not is_allowed(value):
            raise ConfigError(f"{file}: {name} is {value!r:.80}; it must be {allowed}")
    return settings


_TOKEN_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_TOKEN_FORMS = "a text, or an object that has the text as content"


def is_token(value: Any) -> bool:
    """Returns whether a settings value is a token: a string, or an object with a string
    `content`."""
    return isinstance(value.get("content") if isinstance(value, dict) else value, str)


def _is_list_of_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_token, value))


def _is_object_of_tokens(value: Any) -> bool:
    return isinstance(value, dict) and all(v is None or is_token(v) for v in value.values())


def _is_template(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list)
        and all(
            isinstance(each, dict)
            and all(isinstance(each.get(key), str) for key in ("name", "template"))
            for each in value
        )
    )


def _is_decoder(value: Any) -> bool:
    return isinstance(value, dict) and all(
        token_id.isdecimal() and isinstance(each, dict) and isinstance(each.get("content"), str)
        for token_id, each in value.items()
    )
