"""The properties in which the layers of Gemma 4 differ, read from config.json.

- Layers without a window have heads of another size, and possibly another number of KV heads. With
  `attention_k_eq_v` they have no matrix for values: values are the keys before the norm and RoPE.
- The last `num_kv_shared_layers` layers compute no keys and values. They read those of the last
  earlier layer of the same kind. With `use_double_wide_mlp`, their MLPs are twice as wide.
- Each token has an embedding for each layer, which the layer adds in (`PerLayerInputs`).
- With `enable_moe_block`, all layers have experts beside their MLP (`Experts.has_own_norms`).
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

    vocab_size: int  # number of tokens with embeddings; tokens beyond have those of token 0
    size: int  # number of elements of a token's embedding for one layer


def read_per_layer_inputs(
    config: Mapping[str, Any], *, has_all: bool = True
) -> PerLayerInputs | None:
    """Returns the sizes of the embeddings for layers; None if there are none. With `has_all`, each
    token must have one. Raises UnsupportedModel."""
    if config.get("hidden_size_per_layer_input") in (None, 0):
        return None
    vocab = size(config, "vocab_size")
    own = optional_size(config, "vocab_size_per_layer_input", vocab)
    if own < vocab and has_all:
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
    sources = kv_sources(layers, config)
    inner = size(config, "intermediate_size")
    is_wide = flag(config, "use_double_wide_mlp")
    made = []
    for index, (layer, is_full) in enumerate(zip(layers, kinds, strict=True)):
        source = sources[index]
        own_inner = 2 * inner if source is not None and is_wide else None
        made.append(
            replace(
                layer,
                heads=own_heads[index],
                kv_source=source,
                inner=own_inner,
                experts=layer.experts and replace(layer.experts, shared_inner=own_inner or inner),
                values_are_keys=is_full and flag(config, "attention_k_eq_v"),
            )
        )
    return tuple(made)


def kv_sources(
    layers: Sequence[LayerSpec], config: Mapping[str, Any], pattern: int = 6
) -> list[int | None]:
    """Returns, for each layer, the number of the layer whose KV it reads; None if it has its own.
    Raises UnsupportedModel if too many layers read the KV of others."""
    kinds = _kinds(layers, config, pattern)
    num_shared = layer_number({"num_kv_shared_layers": 0, **config}, "num_kv_shared_layers")
    num_own = max(0, len(layers) - num_shared)
    last = {kind: index for index, kind in enumerate(kinds[:num_own])}
    if num_shared and set(kinds) > last.keys():
        raise UnsupportedModel(
            f"num_kv_shared_layers is {num_shared}, which is too large: the layers before the "
            "shared layers must include a layer of each kind in layer_types"
        )
    return [None if index < num_own else last[kind] for index, kind in enumerate(kinds)]


def _kinds(
    layers: Sequence[LayerSpec], config: Mapping[str, Any], default_pattern: int = 6
) -> list[bool]:
    """Returns, for each layer, whether it is of the kind full_attention. A layer of the kind
    sliding_attention has no window if the window is longer than the context."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return [kind == "full_attention" for kind in kinds[: len(layers)]]
    pattern = optional_size(config, "sliding_window_pattern", default_pattern)
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
