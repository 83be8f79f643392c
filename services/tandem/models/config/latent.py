"""Latent attention, as a config.json says it (arXiv:2405.04434).

A token keeps one latent vector and one rotated key, which all heads share. A head's own key and
value are products of the latent, and never made: queries are brought into the latent's space
instead, and attended latents out of it.

    latent, key = W_a x        of a token; the latent normalized, the key rotated: its KV
    score       = (W_k^T q) . latent + rotated q . key        of each head, with its W_k and W_v
    out         = W_v (sum of weight * latent)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.common.dtypes import RotatedKey, is_quantized
from tandem.errors import UnsupportedModel
from tandem.models.config.families import Family
from tandem.models.config.fields import flag, number, size
from tandem.models.config.rope import rope_parameters, yarn_scale


@dataclass(frozen=True, slots=True)
class Latent:
    """The sizes of latent attention, in numbers of a token or of one of its heads."""

    kv_rank: int  # of the latent
    rope_dim: int  # of the rotated key, and of the part of a query that meets it
    plain_dim: int  # of the part of a query that meets the latent
    value_dim: int  # of a head's value
    q_rank: int | None  # of a latent that queries are made of; None: they are made of the token
    has_pairs: bool  # the two numbers that are rotated together are stored side by side
    scale: float  # of scores

    @property
    def kv_dim(self) -> int:
        """Numbers of a token's KV in a layer."""
        return self.kv_rank + self.rope_dim

    @property
    def q_dim(self) -> int:
        """Numbers of a head's query before it is brought into the latent's space."""
        return self.plain_dim + self.rope_dim

    def rotated_key(self, kv_dtype: str, computed_dtype: str) -> RotatedKey | None:
        """Returns what a row of KV keeps as it is computed; None if it quantizes nothing."""
        return RotatedKey(self.rope_dim, computed_dtype) if is_quantized(kv_dtype) else None


def read_latent(config: Mapping[str, Any], family: Family) -> Latent | None:
    """Returns the sizes; None for a family without it. Raises UnsupportedModel."""
    if not family.is_latent:
        return None
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise UnsupportedModel(
            f"num_key_value_heads is {kv_heads!r:.80}; with latent attention it must be "
            f"num_attention_heads, {heads}, or null"
        )
    plain, rope = size(config, "qk_nope_head_dim"), size(config, "qk_rope_head_dim")
    if rope % 2:
        raise UnsupportedModel(f"qk_rope_head_dim is {rope}; it must be an even number")
    return Latent(
        kv_rank=size(config, "kv_lora_rank"),
        rope_dim=rope,
        plain_dim=plain,
        value_dim=size(config, "v_head_dim"),
        q_rank=None if config.get("q_lora_rank") is None else size(config, "q_lora_rank"),
        has_pairs=flag(config, "rope_interleave", "rope_interleave" not in config),
        scale=(plain + rope) ** -0.5 * _scale_of_rope(config),
    )


def _scale_of_rope(config: Mapping[str, Any]) -> float:
    """Returns what the scaling of positions adds to the scale of scores."""
    parameters = rope_parameters(config)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    if parameters.get("factor") is None:
        raise UnsupportedModel(f"rope scaling {kind!r:.80} has mscale_all_dim and needs factor")
    factor = number(parameters, "factor", 1.0)
    return yarn_scale(factor, number(parameters, "mscale_all_dim", 1.0)) ** 2
