"""Reads the sizes of layers that keep a *state* from config.json.

A state has the same size for any number of tokens. It has a matrix for each head, and the last
inputs of a causal convolution, which mixes each channel with the same channel of the last tokens.
There are four kinds:

Gated DeltaNet (https://arxiv.org/abs/2412.06464) has a matrix S [key dim, value dim] for each value
head, and computes for each token, with a decay a and a rate b of the token and the head:

    S = a S                                 the decay, 0 < a < 1
    S = S + b k (v - k S)                   stores the value v under the key k
    output = q S

Several value heads may share one key head. Before this, the convolution mixes the channels of q, k
and v.

Kimi Delta Attention (https://arxiv.org/abs/2510.26692) is Gated DeltaNet with a decay for each key
channel of a head: S = diag(a) S. The inputs of the decays and of the output gates are products of
two narrow matrices each.

Mamba 2 (https://arxiv.org/abs/2405.21060) has S = a S + k v and output = q S, where q, k and v are
called C, B and x. Several heads may share one q and k.

A short convolution (LFM2) has no matrix. Its state is only the convolution's last inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from tandem.errors import UnsupportedModel
from tandem.models.config.families import Family
from tandem.models.config.fields import flag, optional_size, size


class _Convolution:
    """The channels of a layer's convolution."""

    __slots__ = ()

    @property
    def sections(self) -> list[int]:
        """Number of channels of each part of the convolution's input, in their order."""
        raise NotImplementedError

    @property
    def num_heads(self) -> int:
        """Number of matrices in a state."""
        raise NotImplementedError

    @property
    def num_k_heads(self) -> int:
        """Number of heads of q and k, each of which several matrices may share."""
        raise NotImplementedError

    def shares_nothing(self, num_ranks: int) -> bool:
        """Returns whether each rank can have whole heads of q and k, and whether its part of the
        state then has exactly the channels of these heads. Otherwise ranks share some."""
        nums = (self.num_heads, self.num_k_heads)
        return not any(num % num_ranks for num in nums) and not any(
            num % self.num_heads for num in self.sections
        )

    @property
    def num_channels(self) -> int:
        return sum(self.sections)

    @property
    def head_sections(self) -> list[int]:
        """Number of channels of each section that a head's part of the state has room for. If the
        heads cannot share a section equally, the last heads have fewer channels than room."""
        return [-(-num // self.num_heads) for num in self.sections]

    def channels_of(self, heads: range) -> list[range]:
        """Returns the channels of each section that these heads' parts of the state have."""
        return [
            range(min(num, heads.start * each), min(num, heads.stop * each))
            for num, each in zip(self.sections, self.head_sections, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class GatedDelta(_Convolution):
    """The sizes of a Gated DeltaNet layer. `group` value heads share one key head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # number of tokens that the convolution mixes, including the current one
    # The matrices of checkpoints:
    #   "": one for q, k and v, and one for each of z, b and a
    #   "joined": one for q, k, v and z, and one for b and a
    #   "apart": one for each
    form: Literal["", "joined", "apart"] = ""
    rate_max: float = 1.0  # factor on the rates b. With 2, a token can turn a stored value around.
    norm_eps: float | None = None  # epsilon in the norm of the output; None: the model's

    @property
    def group(self) -> int:
        return self.num_value_heads // self.num_key_heads

    def of_rank(self, num_ranks: int) -> GatedDelta:
        """Returns the sizes of a rank's heads, if ranks share nothing."""
        return replace(
            self,
            num_key_heads=self.num_key_heads // num_ranks,
            num_value_heads=self.num_value_heads // num_ranks,
        )

    @property
    def num_heads(self) -> int:
        return self.num_value_heads

    @property
    def num_k_heads(self) -> int:
        return self.num_key_heads

    @property
    def sections(self) -> list[int]:
        """Number of channels of q, k and v."""
        num_keys = self.num_key_heads * self.key_dim
        return [num_keys, num_keys, self.num_value_heads * self.value_dim]

    @property
    def num_outputs(self) -> int:
        """Number of elements of the layer's output before its last matrix."""
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class KimiDelta(_Convolution):
    """The sizes of a Kimi Delta Attention layer. Keys, values and the inner size of the narrow
    matrices have `dim` elements."""

    num_delta_heads: int
    dim: int
    kernel: int

    @property
    def num_heads(self) -> int:
        return self.num_delta_heads

    @property
    def num_k_heads(self) -> int:
        return self.num_delta_heads

    @property
    def key_dim(self) -> int:
        return self.dim

    @property
    def value_dim(self) -> int:
        return self.dim

    @property
    def sections(self) -> list[int]:
        """Number of channels of q, k and v."""
        return [self.num_outputs] * 3

    @property
    def num_outputs(self) -> int:
        return self.num_heads * self.dim


@dataclass(frozen=True, slots=True)
class Mamba2(_Convolution):
    """The sizes of a Mamba 2 layer. `key_dim` is the size of B and C, `value_dim` that of a head of
    x. Heads of a group share B and C, and a norm of the output."""

    num_mamba_heads: int
    num_groups: int
    key_dim: int
    value_dim: int
    kernel: int
    has_conv_bias: bool
    has_biases: bool  # True: the first and the last matrix have biases.
    has_norm: bool = True  # False: the output is only multiplied by the gates.

    @property
    def num_heads(self) -> int:
        return self.num_mamba_heads

    @property
    def num_k_heads(self) -> int:
        return self.num_groups

    @property
    def sections(self) -> list[int]:
        """Number of channels of x, B and C."""
        num_keys = self.num_groups * self.key_dim
        return [self.num_outputs, num_keys, num_keys]

    @property
    def num_outputs(self) -> int:
        return self.num_heads * self.value_dim


_CONV_HEAD = 64  # channels of a head of a short convolution


@dataclass(frozen=True, slots=True)
class ShortConv(_Convolution):
    """The sizes of a layer that is only a convolution: output = C * convolution(B * x). A head is
    some neighbouring channels, so that ranks can share the state."""

    num_outputs: int  # number of channels, also of each of B, C and x
    kernel: int
    has_biases: bool  # True: the convolution and both matrices have biases.
    key_dim: int = 0
    value_dim: int = 0

    @property
    def num_heads(self) -> int:
        return 1 if self.num_outputs % _CONV_HEAD else self.num_outputs // _CONV_HEAD

    @property
    def num_k_heads(self) -> int:
        return self.num_heads  # There are no q and k that heads could share.

    @property
    def sections(self) -> list[int]:
        return [self.num_outputs]


LinearAttention = GatedDelta | KimiDelta | Mamba2 | ShortConv


def read_linear(config: Mapping[str, Any], family: Family) -> LinearAttention:
    """Returns the sizes of the layers with a state. Raises UnsupportedModel naming the field that
    is not supported."""
    if family.linear == "short_conv":
        conv = ShortConv(
            num_outputs=size(config, "hidden_size"),
            kernel=size(config, "conv_L_cache"),
            has_biases=flag(config, "conv_bias"),
        )
        _check_kernel(conv.kernel, "conv_L_cache")
        return conv
    if family.linear == "mamba2":
        return _read_mamba2(config, family)
    if family.linear == "kimi_delta":
        kimi = KimiDelta(
            num_delta_heads=size(config, "linear_num_heads"),
            dim=size(config, "linear_head_dim"),
            kernel=size(config, "linear_conv_kernel_dim"),
        )
        _check_kernel(kimi.kernel, "linear_conv_kernel_dim")
        return kimi
    return _read_gated_delta(config, family)


def _read_gated_delta(config: Mapping[str, Any], family: Family) -> GatedDelta:
    form: Literal["", "joined", "apart"] = ""
    is_olmo = family.linear == "gated_delta_apart"
    if is_olmo:
        form = "apart"
        config = _with_olmo_sizes(config)
    elif family.linear == "gated_delta_joined":
        form = "joined"
    sizes = GatedDelta(
        num_key_heads=size(config, "linear_num_key_heads"),
        num_value_heads=size(config, "linear_num_value_heads"),
        key_dim=size(config, "linear_key_head_dim"),
        value_dim=size(config, "linear_value_head_dim"),
        kernel=size(config, "linear_conv_kernel_dim"),
        form=form,
        rate_max=2.0 if is_olmo and flag(config, "linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5 if is_olmo else None,
    )
    if sizes.num_value_heads % sizes.num_key_heads:
        raise UnsupportedModel(
            f"linear_num_key_heads is {sizes.num_key_heads}; it must divide "
            f"linear_num_value_heads, {sizes.num_value_heads}"
        )
    # A value head's part of a state has an equal share of the channels of its key head.
    if sizes.key_dim % sizes.group:
        raise UnsupportedModel(
            f"linear_key_head_dim is {sizes.key_dim}; it must be a multiple of {sizes.group}, the "
            "number of value heads for each key head"
        )
    _check_kernel(sizes.kernel, "linear_conv_kernel_dim")
    return sizes


def _with_olmo_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with the sizes that OLMo Hybrid has if they are absent or null."""
    num_heads = size(config, "num_attention_heads")
    num_keys = optional_size(config, "linear_num_key_heads", num_heads)
    key_dim = optional_size(
        config, "linear_key_head_dim", int(0.75 * size(config, "hidden_size") / num_keys)
    )
    return {
        **config,
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": optional_size(config, "linear_num_value_heads", num_heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": optional_size(config, "linear_value_head_dim", 2 * key_dim),
    }


def _read_mamba2(config: Mapping[str, Any], family: Family) -> Mamba2:
    has_norm = not family.has_parallel_state or flag(config, "mamba_rms_norm")
    if family.has_parallel_state and has_norm and flag(config, "mamba_norm_before_gate", True):
        raise UnsupportedModel(
            "mamba_norm_before_gate is true, which is not supported with mamba_rms_norm"
        )
    sizes = Mamba2(
        num_mamba_heads=size(config, "mamba_n_heads"),
        num_groups=size(config, "mamba_n_groups"),
        key_dim=size(config, "mamba_d_state"),
        value_dim=(size(config, "mamba_d_head") if family.has_single_parts else _head_size(config)),
        kernel=size(config, "mamba_d_conv"),
        has_conv_bias=flag(config, "mamba_conv_bias"),
        has_biases=flag(config, "mamba_proj_bias"),
        has_norm=has_norm,
    )
    if sizes.num_heads % sizes.num_groups:
        raise UnsupportedModel(
            f"mamba_n_groups is {sizes.num_groups}; it must divide mamba_n_heads, {sizes.num_heads}"
        )
    _check_kernel(sizes.kernel, "mamba_d_conv")
    # transformers limits the steps of a prompt, but not those of single tokens.
    limits = config.get("time_step_limit")
    if limits not in (None, [0.0, inf], [0.0, {"__float__": "Infinity"}]):
        raise UnsupportedModel(
            f"time_step_limit is {limits!r:.80}, which is not supported; it must be [0, Infinity]"
        )
    return sizes


def _head_size(config: Mapping[str, Any]) -> int:
    """Returns the size of a head of x. It follows from `mamba_d_ssm` or `mamba_expand`, and must be
    what `mamba_d_head` says."""
    num_heads = size(config, "mamba_n_heads")
    expanded = size(config, "mamba_expand") * size(config, "hidden_size")
    num_outputs = optional_size(config, "mamba_d_ssm", expanded)
    given = config.get("mamba_d_head", "auto")
    if num_outputs % num_heads or given not in ("auto", num_outputs // num_heads):
        raise UnsupportedModel(
            f"mamba_n_heads is {num_heads} and mamba_d_head {given!r:.80}; their product must be "
            f"mamba_d_ssm or mamba_expand x hidden_size, {num_outputs}"
        )
    return num_outputs // num_heads


def _check_kernel(kernel: int, key: str) -> None:
    if kernel < 2:
        raise UnsupportedModel(f"{key} is {kernel}; it must be at least 2")
