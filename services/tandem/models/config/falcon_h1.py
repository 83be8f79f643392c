"""Reads the constant factors in the layers of Falcon-H1 from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.fields import number


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """Factors on products in a layer that has attention and a state."""

    query: float
    key: float
    value: float  # includes the factor on attention's output, which is a sum of values
    projected: tuple[float, ...]  # on z, x, B, C and dt of Mamba 2
    output: float  # on the output of Mamba 2
    gate: float  # on the gates of the MLP, before its activation
    down: float  # on the output of the MLP


def read_layer_factors(config: Mapping[str, Any]) -> LayerFactors:
    """Raises UnsupportedModel naming the field that is not supported."""
    attention_in = number(config, "attention_in_multiplier", 1.0)
    ssm_in = number(config, "ssm_in_multiplier", 1.0)
    gate, down = _numbers(config, "mlp_multipliers", 2)
    return LayerFactors(
        query=attention_in,
        key=attention_in * number(config, "key_multiplier", 1.0),
        value=attention_in * number(config, "attention_out_multiplier", 1.0),
        projected=tuple(ssm_in * each for each in _numbers(config, "ssm_multipliers", 5)),
        output=number(config, "ssm_out_multiplier", 1.0),
        gate=gate,
        down=down,
    )


def _numbers(config: Mapping[str, Any], name: str, num: int) -> list[float]:
    """Returns a list of positive numbers; ones if the field is absent or null."""
    values = config.get(name)
    if values is None:
        return [1.0] * num
    if not isinstance(values, list) or len(values) != num:
        raise UnsupportedModel(f"{name} is {values!r:.80}; it must be a list of {num} numbers")
    return [number({name: value}, name, 1.0) for value in values]
