"""The architectures that can be run: each is a row of data, named as config.json names it.

A row says what all models of the architecture have and what their config.json may leave out;
`config.py` and `layers.py` read the rest. docs/adding_a_model.md shows how a row is added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Norms = Literal["before", "after", "around"]
QkNorm = Literal["", "head", "all"]
Windows = Literal["none", "all", "chosen", "pattern"]


@dataclass(frozen=True, slots=True)
class Family:
    """The properties that models of one architecture share; the defaults are Llama's.

    norms: where attention and the MLP are normalized: before them, after them (before the residual
        is added), or both.
    norm_offset: what is added to the stored weights of norms.
    qk_norm: RMSNorm of q and k before the rotation: none, of each head, or of all heads as one.
    biases: whether q, k and v and the output have biases: as `attention_bias` says, q, k and v
        always and the output never, or none.
    windows: which layers have `sliding_window`: none; all; those chosen by layer_types and other
        keys if `use_sliding_window` is true; or by a pattern with a full layer at its end.
    pattern: the default length of that pattern.
    has_rope_by_kind: layers with a window have a rope of their own.
    has_no_rope_layers: some layers have no rope (`no_rope_layers`).
    is_fused: checkpoints hold q, k and v in one matrix, and gate and up in one.
    is_rope_plain: the rope of these models has no scaling that can be run.
    is_length_scaled: `max_position_embeddings` includes the scaling of the rope, of any kind.
    has_caps: logits and scores may be capped (`final_logit_softcapping` and
        `attn_logit_softcapping`).
    refuses: keys whose value must be absent, null or false.
    defaults: values of keys that config.json may leave out.
    """

    norms: Norms = "before"
    norm_offset: float = 0.0
    qk_norm: QkNorm = ""
    biases: Literal["config", "qkv", "none"] = "config"
    windows: Windows = "none"
    pattern: int = 1
    rope_theta: float = 10000.0
    has_rope_by_kind: bool = False
    has_no_rope_layers: bool = False
    is_fused: bool = False
    is_rope_plain: bool = False
    is_length_scaled: bool = False
    activation_key: str = "hidden_act"
    multipliers: Literal["", "granite", "gemma"] = ""
    has_caps: bool = False
    refuses: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(windows="all", defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(biases="qkv", windows="chosen", defaults={"sliding_window": 4096}),
    "Qwen3ForCausalLM": Family(
        qk_norm="head", windows="chosen", defaults={"head_dim": 128, "sliding_window": 4096}
    ),
    "SmolLM3ForCausalLM": Family(
        windows="chosen",
        rope_theta=2000000.0,
        has_no_rope_layers=True,
        defaults={"tie_word_embeddings": True},
    ),
    "Olmo2ForCausalLM": Family(norms="after", qk_norm="all", defaults={"rms_norm_eps": 1e-5}),
    "GraniteForCausalLM": Family(multipliers="granite"),
    "Phi3ForCausalLM": Family(
        biases="none",
        windows="all",
        is_fused=True,
        is_rope_plain=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Gemma2ForCausalLM": Family(
        norms="around",
        norm_offset=1.0,
        windows="pattern",
        pattern=2,
        activation_key="hidden_activation",
        multipliers="gemma",
        has_caps=True,
        refuses=("use_bidirectional_attention",),
        defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": Family(
        norms="around",
        norm_offset=1.0,
        qk_norm="head",
        windows="pattern",
        pattern=6,
        rope_theta=1000000.0,
        has_rope_by_kind=True,
        is_length_scaled=True,
        activation_key="hidden_activation",
        multipliers="gemma",
        has_caps=True,
        refuses=("use_bidirectional_attention",),
        defaults=_GEMMA,
    ),
}
