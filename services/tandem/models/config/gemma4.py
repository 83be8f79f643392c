"""The properties in which the layers of Gemma 4 differ, read from config.json.

- Layers without a window have heads of another size, and possibly another number of KV heads. With
  `attention_k_eq_v` they have no matrix for values: values are the keys before the norm and RoPE.
- The last `num_kv_shared_layers` layers compute no keys and values. They read those of the last
  earlier layer of the same kind. With `use_double_wide_mlp`, their MLPs are twice as wide.
- Each token has an embedding for each layer, which the layer adds in (`PerLayerInputs`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.fields import flag, layer_number, optional_size, size
from tandem.models.config.layers import Heads, LayerSpec


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """The embeddings that a token has for each layer."""

    vocab_size: int
    size: int  # number of elements of a token's embedding for one layer


def read_per_layer_inputs(config: Mapping[str, Any]) -> PerLayerInputs | None:
    """Returns the sizes of the embeddings for layers; None if there are none. Raises
    UnsupportedModel."""
    if config.get("hidden_size_per_layer_input") in (None, 0):
        return None
    vocab = size(config, "vocab_size")
    own = optional_size(config, "vocab_size_per_layer_input", vocab)
    if own < vocab:
        raise UnsupportedModel(
            f"vocab_size_per_layer_input is {own}; it must be at least vocab_size, {vocab}"
        )
    return PerLayerInputs(own, size(config, "hidden_size_per_layer_input"))


def with_gemma4_layers(
    layers: Sequence[LayerSpec], config: Mapping[str, Any], heads: Heads
) -> tuple[LayerSpec, ...]:
    """Returns the layers with their own heads, shared KV and MLP sizes. `heads` are those of layers
    with a window. Raises UnsupportedModel naming the field that is not supported."""
    kinds = _kinds(layers, config)
    if not kinds[-1]:
        raise UnsupportedModel("layer_types must end with full_attention for this architecture")
    own_heads = _heads(config, kinds, heads)
    num_shared = layer_number({"num_kv_shared_layers": 0, **config}, "num_kv_shared_layers")
    first_shared = len(layers) - num_shared
    inner = size(config, "intermediate_size")
    is_wide = flag(config, "use_double_wide_mlp")
    made = []
    for index, (layer, is_full) in enumerate(zip(layers, kinds, strict=True)):
        is_shared = index >= first_shared
        source = None
        if is_shared:
            sources = [i for i in range(max(0, first_shared)) if kinds[i] == is_full]
            if not sources:
                raise UnsupportedModel(
                    f"num_kv_shared_layers is {num_shared}, which is too large: the layers "
                    "before the shared layers must include a layer with a window and a layer "
                    "without a window"
                )
            source = sources[-1]
        made.append(
            replace(
                layer,
                heads=own_heads[index],
                kv_source=source,
                inner=2 * inner if is_shared and is_wide else None,
                values_are_keys=is_full and flag(config, "attention_k_eq_v"),
            )
        )
    return tuple(made)


def _kinds(layers: Sequence[LayerSpec], config: Mapping[str, Any]) -> list[bool]:
    """Returns, for each layer, whether it is of the kind full_attention. A layer of the kind
    sliding_attention has no window if the window is longer than the context."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return [kind == "full_attention" for kind in kinds[: len(layers)]]
    pattern = optional_size(config, "sliding_window_pattern", 6)
    return [(layer + 1) % pattern == 0 for layer in range(len(layers))]


def _heads(config: Mapping[str, Any], kinds: Sequence[bool], heads: Heads) -> list[Heads]:
    """Returns the KV heads of each layer. Raises UnsupportedModel if layers of one kind differ."""
    given = config.get("per_layer_config")
    if given is None:
        full = Heads(heads.num_kv, size(config, "global_head_dim"))
        if flag(config, "attention_k_eq_v"):
            num_kv = optional_size(config, "num_global_key_value_heads", heads.num_kv)
            full = Heads(num_kv, full.dim)
        return [full if is_full else heads for is_full in kinds]
    if not isinstance(given, dict) or not all(
        isinstance(each, dict) and each.keys() <= {"head_dim", "num_key_value_heads"}
        for each in given.values()
    ):
        raise UnsupportedModel(
            f"per_layer_config is {given!r:.80}; it may give a layer only the keys head_dim "
            "and num_key_value_heads"
        )
    own = [
        Heads(
            optional_size(given.get(str(layer), {}), "num_key_value_heads", heads.num_kv),
            optional_size(given.get(str(layer), {}), "head_dim", heads.dim),
        )
        for layer in range(len(kinds))
    ]
    if len(set(zip(own, kinds, strict=True))) > len(set(kinds)):
        raise UnsupportedModel(
            "per_layer_config gives layers of the same type in layer_types different values "
            "of head_dim or num_key_value_heads, which is not supported"
        )
    return own
