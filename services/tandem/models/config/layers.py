"""The properties in which the layers of a decoder differ, read from config.json.

Properties that all layers share are in `ModelConfig`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.compressor import Compressor
from tandem.models.config.experts import Experts, read_experts
from tandem.models.config.families import Family
from tandem.models.config.fields import (
    flag,
    layer_number,
    number,
    one_per_layer,
    optional_size,
    size,
)
from tandem.models.config.indexer import Indexer, read_indexers
from tandem.models.config.linear_attention import LinearAttention, read_linear
from tandem.models.config.rope import (
    NO_ROPE,
    QueryScaling,
    Rope,
    read_query_scaling,
    read_ropes,
    rope_parameters,
)

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_CHUNKED = "chunked_attention"
# Names of layers that keep a state in older files, and their present names.
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_MLPS = ("mlp", "moe")  # layers of `has_single_parts` without attention and without a state
# The letters of `hybrid_override_pattern`.
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
LAYERS_MAX = 4096  # maximum number of layers; a larger number means that config.json is broken
# transformers' default of `max_window_layers` (Qwen): the first 28 layers have no window.
_DEFAULT_WINDOW_LAYERS = 28
# transformers' default of `no_rope_layer_interval` (SmolLM3): every 4th layer has no RoPE.
_DEFAULT_NO_ROPE_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class Heads:
    """The KV heads of a layer."""

    num_kv: int
    dim: int  # number of elements of a head, also of the query heads


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The properties of one layer that may differ from other layers."""

    rope: Rope
    # Number of tokens that a token attends to, including itself. None: the token itself and all
    # earlier tokens.
    window: int | None = None
    # True: the layer attends within chunks of `window` tokens instead of a sliding window. The
    # token at position p attends to the tokens from position p - p % window on.
    is_chunked: bool = False
    experts: Experts | None = None  # experts of the layer; None: the layer has a dense MLP
    # False: the layer keeps no keys and values.
    has_attention: bool = True
    has_mlp: bool = True  # False: the layer has neither an MLP nor experts.
    # Linear attention: the layer keeps a state of constant size. None: it keeps no state.
    linear: LinearAttention | None = None
    # Sparse attention: the layer's own indexer, which chooses the tokens to which a query attends.
    indexer: Indexer | None = None
    # True: a query attends to the tokens that the last earlier layer with an indexer has chosen.
    shares_choice: bool = False
    # Compressed attention: makes the entries to which a query attends beside the tokens in the
    # window. None: there are no entries.
    compressor: Compressor | None = None
    heads: Heads | None = None  # None: the layer has the model's heads
    # Number of the earlier layer whose keys and values this layer reads. None: the layer has its
    # own.
    kv_source: int | None = None
    inner: int | None = None  # intermediate size of the MLP; None: the model's
    lacks_sinks: bool = False  # True: the layer has no attention sinks, although others have.
    # True: values are computed by the matrix of the keys.
    values_are_keys: bool = False
    # Fraction of the MLP's gates that become 0 if they are normally distributed (gemma3n.py).
    sparsity: float = 0.0


def read_layers(
    config: Mapping[str, Any], family: Family, num_layers: int, max_model_len: int
) -> tuple[LayerSpec, ...]:
    """Returns the properties of each layer, in order. Raises UnsupportedModel naming the field that
    is not supported."""
    if num_layers > LAYERS_MAX:
        raise UnsupportedModel(
            f"num_hidden_layers is {num_layers}; it must be at most {LAYERS_MAX}"
        )
    have_rope = _have_rope(config, family, num_layers)
    experts = read_experts(config, family, num_layers)
    linear = _linear_layers(config, family, num_layers)
    parts = _parts(config, family, linear)
    config = _with_attention_in_all(config, linear)
    slide = _have_window(config, family, have_rope)
    is_chunked = family.windows == "chunked"
    window_key = "attention_chunk_size" if is_chunked else "sliding_window"
    window = _window(config, window_key) if any(slide) else None
    if family.rope_in_windows:
        have_window = config.get("sliding_window") is not None
        if not have_window and family.rope_in_windows == "only":
            raise UnsupportedModel("sliding_window is None; it must be a positive number of tokens")
        have_rope = slide if have_window else have_rope
    if not (family.indexer or family.has_deepseek_v4_layers):
        _check_layer_types(config, slide if window else [False] * num_layers, _local_kind(family))
    # Layers whose heads differ from those of layers without a window need a KV group of their own.
    has_own_heads = family.has_gemma4_layers or family.has_mimo_layers
    if has_own_heads and any(slide) and window is None:
        raise UnsupportedModel("sliding_window is None; it must be a positive number of tokens")
    if window is not None and window >= max_model_len and not has_own_heads:
        window = None
    ropes = read_ropes(
        config,
        default_theta=family.rope_theta,
        by_kind=family.has_rope_by_kind,
        local_theta=family.local_rope_theta,
    )
    if family.query_scaling == "all":
        scaling = read_query_scaling(config)
        ropes = {kind: replace(rope, query_scaling=scaling) for kind, rope in ropes.items()}
    no_rope = NO_ROPE
    if family.query_scaling == "no_rope" and flag(config, "attn_temperature_tuning"):
        scaling = QueryScaling(
            number(config, "attn_scale", 0.1), size(config, "floor_scale"), offset=1
        )
        no_rope = replace(NO_ROPE, query_scaling=scaling)
    indexers = read_indexers(config, family, num_layers, ropes[_FULL])
    # MiniMax M3: dense MLPs have a size of their own.
    dense_inner = None
    if "dense_intermediate_size" in family.defaults:
        dense_inner = size(config, "dense_intermediate_size")
    return tuple(
        LayerSpec(
            rope=ropes[_SLIDING if slides else _FULL] if has_rope else no_rope,
            window=window if slides else None,
            is_chunked=is_chunked and slides and window is not None,
            heads=_mimo_heads(config) if family.has_mimo_layers and slides else None,
            lacks_sinks=family.has_mimo_layers and not slides,
            experts=of_mlp,
            has_attention=has_attention,
            has_mlp=has_mlp,
            linear=state,
            indexer=indexer,
            shares_choice=family.indexer == "shared" and indexer is None,
            inner=dense_inner if of_mlp is None else None,
        )
        for slides, has_rope, of_mlp, state, (has_attention, has_mlp), indexer in zip(
            slide, have_rope, experts, linear, parts, indexers, strict=True
        )
    )


