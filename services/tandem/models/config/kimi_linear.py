"""Reads the layers of Kimi Linear from config.json.

Published checkpoints describe the layers that keep a state in `linear_attn_config`, and number
layers from 1 on. transformers writes `layer_types` and the sizes as keys of their own.
"""

from collections.abc import Mapping
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.fields import size

# Name of a size in `linear_attn_config` -> its name in this package.
_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_LISTS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}


def with_kimi_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with `layer_types` and the sizes that `linear_attn_config` has. As in
    transformers, these sizes go before those of other keys, and `layer_types` before the lists.
    Raises UnsupportedModel naming the field that is not supported."""
    linear = config.get("linear_attn_config") or {}
    if not isinstance(linear, dict):
        raise UnsupportedModel(f"linear_attn_config is {linear!r:.80}; it must be an object")
    sizes = {ours: linear[own] for own, ours in _SIZES.items() if own in linear}
    num_layers = size(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None and set(_LISTS) <= set(linear):
        kinds = _listed_kinds(linear, num_layers)
    elif kinds is None:
        kinds = [
            "full_attention" if layer and layer % 4 == 0 else "linear_attention"
            for layer in range(num_layers)
        ]
    return {**config, **sizes, "layer_types": kinds}


def _listed_kinds(linear: Mapping[str, Any], num_layers: int) -> list[str]:
    kinds: dict[int, str] = {}
    for name, kind in _LISTS.items():
        for layer in linear[name] if isinstance(linear[name], list) else [linear[name]]:
            if type(layer) is not int or not 1 <= layer <= num_layers or layer in kinds:
                raise UnsupportedModel(
                    f"{name} of linear_attn_config is {linear[name]!r:.80}; it must be a list of "
                    f"layer numbers from 1 to {num_layers}, and full_attn_layers and kda_layers "
                    "must have each number once"
                )
            kinds[layer] = kind
    if len(kinds) < num_layers:
        raise UnsupportedModel(
            f"full_attn_layers and kda_layers of linear_attn_config have {len(kinds)} layers; they "
            f"must have each of {num_layers} layers"
        )
    return [kinds[layer] for layer in range(1, num_layers + 1)]
