"""Flags of `quantization_config` that must have one of some values."""

from __future__ import annotations

from typing import Any

from tandem.errors import UnsupportedModel

NAME = "quantization_config"


def demand(given: Any, key: str, allowed: tuple[Any, ...], name: str = "") -> Any:
    """Returns a flag of an object. Raises UnsupportedModel with its `name`, by default the key, and
    the allowed values if it has another one, or if there is something else than an object."""
    value = given.get(key) if isinstance(given, dict) else given
    # True equals 1, and a list cannot be looked up in a set.
    if not any(value == each and type(value) is type(each) for each in allowed):
        shown = ", ".join("nothing" if each is None else str(each) for each in allowed)
        raise refusal(name or key, value, f"supported are {shown}")
    return value


def demand_object(value: Any, name: str) -> dict[str, Any]:
    """Returns a JSON object. Raises UnsupportedModel naming anything else."""
    if not isinstance(value, dict):
        raise refusal(name, value, "it must be an object")
    return value


def refusal(name: str, value: Any, what_may_be: str) -> UnsupportedModel:
    return UnsupportedModel(f"{NAME}: {name} is {value!r:.80}; {what_may_be}")