def _parts(
    config: Mapping[str, Any], family: Family, linear: Sequence[LinearAttention | None]
) -> list[tuple[bool, bool]]:
    """Returns, for each layer, whether it has attention and whether it has an MLP or experts."""
    if not family.has_single_parts:
        return [(state is None or family.has_parallel_state, True) for state in linear]
    kinds = _present_names(config["layer_types"])
    return [(kind == _FULL, kind in _MLPS) for kind, _ in zip(kinds, linear, strict=False)]


def _linear_layers(
    config: Mapping[str, Any], family: Family, num_layers: int
) -> list[LinearAttention | None]:
    """Returns, for each layer, the sizes of its linear attention, or None if it has none."""
    if not family.linear:
        return [None] * num_layers
    if family.has_parallel_state:
        return [read_linear(config, family)] * num_layers
    kinds = config.get("layer_types")
    if kinds is None and family.has_single_parts:
        raise UnsupportedModel("layer_types is missing; it must have the kind of each layer")
    if kinds is None:
        full = config.get("full_attn_idxs")
        if full is None and "full_attention_interval" not in config:
            raise UnsupportedModel("layer_types is missing; it must have the kind of each layer")
        if full is None:
            interval = optional_size(config, "full_attention_interval", num_layers)
            full = [layer for layer in range(num_layers) if (layer + 1) % interval == 0]
        if not isinstance(full, list) or any(type(layer) is not int for layer in full):
            raise UnsupportedModel(
                f"full_attn_idxs is {full!r:.80}; it must be a list of layer numbers"
            )
        kinds = [_FULL if layer in full else family.linear_name for layer in range(num_layers)]
    kinds = _present_names(one_per_layer(kinds, "layer_types", num_layers))
    known = [_FULL, family.linear_name]
    if family.windows == "pattern":
        known.append(_SLIDING)
    if family.has_single_parts:
        known += _MLPS
    if unknown := [kind for kind in kinds if kind not in known]:
        raise UnsupportedModel(
            f"layer_types has {unknown[0]!r:.80}, which is not supported for this architecture; "
            f"supported are {' and '.join(known)}"
        )
    if not set(kinds) - {family.linear_name, *_MLPS}:
        raise UnsupportedModel(
            f"layer_types has no {_FULL}; at least one layer must have full attention"
        )
    if family.linear_name not in kinds:
        return [None] * num_layers
    linear = read_linear(config, family)
    return [linear if kind == family.linear_name else None for kind in kinds]


def kinds_of_pattern(pattern: object) -> list[str]:
    """Returns the `layer_types` that `hybrid_override_pattern` describes with a letter for each
    layer. Raises UnsupportedModel."""
    if not isinstance(pattern, str) or not set(pattern) <= set(_LETTERS):
        raise UnsupportedModel(
            f"hybrid_override_pattern is {pattern!r:.80}; it must have one of "
            f"{' '.join(_LETTERS)} for each layer"
        )
    return [_LETTERS[letter] for letter in pattern]


def check_kinds(config: Mapping[str, Any], other_name: str) -> None:
    """Raises UnsupportedModel if `layer_types` of a config.json and the key `other_name` contradict
    each other, because transformers takes the one that comes last."""
    kinds = [config[name] for name in ("layer_types", other_name) if config.get(name) is not None]
    present = [_present_names(each) if isinstance(each, list) else each for each in kinds]
    if present and present[0] != present[-1]:
        raise UnsupportedModel(
            f"layer_types and {other_name} differ; make them equal, or remove the wrong one"
        )


