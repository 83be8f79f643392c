"""Checks GGUF keys that are not read but would change results.

config.py reads the keys that the supported architectures use. A file may have further keys, such as
an attention scale for another kind of model. Each further key must have a neutral value, which
changes nothing. Any other value raises UnsupportedModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tandem.errors import UnsupportedModel

if TYPE_CHECKING:
    from tandem.models.gguf.metadata import GgufMetadata

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "activation_sparsity_scale": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
_NEXTN: dict[str, tuple[Any, ...] | None] = {"nextn_predict_layers": None}
# Architecture -> key -> rule that replaces the key's rule in `_NEUTRAL`. None: another module reads
# the key, so every value is allowed here. Tuple: the allowed values.
_READ: Mapping[str, Mapping[str, tuple[Any, ...] | None]] = {
    "deepseek2": dict.fromkeys(
        (
            *("expert_gating_func", "expert_group_count", "expert_shared_count"),
            *("expert_weights_norm", "expert_weights_scale", "leading_dense_block_count"),
            "rope.scaling.yarn_log_multiplier",
        ),
        None,
    ),
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gpt-oss": {"expert_gating_func": (0, 1, 3)},
    "granite": dict.fromkeys(
        ("attention.scale", "embedding_scale", "logit_scale", "residual_scale"), None
    ),
    "phi3": {"rope.scaling.attn_factor": None},
    "cohere2": {"logit_scale": None},
    "ernie4_5-moe": dict.fromkeys(
        ("expert_shared_count", "interleave_moe_layer_step", "leading_dense_block_count"), None
    ),
    "exaone4": _NEXTN,
    "glm4": _NEXTN,
    "glm4moe": _NEXTN
    | dict.fromkeys(
        (
            *("expert_gating_func", "expert_group_count", "expert_shared_count"),
            *("expert_weights_norm", "expert_weights_scale", "leading_dense_block_count"),
        ),
        None,
    ),
    "hunyuan-moe": {"expert_shared_count": None},
    "minimax-m2": {"expert_gating_func": None},
    "qwen35": _NEXTN,
    "qwen35moe": _NEXTN,
}


def check_neutral(metadata: GgufMetadata) -> None:
    """Raises UnsupportedModel if a key that Tandem does not read has a value that would change the
    model's results. The error names the key."""
    of_all = {**_NEUTRAL, **_READ.get(metadata.architecture, {})}
    for key, allowed in of_all.items():
        if allowed is None or (value := metadata.of_model(key, None)) is None:
            continue
        if not any(value == each for each in allowed):
            raise UnsupportedModel(
                f"{metadata.architecture}.{key} is {value!r:.80}, which is not supported; "
                f"supported are {', '.join(map(str, allowed))}"
            )
