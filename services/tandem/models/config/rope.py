"""Reads RoPE parameters from config.json; the kernels do the arithmetic.

Both formats are supported: transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5
writes one `rope_parameters`. Absent values get the defaults of transformers
(`modeling_rope_utils.py`), so other modules need no defaults.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tandem.errors import UnsupportedModel
from tandem.models.config.fields import flag, number, optional_number, optional_size, size

_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """A factor on the queries that grows with the position (Llama 4):
    1 + scale * ln(1 + floor((position + offset) / length))."""

    scale: float
    length: int  # tokens
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of the RoPE frequencies for contexts longer than the original context, which has
    `original_max_position_embeddings` tokens. Fields that a kind of scaling does not use keep their
    defaults.

    linear: all frequencies are divided by `factor`.
    llama3: the wavelength of a frequency, which is the number of tokens for one turn, decides:
        above original context / `low_freq_factor`: the frequency is divided by `factor`;
        below original context / `high_freq_factor`: the frequency is kept;
        between: the result is interpolated.
    yarn: the number of turns in the original context decides:
        more than `beta_fast`: the frequency is kept;
        fewer than `beta_slow`: the frequency is divided by `factor`;
        between: the result is interpolated. With `truncate`, the ends of this range are rounded
            outwards to whole dimensions of the head.
        cos and sin are multiplied by `attention_factor` (https://arxiv.org/abs/2309.00071).
    longrope: each frequency is divided by a factor of its own. The factors are `short_factors` if
        the maximum context is at most the original context, else `long_factors`. cos and sin are
        multiplied by `attention_factor` (https://arxiv.org/abs/2402.13753).
    proportional: frequencies are those of the whole head, divided by `factor`. Only the first
        `proportion` of them is used, and the other elements are not rotated (Gemma 4).
    alpha: theta is multiplied by factor ^ (D / (D - 2)), where D is the size of a head (Hunyuan).
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "alpha", "proportional"]
    factor: float
    original_max_position_embeddings: int = 0  # tokens
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    proportion: float = 1.0

    def max_model_len(self, max_position_embeddings: int) -> int:
        """Returns the model's context in tokens, given `max_position_embeddings` of config.json.

        As in vLLM, `max_position_embeddings` includes the scaling factor if the kind is llama3 or
        longrope, and not if the kind is linear or yarn. For example, a linear factor of 4 and 2048
        positions give a context of 8192 tokens.
        """
        if self.kind == "linear":
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return int(self.original_max_position_embeddings * self.factor)
        return max_position_embeddings


@dataclass(frozen=True, slots=True)
class Rope:
    """The RoPE parameters of a layer."""

    theta: float | None  # base of the rotation frequencies; None: the layer has no RoPE (NoPE)
    scaling: RopeScaling | None = None
    # Fraction of a head's elements that RoPE rotates. With 0.25 it is the first quarter of them.
    rotary_share: float = 1.0
    is_long: bool = False  # True: longrope uses `long_factors`.
    query_scaling: QueryScaling | None = None  # None: queries are not scaled by position.

    def for_contexts(self, max_model_len: int) -> "Rope":
        """Returns the parameters for contexts of at most `max_model_len` tokens."""
        scaling = self.scaling
        if scaling is None or scaling.kind != "longrope":
            return self
        is_long = max_model_len > scaling.original_max_position_embeddings
        return replace(self, is_long=is_long)

    def rotary_dim(self, head_dim: int) -> int:
        """Returns the number of elements of a head that are rotated."""
        return int(head_dim * self.rotary_share)

    @property
    def attention_factor(self) -> float:
        """Factor on cos and sin."""
        return self.scaling.attention_factor if self.scaling else 1.0


NO_ROPE = Rope(None)


def read_ropes(
    config: Mapping[str, Any],
    *,
    default_theta: float,
    by_kind: bool = False,
    local_theta: float = 10000.0,
) -> dict[str, Rope]:
    """Returns the RoPE parameters by layer kind: full_attention and sliding_attention.

    by_kind: False: both kinds have the same parameters. True: each kind has its own (Gemma 3).
        Layers with a window then use `rope_parameters["sliding_attention"]`. If `rope_parameters`
        is absent, they use the frequency base `rope_local_base_freq` and no scaling. If no
        frequency base is given, they use `local_theta`.

    Raises UnsupportedModel naming the field that is not supported.
    """
    if not by_kind:
        return dict.fromkeys(_KINDS, read_rope(config, default_theta=default_theta))
    given = _object(config, "rope_parameters")
    scaling = _object(config, "rope_scaling")
    plain = {**config, "rope_scaling": None, "rope_parameters": None}
    local = plain | {"rope_theta": config.get("rope_local_base_freq")}
    if not given:
        full = plain | {"rope_scaling": scaling}
        sliding = local
    elif scaling or not given.keys() <= set(_KINDS):
        raise UnsupportedModel(
            "for this architecture, rope_parameters may have only the keys full_attention "
            "and sliding_attention. rope_parameters and rope_scaling must not be set "
            "together"
        )
    else:
        # As in transformers, the length outside of them is only for parameters of all layers.
        own = {"original_max_position_embeddings": None}
        full, sliding = (
            {**base, **own, "rope_parameters": _object(given, kind)}
            for base, kind in zip((plain, local), _KINDS, strict=True)
        )
    ropes = (
        read_rope(full, default_theta=default_theta),
        read_rope(sliding, default_theta=local_theta),
    )
    return dict(zip(_KINDS, ropes, strict=True))


def read_rope(config: Mapping[str, Any], *, default_theta: float = 10000.0) -> Rope:
    """Returns the RoPE parameters of a config.json in which all layers have the same parameters.
    Raises UnsupportedModel."""
    parameters = rope_parameters(config)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModel(
            "rope parameters for each layer type are not supported; all layers must have the "
            "same rope parameters"
        )
    theta = optional_number(
        parameters, "rope_theta", optional_number(config, "rope_theta", default_theta)
    )
    partial = optional_number(
        parameters, "partial_rotary_factor", optional_number(config, "partial_rotary_factor", 1.0)
    )
    if partial > 1:
        raise UnsupportedModel(f"partial_rotary_factor is {partial}; it must be at most 1")
    # Phi-3 has this key at the top level of config.json. As in transformers, this value has
    # priority over the one in the RoPE parameters.
    outside = config.get("original_max_position_embeddings")
    if outside is not None:
        parameters["original_max_position_embeddings"] = outside
    scaling = _read_scaling(parameters, size(config, "max_position_embeddings"))
    if scaling is not None and scaling.kind == "proportional":
        return Rope(theta, replace(scaling, proportion=partial))
    return Rope(theta, scaling, partial)


def read_query_scaling(config: Mapping[str, Any]) -> QueryScaling:
    """Returns the factor on queries that `llama_4_scaling_beta` of the RoPE parameters describes.
    Raises UnsupportedModel."""
    parameters = rope_parameters(config)
    beta = _number(parameters, "yarn", "llama_4_scaling_beta")
    return QueryScaling(beta, size(parameters, "original_max_position_embeddings"))


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rope_parameters` or `rope_scaling` of a config.json. Raises UnsupportedModel if both
    are present and differ, because implementations disagree about which one is used."""
    new = _object(config, "rope_parameters")
    old = _object(config, "rope_scaling")
    if new and old and _with_theta(new, config) != _with_theta(old, config):
        raise UnsupportedModel(
            "rope_parameters and rope_scaling differ; make them equal, or remove the wrong one"
        )
    return new or old