def _present_names(kinds: Sequence[Any]) -> list[Any]:
    return [_OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]


def _with_attention_in_all(
    config: Mapping[str, Any], linear: Sequence[LinearAttention | None]
) -> Mapping[str, Any]:
    """Returns the config of the attention alone: `layer_types` gives full attention to the layers
    that keep a state."""
    kinds = config.get("layer_types")
    if not any(linear) or not isinstance(kinds, list):
        return config
    kinds = [
        _FULL if of_layer is not None or kind in _MLPS else kind
        for kind, of_layer in zip(_present_names(kinds), linear, strict=False)
    ]
    return {**config, "layer_types": kinds}


def _have_rope(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """Returns, for each layer, whether it applies RoPE."""
    if family.rope_if == "never":
        return [False] * num_layers
    if family.rope_if == "named":
        return [config.get("position_embedding_type") == "rope"] * num_layers
    if family.rope_if == "given":
        parameters = {"rope_theta": family.rope_theta, **config, **rope_parameters(config)}
        return [parameters["rope_theta"] is not None] * num_layers
    if not family.has_no_rope_layers:
        return [True] * num_layers
    # `no_rope_layers` has one number per layer. Despite its name, 1 means that the layer has RoPE.
    given = config.get("no_rope_layers")
    if given is not None:
        have_rope = one_per_layer(given, "no_rope_layers", num_layers)
        if any(each not in (0, 1) for each in have_rope):
            raise UnsupportedModel(
                f"no_rope_layers is {given!r:.80}; it must have a 0 or a 1 for each layer"
            )
        return [bool(each) for each in have_rope]
    interval = optional_size(config, "no_rope_layer_interval", _DEFAULT_NO_ROPE_INTERVAL)
    return [(layer + 1) % interval != 0 for layer in range(num_layers)]


def _have_window(config: Mapping[str, Any], family: Family, have_rope: list[bool]) -> list[bool]:
    """Returns, for each layer, whether it has a sliding window."""
    num_layers = len(have_rope)
    if family.windows in ("none", "all"):
        return [family.windows == "all"] * num_layers
    if family.windows in ("switched", "chosen") and not flag(config, "use_sliding_window"):
        return [False] * num_layers
    if family.windows == "switched":
        return [True] * num_layers
    kinds = config.get("layer_types")
    if kinds is not None:
        kinds = one_per_layer(kinds, "layer_types", num_layers)
        return [_is_local(kind, _local_kind(family)) for kind in kinds]
    if family.windows == "chunked":
        has_chunks = config.get("attention_chunk_size") is not None
        return [has_rope and has_chunks for has_rope in have_rope]
    if family.windows == "pattern":
        pattern = optional_size(config, "sliding_window_pattern", family.pattern)
        slide = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
        return [False, *slide[1:]] if family.has_mimo_layers else slide
    if family.has_no_rope_layers:
        return [not has_rope for has_rope in have_rope]
    num_full = layer_number(
        {"max_window_layers": _DEFAULT_WINDOW_LAYERS, **config}, "max_window_layers"
    )
    return [layer >= num_full for layer in range(num_layers)]


def _mimo_heads(config: Mapping[str, Any]) -> Heads:
    """Returns the KV heads of MiMo's layers with a window."""
    return Heads(2 * size(config, "num_key_value_heads"), size(config, "head_dim"))


def _local_kind(family: Family) -> str:
    """Returns the name in `layer_types` of the layers that do not see all earlier tokens."""
    return _CHUNKED if family.windows == "chunked" else _SLIDING


def _check_layer_types(config: Mapping[str, Any], slide: Sequence[bool], local: str) -> None:
    """Raises UnsupportedModel if the key `layer_types` contradicts the other keys of the config.
    `slide` says for each layer whether the other keys give it a sliding window."""
    kinds = config.get("layer_types")
    if kinds is None:
        return
    kinds = one_per_layer(kinds, "layer_types", len(slide))
    if [_is_local(kind, local) for kind in kinds] != list(slide):
        raise UnsupportedModel(
            f"layer_types is {kinds!r:.80}, but the architecture, sliding_window and "
            f"use_sliding_window give {sum(slide)} of {len(slide)} layers a sliding window"
        )


def _is_local(kind: object, local: str) -> bool:
    if kind not in (_FULL, local):
        raise UnsupportedModel(
            f"layer_types has {kind!r:.80}, which is not supported; supported are {_FULL} and "
            f"{local}"
        )
    return kind == local


def _window(config: Mapping[str, Any], key: str) -> int | None:
    window = config.get(key)
    if window is None or (type(window) is int and window >= 1):
        return window
    raise UnsupportedModel(
        f"{key} is {window!r:.80}; it must be a positive number of tokens or null"
    )
