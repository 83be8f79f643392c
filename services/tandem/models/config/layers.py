"""The properties in which the layers of a decoder differ, read from config.json.

Properties that all layers share are in `ModelConfig`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.experts import Experts, read_experts
from tandem.models.config.families import Family
from tandem.models.config.fields import flag, layer_number, one_per_layer, optional_size
from tandem.models.config.rope import NO_ROPE, Rope, read_query_scaling, read_ropes

_FULL = "full_attention"
_SLIDING = "sliding_attention"
LAYERS_MAX = 4096  # maximum number of layers; a larger number means that config.json is broken
# transformers' default of `max_window_layers` (Qwen): the first 28 layers have no window.
_DEFAULT_WINDOW_LAYERS = 28
# transformers' default of `no_rope_layer_interval` (SmolLM3): every 4th layer has no RoPE.
_DEFAULT_NO_ROPE_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The properties of one layer that may differ from other layers."""

    rope: Rope
    # Number of tokens that a token attends to, including itself. None: the token itself and all
    # earlier tokens.
    window: int | None = None
    experts: Experts | None = None  # experts of the layer; None: the layer has a dense MLP


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
    slide = _have_window(config, family, have_rope)
    window = _window(config) if any(slide) else None
    if family.rope_in_windows == "only" and config.get("sliding_window") is None:
        raise UnsupportedModel(
            f"sliding_window is {config.get('sliding_window')!r:.80}; it must be a positive number "
            "of tokens"
        )
    if family.rope_in_windows and window is not None:
        have_rope = slide
    _check_layer_types(config, slide if window else [False] * num_layers)
    if window is not None and window >= max_model_len:
        window = None
    ropes = read_ropes(config, default_theta=family.rope_theta, by_kind=family.has_rope_by_kind)
    if family.query_scaling == "all":
        scaling = read_query_scaling(config)
        ropes = {kind: replace(rope, query_scaling=scaling) for kind, rope in ropes.items()}
    return tuple(
        LayerSpec(
            rope=ropes[_SLIDING if slides else _FULL] if has_rope else NO_ROPE,
            window=window if slides else None,
            experts=experts,
        )
        for slides, has_rope, experts in zip(
            slide, have_rope, read_experts(config, family, num_layers), strict=True
        )
    )


def _have_rope(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """Returns, for each layer, whether it applies RoPE."""
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
        return [_slides(kind) for kind in one_per_layer(kinds, "layer_types", num_layers)]
    if family.windows == "pattern":
        pattern = optional_size(config, "sliding_window_pattern", family.pattern)
        return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if family.has_no_rope_layers:
        return [not has_rope for has_rope in have_rope]
    num_full = layer_number(
        {"max_window_layers": _DEFAULT_WINDOW_LAYERS, **config}, "max_window_layers"
    )
    return [layer >= num_full for layer in range(num_layers)]


def _check_layer_types(config: Mapping[str, Any], slide: Sequence[bool]) -> None:
    """Raises UnsupportedModel if the key `layer_types` contradicts the other keys of the config.
    `slide` says for each layer whether the other keys give it a sliding window."""
    kinds = config.get("layer_types")
    if kinds is None:
        return
    if [_slides(kind) for kind in one_per_layer(kinds, "layer_types", len(slide))] != list(slide):
        raise UnsupportedModel(
            f"layer_types is {kinds!r:.80}; it contradicts the rest of the config: the "
            "architecture, sliding_window and use_sliding_window together give "
            f"{sum(slide)} of {len(slide)} layers a sliding window"
        )


def _slides(kind: object) -> bool:
    if kind not in (_FULL, _SLIDING):
        raise UnsupportedModel(
            f"layer_types has {kind!r:.80}, which is not supported; supported are {_FULL} and "
            f"{_SLIDING}"
        )
    return kind == _SLIDING


def _window(config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window")
    if window is None or (type(window) is int and window >= 1):
        return window
    raise UnsupportedModel(
        f"sliding_window is {window!r:.80}; it must be a positive number of tokens or null"
    )
