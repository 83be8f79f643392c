"""Checks values in `quantization_config` against the values that are supported."""

from __future__ import annotations

from typing import Any

from tandem.errors import UnsupportedModel

NAME = "quantization_config"


def demand(given: Any, key: str, allowed: tuple[Any, ...], name: str = "") -> Any:
    """Returns `given[key]`, or None if the key is absent. Raises UnsupportedModel listing the
    allowed values if the value is not in `allowed`.

    `name` is the field's name in the error message (default: `key`). If `given` is not an object,
    `given` itself is checked."""
    value = given.get(key) if isinstance(given, dict) else given
    # Types are compared, too, because True == 1 in Python.
    if not any(value == each and type(value) is type(each) for each in allowed):
        shown = ", ".join("no value" if each is None else str(each) for each in allowed)
        raise refusal(name or key, value, f"supported are {shown}")
    return value


def demand_object(value: Any, name: str) -> dict[str, Any]:
    """Returns `value` if it is a JSON object; raises UnsupportedModel otherwise."""
    if not isinstance(value, dict):
        raise refusal(name, value, "it must be an object")
    return value


def refusal(name: str, value: Any, what_may_be: str) -> UnsupportedModel:
    """Makes the error for an unsupported value. `what_may_be` describes the supported values."""
    return UnsupportedModel(f"{NAME}: {name} is {value!r:.80}; {what_may_be}")
