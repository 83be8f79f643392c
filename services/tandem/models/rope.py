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
    given = config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        full, sliding = (
            {**config, "rope_scaling": None, "rope_parameters": given.get(kind)} for kind in _KINDS
        )
    else:
        full, sliding = dict(config), {**config, "rope_scaling": None, "rope_parameters": None}
        sliding["rope_theta"] = config.get("rope_local_base_freq")
    ropes = (
        read_rope(full, default_theta=default_theta),
        read_rope(sliding, default_theta=_LOCAL_THETA),
    )
    return dict(zip(_KINDS, ropes, strict=True))


def read_rope(config: Mapping[str, Any], *, default_theta: float = 10000.0) -> Rope:
    """Returns the rope that all layers of a config.json share. Raises UnsupportedModel."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModel(
            "rope parameters per layer type are not supported; one set for all layers is"
        )
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or default_theta)
    partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise UnsupportedModel(
            f"partial_rotary_factor is {partial!r:.80}; it must be within 0 to 1"
        )
    # Phi-3 has it outside.
    parameters.setdefault(
        "original_max_position_embeddings", config.get("original_max_position_embeddings")
    )
    scaling = _read_scaling(parameters, int(config["max_position_embeddings"]))
    return Rope(theta, scaling, float(partial))


def _read_scaling(parameters: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind in ("default", "none"):
        return None
    original = int(parameters.get("original_max_position_embeddings") or max_positions)
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
        factor = float(parameters.get("factor") or max_positions / original)
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=float(parameters.get("beta_fast") or 32),
            beta_slow=float(parameters.get("beta_slow") or 1),
            attention_factor=_yarn_attention_factor(parameters, factor),
            truncate=bool(parameters.get("truncate", True)),
        )
    if kind in ("longrope", "su"):
        return RopeScaling(
            kind="longrope",
            factor=float(parameters.get("factor") or max_positions / original),
            original_max_position_embeddings=original,
            attention_factor=_longrope_attention_factor(parameters, max_positions, original),
            short_factors=_factors(parameters, "short_factor"),
            long_factors=_factors(parameters, "long_factor"),
        )
    raise UnsupportedModel(
        f"rope scaling {kind!r} is not supported; supported are linear, llama3, yarn and longrope"
    )


def _factors(parameters: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = parameters.get(name)
    if isinstance(values, list) and all(isinstance(v, int | float) and v > 0 for v in values):
        return tuple(map(float, values))
    raise UnsupportedModel(f"rope scaling 'longrope' needs {name}, a list of numbers > 0")


def _longrope_attention_factor(
    parameters: Mapping[str, Any], max_positions: int, original: int
) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = float(parameters.get("factor") or max_positions / original)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _number(parameters: Mapping[str, Any], kind: str, name: str) -> float:
    value = parameters.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise UnsupportedModel(f"rope scaling {kind!r} needs {name} > 0; config.json has {value!r}")
    return float(value)


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
    """Returns what contexts that are longer by a factor let scores grow by."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