def _with_theta(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    named = {"rope_type" if key == "type" else key: value for key, value in parameters.items()}
    return {"rope_theta": config.get("rope_theta")} | named


def _object(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise UnsupportedModel(f"{name} is {value!r:.80}; it must be an object")
    return dict(value or {})


def _read_scaling(parameters: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind in ("default", "none"):
        return None
    original = optional_size(parameters, "original_max_position_embeddings", max_positions)
    factor = optional_number(parameters, "factor", max_positions / original)
    if kind == "dynamic" and parameters.get("alpha"):
        return RopeScaling(kind="alpha", factor=_number(parameters, kind, "alpha"))
    if kind == "proportional":
        return RopeScaling(kind="proportional", factor=optional_number(parameters, "factor", 1.0))
    if kind == "linear":
        return RopeScaling(kind="linear", factor=_number(parameters, kind, "factor"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=_number(parameters, kind, "factor"),
            original_max_position_embeddings=original,
            low_freq_factor=_number(parameters, kind, "low_freq_factor"),
            high_freq_factor=_number(parameters, kind, "high_freq_factor"),
        )
    if kind == "yarn":
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=optional_number(parameters, "beta_fast", 32.0),
            beta_slow=optional_number(parameters, "beta_slow", 1.0),
            attention_factor=_yarn_attention_factor(parameters, factor),
            truncate=_truncate(parameters),
        )
    if kind in ("longrope", "su"):
        grown = 1.0
        if factor > 1:
            grown = math.sqrt(1 + math.log(factor) / math.log(original)) if original > 1 else 1.0
        return RopeScaling(
            kind="longrope",
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=optional_number(parameters, "attention_factor", grown),
            short_factors=_factors(parameters, "short_factor"),
            long_factors=_factors(parameters, "long_factor"),
        )
    raise UnsupportedModel(
        f"rope scaling {kind!r:.80} is not supported; supported are linear, llama3, yarn and "
        "longrope"
    )


def _truncate(parameters: Mapping[str, Any]) -> bool:
    # Null is refused: in transformers null means false, although an absent key means true.
    if parameters.get("truncate", True) is None:
        raise UnsupportedModel("truncate is null; it must be true or false")
    return flag(parameters, "truncate", True)


def _factors(parameters: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = parameters.get(name)
    if isinstance(values, list) and all(isinstance(v, int | float) and v > 0 for v in values):
        return tuple(map(float, values))
    raise UnsupportedModel(f"rope scaling 'longrope' needs {name}, a list of numbers > 0")


def _number(parameters: Mapping[str, Any], kind: str, name: str) -> float:
    if parameters.get(name) is None:
        raise UnsupportedModel(f"rope scaling {kind!r} needs {name}, a number > 0")
    return number(parameters, name, 0.0)


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    of_score = parameters.get("mscale") or None
    of_all = parameters.get("mscale_all_dim") or None
    grown = yarn_scale(factor, 1.0)
    if of_score is not None and of_all is not None:
        grown = yarn_scale(factor, number(parameters, "mscale", 1.0)) / yarn_scale(
            factor, number(parameters, "mscale_all_dim", 1.0)
        )
    return optional_number(parameters, "attention_factor", grown)


def yarn_scale(factor: float, mscale: float) -> float:
    """Returns YaRN's factor on cos and sin for a context that is `factor` times the original one:
    0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
