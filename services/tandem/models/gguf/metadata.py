"""Typed access to the keys of a GGUF file.

Each error is one line with the key, its value and the allowed values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tandem.errors import UnsupportedModel

_MISSING = object()


class GgufMetadata:
    """The keys of a GGUF file.

    Methods raise UnsupportedModel for a value of the wrong type, and for a missing key if no
    default is given."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        """`keys` comes from `Layout.keys`."""
        self._keys = keys
        self.architecture = self.text("general.architecture", "(none named)")

    def get(self, key: str, default: Any = None) -> Any:
        return self._keys.get(key, default)

    def text(self, key: str, default: Any = _MISSING) -> Any:
        return self._checked(key, self.get(key, default), _is_text, "a text")

    def flag(self, key: str, default: Any = _MISSING) -> Any:
        return self._checked(key, self.get(key, default), _is_flag, "true or false")

    def items(self, key: str, kind: type, num: int | None = None) -> list[Any] | None:
        """Returns the list of a key; None if the key is absent. Raises UnsupportedModel if an item
        does not have the type `kind` (`float` includes integers), or if the list does not have the
        length `num`."""
        value = self.get(key)
        if value is None:
            return None
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(value, list) or not all(type(item) in kinds for item in value):
            raise _refusal(key, value, f"it must be a list of {_PLURALS[kind]}")
        if num is not None and len(value) != num:
            raise UnsupportedModel(
                f"{key} has {len(value)} items; it must have one for each of the {num} tokens of "
                "tokenizer.ggml.tokens"
            )
        return value

    def tokens(self) -> list[str]:
        """Returns the vocabulary; the index of a token is its id."""
        tokens = self.items("tokenizer.ggml.tokens", str)
        if not tokens:
            raise UnsupportedModel(
                "the GGUF file lacks tokenizer.ggml.tokens, the list of all tokens"
            )
        return tokens

    def token_id(self, key: str) -> int | None:
        """Reads a token id and checks that it is in the vocabulary; None if the key is absent."""
        if (value := self.get(key)) is None:
            return None
        num_tokens = len(self.tokens())
        if type(value) is not int or not 0 <= value < num_tokens:
            raise _refusal(key, value, f"it must be a token id, from 0 to {num_tokens - 1}")
        return value

    def special_ids(self, **keys: str) -> dict[str, int]:
        """Returns the ids of special tokens, such as {"bos_token_id": 1} for bos_token_id="bos".
        Special tokens that the file does not have are left out."""
        found = {name: self.token_id(special_key(key)) for name, key in keys.items()}
        return {name: token_id for name, token_id in found.items() if token_id is not None}

    def of_model(self, key: str, default: Any = _MISSING) -> Any:
        """Reads a key with the architecture's prefix: `block_count` reads `llama.block_count`. A
        list with one value per layer is accepted if all values are equal."""
        full_key = f"{self.architecture}.{key}"
        value = self.get(full_key, default)
        if value is _MISSING:
            raise UnsupportedModel(f"the GGUF file has no {full_key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModel(
                    f"{full_key} differs from layer to layer; all layers must have the same value"
                )
            return value[0]
        return value

    def size(self, key: str, default: Any = _MISSING) -> Any:
        """Reads a positive integer from a key with the architecture's prefix."""
        return self._of_model(key, default, _is_size, "a positive integer")

    def count(self, key: str, default: Any = _MISSING) -> Any:
        """Reads an integer of at least 0 from a key with the architecture's prefix."""
        return self._of_model(key, default, _is_count, "an integer of at least 0")

    def number(self, key: str, default: Any = _MISSING) -> Any:
        return self._of_model(key, default, _is_number, "a number")

    def flag_of_model(self, key: str, default: Any = _MISSING) -> Any:
        return self._of_model(key, default, _is_flag, "true or false")

    def _of_model(
        self, key: str, default: Any, is_allowed: Callable[[Any], bool], allowed: str
    ) -> Any:
        value = self.of_model(key, default)
        return self._checked(f"{self.architecture}.{key}", value, is_allowed, allowed)

    def _checked(
        self, key: str, value: Any, is_allowed: Callable[[Any], bool], allowed: str
    ) -> Any:
        if key not in self._keys:  # `value` is the default.
            if value is _MISSING:
                raise UnsupportedModel(f"the GGUF file has no {key}, which must be {allowed}")
            return value
        if not is_allowed(value):
            raise _refusal(key, value, f"it must be {allowed}")
        return value


def special_key(name: str) -> str:
    """Returns the GGUF key of a special token's id, for a name such as "eos"."""
    return f"tokenizer.ggml.{name}_token_id"


_PLURALS = {str: "texts", int: "integers", float: "numbers"}


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _refusal(key: str, value: Any, allowed: str) -> UnsupportedModel:
    return UnsupportedModel(f"{key} is {value!r:.80}; {allowed}")
