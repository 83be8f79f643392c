"""Reads the rotary positions of layers from config.json; the kernels do the arithmetic.

Both spellings are understood: transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5
one `rope_parameters`. Numbers that files leave out are filled in here as transformers does
(`modeling_rope_utils.py`), so that nobody downstream needs defaults.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tandem.errors import UnsupportedModel
from tandem.models.config.fields import flag, number, optional_number, optional_size, size

_KINDS = ("full_attention", "sliding_attention")
_LOCAL_THETA = 10000.0  # of layers with a window, where config.json says nothing (Gemma 3)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of the rotary frequencies. Fields past `factor` that a kind does not use are neutral.

    linear: positions divided by `factor`.
    llama3: wavelengths beyond `original_max_position_embeddings / low_freq_factor` divided by
        `factor`, those below `/ high_freq_factor` kept, between them interpolated.
    yarn: frequencies blended between kept and divided by `factor` over the dimensions that turn
        `beta_fast` to `beta_slow` times in the original context, the borders rounded outwards
        when `truncate`; cos and sin times `attention_factor` (https://arxiv.org/abs/2309.00071).
    longrope: each frequency divided by a number of its own: one of `short_factors` if contexts are
        at most the original one, else one of `long_factors`; cos and sin times `attention_factor`
        (https://arxiv.org/abs/2402.13753).
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
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

    def max_model_len(self, max_position_embeddings: int) -> int:
        """Returns the context in tokens, from what the config says without its scaling.

        As in vLLM: llama3 and longrope state the scaled length itself, linear and yarn the unscaled
        one.
        """
        if self.kind == "linear":
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return int(self.original_max_position_embeddings * self.factor)
        return max_position_embeddings


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary positions of a layer."""

    theta: float | None  # None: the layer has no positions (NoPE)
    scaling: RopeScaling | None = None
    rotary_share: float = 1.0  # of each head's numbers, the first of them
    is_long: bool = False  # of longrope's factors the long ones are used

    def for_contexts(self, max_model_len: int) -> "Rope":
        """Returns the rope for contexts of at most so many tokens."""
        scaling = self.scaling
        if scaling is None or scaling.kind != "longrope":
            return self
        is_long = max_model_len > scaling.original_max_position_embeddings
        return replace(self, is_long=is_long)

    def rotary_dim(self, head_dim: int) -> int:
        """Returns how many numbers of a head are rotated."""
        return int(head_dim * self.rotary_share)

    @property
    def attention_factor(self) -> float:
        """The factor on cos and sin."""
        return self.scaling.attention_factor if self.scaling else 1.0


NO_ROPE = Rope(None)


def read_ropes(
    config: Mapping[str, Any], *, default_theta: float, by_kind: bool = False
) -> dict[str, Rope]:
    """Returns the rope of each kind of layers: full_attention and sliding_attention.

    by_kind: layers with a window have a rope of their own (Gemma 3): the one that nested
        rope_parameters name, or `rope_local_base_freq` without scaling.

    Raises UnsupportedModel naming what cannot be run.
    """
    if not by_kind:
        return dict.fromkeys(_KINDS, read_rope(config, default_theta=default_theta))
    given = _object(config, "rope_parameters")
    scaling = _object(config, "rope_scaling")
    plain = {**config, "rope_scaling": None, "rope_parameters": None}
    local = plain | {"rope_theta": config.get("rope_local_base_freq")}
    if not given:
        full, sliding = plain | {"rope_scaling": scaling}, local
    elif scaling or not given.keys() <= set(_KINDS):
        raise UnsupportedModel(
            "rope_parameters of this architecture must have full_attention and sliding_attention, "
            "and nothing beside them; rope_scaling must be absent then"
        )
    else:
        full, sliding = (
            {**base, "rope_parameters": _object(given, kind)}
            for base, kind in zip((plain, local), _KINDS, strict=True)
        )
    ropes = (
        read_rope(full, default_theta=default_theta),
        read_rope(sliding, default_theta=_LOCAL_THETA),
    )
    return dict(zip(_KINDS, ropes, strict=True))


def read_rope(config: Mapping[str, Any], *, default_theta: float = 10000.0) -> Rope:
    """Returns the rope that all layers of a config.json share. Raises UnsupportedModel."""
    parameters = rope_parameters(config)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModel(
            "rope parameters per layer type are not supported; one set for all layers is"
        )
    theta = optional_number(
        parameters, "rope_theta", optional_number(config, "rope_theta", default_theta)
    )
    partial = optional_number(
        parameters, "partial_rotary_factor", optional_number(config, "partial_rotary_factor", 1.0)
    )
    if partial > 1:
        raise UnsupportedModel(f"partial_rotary_factor is {partial}; it must be at most 1")
    # Phi-3 has it outside, where it comes first in transformers, too.
    outside = config.get("original_max_position_embeddings")
    if outside is not None:
        parameters["original_max_position_embeddings"] = outside
    return Rope(theta, _read_scaling(parameters, size(config, "max_position_embeddings")), partial)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a config.json says, in either spelling. Raises UnsupportedModel if it has both
    and they differ: transformers takes one of them, and other programs the other one."""
    new, old = _object(config, "rope_parameters"), _object(config, "rope_scaling")
    if new and old and _with_theta(new, config) != _with_theta(old, config):
        raise UnsupportedModel(
            "rope_parameters and rope_scaling say different things; only one can be right"
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
    if parameters.get("truncate", True) is None:  # false to transformers
        raise UnsupportedModel("truncate is None; it must be true or false")
    return flag(parameters, "truncate", True)


def _factors(parameters: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = parameters.get(name)
    if isinstance(values, list) and all(isinstance(v, int | float) and v > 0 for v in values):
        return tuple(map(float, values))
    raise UnsupportedModel(f"rope scaling 'longrope' needs {name}, a list of numbers > 0")


def _number(parameters: Mapping[str, Any], kind: str, name: str) -> float:
    if parameters.get(name) is None:
        raise UnsupportedModel(f"rope scaling {kind!r} needs {name} > 0")
    return number(parameters, name, 0.0)


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    of_score, of_all = parameters.get("mscale") or None, parameters.get("mscale_all_dim") or None
    grown = yarn_scale(factor, 1.0)
    if of_score is not None and of_all is not None:
        grown = yarn_scale(factor, number(parameters, "mscale", 1.0)) / yarn_scale(
            factor, number(parameters, "mscale_all_dim", 1.0)
        )
    return optional_number(parameters, "attention_factor", grown)


def yarn_scale(factor: float, mscale: float) -> float:
    """Returns what contexts that are longer by a factor let scores grow by."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
