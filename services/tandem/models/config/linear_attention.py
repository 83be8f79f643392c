"""Reads the sizes of layers with linear attention from config.json.

Such a layer keeps a *state* in place of keys and values. The state has the same size for any number
of tokens. Gated DeltaNet (https://arxiv.org/abs/2412.06464) has a matrix S [key dim, value dim] for
each value head, and computes for each token, with a decay a and a rate b of the token and the head:

    S = a S                                 the decay, 0 < a < 1
    S = S + b k (v - k S)                   stores the value v under the key k
    output = q S

Several value heads may share one key head. Before this, a causal convolution mixes each channel of
q, k and v with the same channel of the last tokens. So the state also has the last inputs of the
convolution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.config.fields import size


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The sizes of a Gated DeltaNet layer. `group` value heads share one key head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # number of tokens that the convolution mixes, including the current one
    # True: checkpoints have one matrix for q, k, v and z, and one for b and a.
    is_joined: bool = False

    @property
    def group(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def sections(self) -> list[int]:
        """Number of channels of q, k and v, which a convolution has in this order."""
        num_keys = self.num_key_heads * self.key_dim
        return [num_keys, num_keys, self.num_value_heads * self.value_dim]

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: q, k and v of all heads."""
        return sum(self.sections)


def read_gated_delta(config: Mapping[str, Any], *, is_joined: bool) -> GatedDelta:
    """Raises UnsupportedModel naming the field that is not supported."""
    sizes = GatedDelta(
        num_key_heads=size(config, "linear_num_key_heads"),
        num_value_heads=size(config, "linear_num_value_heads"),
        key_dim=size(config, "linear_key_head_dim"),
        value_dim=size(config, "linear_value_head_dim"),
        kernel=size(config, "linear_conv_kernel_dim"),
        is_joined=is_joined,
    )
    if sizes.num_value_heads % sizes.num_key_heads:
        raise UnsupportedModel(
            f"linear_num_key_heads is {sizes.num_key_heads}; it must divide "
            f"linear_num_value_heads, {sizes.num_value_heads}"
        )
    # A value head's part of a state has an equal share of the channels of its key head.
    if sizes.key_dim % sizes.group:
        raise UnsupportedModel(
            f"{sizes.group} value heads share each key head; this number must divide "
            f"linear_key_head_dim, which is {sizes.key_dim}"
        )
    if sizes.kernel < 2:
        raise UnsupportedModel(f"linear_conv_kernel_dim is {sizes.kernel}; it must be at least 2")
    return sizes
