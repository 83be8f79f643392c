"""Fields of a config.json with the types that they must have.

A field of another type is refused with UnsupportedModel, which names it and its value: what could
be taken for something else (such as "false", which is true) would change answers in silence.
"""

import math
from collections.abc import Mapping
from typing import Any

from tandem.errors import UnsupportedModel


def size(config: Mapping[str, Any], name: str) -> int:
    """Returns a field that must be there."""
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise UnsupportedModel(f"{name} is {value!r:.80}; it must be a positive integer")
    return value


def optional_size(config: Mapping[str, Any], name: str, default: int) -> int:
    """Returns a field; `default` if it is absent or null."""
    return default if config.get(name) is None else size(config, name)


def number(config: Mapping[str, Any], name: str, default: float) -> float:
    """Returns a field; `default` if it is absent. Null is refused."""
    value = config.get(name, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UnsupportedModel(f"{name} is {value!r:.80}; it must be a number > 0")
    return float(value)


def optional_number(config: Mapping[str, Any], name: str, default: float) -> float:
    """Returns a field; `default` if it is absent or null."""
    return default if config.get(name) is None else number(config, name, default)


def flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Returns a field; `default` if it is absent or null."""
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise UnsupportedModel(f"{name} is {value!r:.80}; it must be true or false")
    return value
