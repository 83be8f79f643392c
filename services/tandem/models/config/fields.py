"""Reads fields of config.json and checks their types.

A field of the wrong type raises UnsupportedModel, which names the field and its value. If such a
value were accepted, answers could change silently: the string "false", for example, is truthy in
Python.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.errors import UnsupportedModel


def size(config: Mapping[str, Any], name: str) -> int:
    """Returns the field `name`, a required positive integer. Raises UnsupportedModel."""
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise UnsupportedModel(f"{name} is {value!r:.80}; it must be a positive integer")
    return value


def same_size(config: Mapping[str, Any], name: str) -> int:
    """Returns the field `name`: a positive integer, or a list that has the same integer for each
    layer. Raises UnsupportedModel."""
    value = config.get(name)
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        return size({name: value[0]}, name)
    return size(config, name)


def layer_number(config: Mapping[str, Any], name: str) -> int:
    """Returns the field `name`, an integer of at least 0. Raises UnsupportedModel."""
    value = config.get(name)
    if type(value) is not int or value < 0:
        raise UnsupportedModel(f"{name} is {value!r:.80}; it must be an integer of at least 0")
    return value


def one_per_layer(values: object, key: str, num_layers: int) -> Sequence[Any]:
    """Returns the first `num_layers` items of `values`, the value of the field `key`. Raises
    UnsupportedModel if it is no list or shorter."""
    if not isinstance(values, list) or len(values) < num_layers:
        raise UnsupportedModel(f"{key} must be a list with a value for each of {num_layers} layers")
    return values[:num_layers]


def optional_size(config: Mapping[str, Any], name: str, default: int) -> int:
    """Returns a positive integer; `default` if the field is absent or null. Raises
    UnsupportedModel for any other value."""
    return default if config.get(name) is None else size(config, name)


def number(config: Mapping[str, Any], name: str, default: float) -> float:
    """Returns a positive number; `default` if the field is absent. Raises UnsupportedModel for any
    other value, including null."""
    value = config.get(name, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UnsupportedModel(f"{name} is {value!r:.80}; it must be a number > 0")
    return float(value)


def optional_number(config: Mapping[str, Any], name: str, default: float) -> float:
    """Returns a positive number; `default` if the field is absent or null. Raises UnsupportedModel
    for any other value."""
    return default if config.get(name) is None else number(config, name, default)


def flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Returns a boolean; `default` if the field is absent or null. Raises UnsupportedModel for any
    other value."""
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise UnsupportedModel(f"{name} is {value!r:.80}; it must be true or false")
    return value
