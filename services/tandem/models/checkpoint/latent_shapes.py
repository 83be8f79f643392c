"""The tensors of latent attention in checkpoints.

self_attn.q_proj.weight                     [heads * (plain + rope), hidden]    without a q rank
self_attn.q_a_proj.weight, .bias            [q rank, hidden]                    else
self_attn.q_a_layernorm.weight              [q rank]
self_attn.q_b_proj.weight                   [heads * (plain + rope), q rank]
self_attn.kv_a_proj_with_mqa.weight, .bias  [kv rank + rope, hidden]
self_attn.kv_a_layernorm.weight             [kv rank]
self_attn.kv_b_proj.weight                  [heads * (plain + value), kv rank]  or, in GGUF files
self_attn.k_b_proj.weight                   [heads, kv rank, plain]
self_attn.v_b_proj.weight                   [heads, value, kv rank]
self_attn.o_proj.weight, .bias              [hidden, heads * value]
"""

from collections.abc import Collection

from tandem.models.checkpoint.expert_names import Shapes
from tandem.models.config import ModelConfig
from tandem.models.latent import Latent

_WHOLE, _KEYS, _VALUES = (f"self_attn.{part}_b_proj.weight" for part in ("kv", "k", "v"))


def latent_shapes(
    config: ModelConfig, latent: Latent, layer: str, stored: Collection[str]
) -> Shapes:
    """Returns the shapes of attention of the layer with this name, in the form of the stored
    tensors."""
    hidden, heads, has_bias = config.hidden_size, config.num_attention_heads, config.qkv_bias
    shapes: Shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (latent.kv_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.kv_rank,),
        "self_attn.o_proj.weight": (hidden, heads * latent.value_dim),
    }
    if f"{layer}.{_KEYS}" in stored:
        shapes[_KEYS] = (heads, latent.kv_rank, latent.plain_dim)
        shapes[_VALUES] = (heads, latent.value_dim, latent.kv_rank)
    else:
        shapes[_WHOLE] = (heads * (latent.plain_dim + latent.value_dim), latent.kv_rank)
    if has_bias:
        shapes["self_attn.kv_a_proj_with_mqa.bias"] = (latent.kv_dim,)
    if config.attention_out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if latent.q_rank is None:
        shapes["self_attn.q_proj.weight"] = (heads * latent.q_dim, hidden)
        return shapes
    shapes["self_attn.q_a_proj.weight"] = (latent.q_rank, hidden)
    if has_bias:
        shapes["self_attn.q_a_proj.bias"] = (latent.q_rank,)
    shapes["self_attn.q_a_layernorm.weight"] = (latent.q_rank,)
    shapes["self_attn.q_b_proj.weight"] = (heads * latent.q_dim, latent.q_rank)
    return shapes
