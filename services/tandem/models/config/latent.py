"""Sizes of multi-head latent attention (MLA), read from config.json (arXiv:2405.04434).

The KV of a token is one latent vector and one key, which all heads share. In DeepSeek V2 these have
512 and 64 elements. The keys and values of single heads are linear functions of the latent and are
never computed. Instead, queries are projected into the latent space, and the attention output is
projected out of it:

    latent, key = W_a x
    score       = scale * ((W_k^T q_plain) . latent + q_rope . key)
    output      = W_v (sum over tokens of softmax(scores) * latent)

The first line is computed once for each token; x is the token's hidden state. Then the latent is
normalized, and RoPE rotates the key. The other lines are computed for each head. W_k and W_v are
the head's matrices. q_rope is the part of the head's query that RoPE rotates, and q_plain is the
other part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandem.common.dtypes import RotatedKey, is_quantized
from tandem.errors import UnsupportedModel
from tandem.models.config.families import Family
from tandem.models.config.fields import flag, number, size
from tandem.models.config.rope import Rope, rope_parameters, yarn_scale


@dataclass(frozen=True, slots=True)
class Latent:
    """The sizes of latent attention, as numbers of elements per token or per head."""

    kv_rank: int  # size of the latent
    rope_dim: int  # size of the rotated key, and of the part of a head's query that RoPE rotates
    plain_dim: int  # size of the part of a head's query that RoPE does not rotate
    value_dim: int  # size of a head's value
    # Size of the latent vector from which queries are computed. None: queries are computed directly
    # from the hidden state.
    q_rank: int | None
    has_pairs: bool  # True: two elements that RoPE rotates together are stored side by side.
    scale: float  # factor on the attention scores

    @property
    def kv_dim(self) -> int:
        """Number of elements in one token's KV in one layer."""
        return self.kv_rank + self.rope_dim

    @property
    def q_dim(self) -> int:
        """Number of elements in a head's query before the projection into the latent space."""
        return self.plain_dim + self.rope_dim

    def whole_rope(self, rope: Rope) -> Rope:
        """Returns RoPE parameters for the rotated part of a query, given those for the whole query.
        Raises UnsupportedModel if `partial_rotary_factor` contradicts the sizes."""
        if rope.rotary_share != 1.0 and rope.rotary_dim(self.q_dim) != self.rope_dim:
            raise UnsupportedModel(
                f"partial_rotary_factor is {rope.rotary_share}; it must be "
                f"{self.rope_dim / self.q_dim}, because qk_rope_head_dim of a query's "
                "elements are rotated"
            )
        return replace(rope, rotary_share=1.0)

    def rotated_key(self, kv_dtype: str, computed_dtype: str) -> RotatedKey | None:
        """Returns the size and dtype of the rotated key in a quantized KV cache. Only the latent is
        quantized; the key keeps the compute dtype. Returns None if `kv_dtype` is not quantized."""
        return RotatedKey(self.rope_dim, computed_dtype) if is_quantized(kv_dtype) else None


def read_latent(config: Mapping[str, Any], family: Family) -> Latent | None:
    """Returns the sizes of latent attention; None for a family without it. Raises UnsupportedModel
    naming the field that is not supported."""
    if not family.is_latent:
        return None
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise UnsupportedModel(
            f"num_key_value_heads is {kv_heads!r:.80}; with latent attention it must be "
            f"null or equal num_attention_heads, {heads}"
        )
    plain = size(config, "qk_nope_head_dim")
    rope = size(config, "qk_rope_head_dim")
    if rope % 2:
        raise UnsupportedModel(f"qk_rope_head_dim is {rope}; it must be an even number")
    return Latent(
        kv_rank=size(config, "kv_lora_rank"),
        rope_dim=rope,
        plain_dim=plain,
        value_dim=size(config, "v_head_dim"),
        q_rank=None if config.get("q_lora_rank") is None else size(config, "q_lora_rank"),
        has_pairs=flag(config, "rope_interleave", "rope_interleave" not in config),
        scale=(plain + rope) ** -0.5 * _yarn_score_factor(config),
    )


def _yarn_score_factor(config: Mapping[str, Any]) -> float:
    """Returns the factor by which YaRN's `mscale_all_dim` multiplies attention scores."""
    parameters = rope_parameters(config)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    if parameters.get("factor") is None:
        raise UnsupportedModel(
            f"rope scaling {kind!r:.80} has mscale_all_dim but no factor; it must have both"
        )
    factor = number(parameters, "factor", 1.0)
    return yarn_scale(factor, number(parameters, "mscale_all_dim", 1.0)) ** 2
