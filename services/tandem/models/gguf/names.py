"""Maps GGUF tensor names to Hugging Face names. Finds the tensors whose values or row order differ
from those of Hugging Face files."""

import re
from collections.abc import Iterable

from tandem.errors import UnsupportedModel
from tandem.models.config.model import ModelConfig

# Tensors with tables of RoPE frequency divisors. The tables become part of config.json.
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG = "rope_factors_long.weight"
ROPE_SHORT = "rope_factors_short.weight"
ROPE_TABLES = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)(?P<kind>\.weight|\.bias|)")
# A tensor of a layer that predicts further tokens, which is not computed.
_NEXTN = re.compile(r"(blk\.\d+\.)nextn\..+")
# Hugging Face names of these tensors have no suffix .weight or .bias.
_SINKS = "self_attn.sinks"
CORRECTION = "mlp.gate.e_score_correction_bias"
A_LOG = "linear_attn.A_log"
_DT_BIAS = "linear_attn.dt_bias"
_WITHOUT_SUFFIX = (_SINKS, CORRECTION, A_LOG, _DT_BIAS)
# The only GGUF name without a suffix .weight or .bias.
_DECAY = "ssm_a"
_DEEPSEEK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b": CORRECTION,
}
_SHARED = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
# Qwen3-Next and Qwen3.5. Qwen3-Next has one matrix for b and a, and in files of older converters
# one for q, k, v and z.
_QWEN_LINEAR = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    _DECAY: A_LOG,
    "ssm_dt": _DT_BIAS,
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
} | {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
# Start of a Hugging Face class name -> (GGUF name -> Hugging Face name). These names of a model
# family replace those in `_INNER` or are added to them.
_NAMES_BY_FAMILY = {
    "Gemma": {"ffn_norm": "pre_feedforward_layernorm"},
    "Phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "GptOss": {"attn_sinks": _SINKS, "ffn_gate_inp": "mlp.router"},
    "Deepseek": _DEEPSEEK | _SHARED,
    "Glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "Glm4Moe": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_up": "mlp.up_proj",
        "exp_probs_b": CORRECTION,
    }
    | _SHARED,
    "MiniMaxM2": {"exp_probs_b": CORRECTION},
    "Ernie4_5_Moe": {"exp_probs_b": CORRECTION} | _SHARED,
    "HunYuanMoE": _SHARED,
    "Qwen3Next": _QWEN_LINEAR,
    "Qwen3_5": _QWEN_LINEAR,
}
_LINEAR_FAMILIES = ("Qwen3Next", "Qwen3_5")
_PERMUTED = tuple(
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Mixtral", "SmolLM3", "Granite")
)


def hf_name(name: str, architecture: str = "LlamaForCausalLM") -> str:
    """Returns the Hugging Face name of a GGUF tensor: `blk.0.attn_q.weight` becomes
    `model.layers.0.self_attn.q_proj.weight`.

    Raises UnsupportedModel for a tensor that the architecture does not have."""
    match = _NAME.fullmatch(name)
    parts = _OUTER if match and match["layer"] is None else _inner(architecture)
    if (
        match is None
        or match["part"] not in parts
        or (match["part"] == _DECAY) != (match["kind"] == "")
    ):
        raise UnsupportedModel(
            f"the tensor {name:.80} does not belong to {architecture}, the architecture of this "
            "file"
        )
    module = parts[match["part"]]
    if match["layer"] is not None:
        module = f"model.layers.{match['layer']}.{module}"
    return module if module.endswith(_WITHOUT_SUFFIX) else f"{module}{match['kind']}"


def gguf_names(name: str, architecture: str) -> list[str]:
    """Returns the GGUF names that `hf_name` maps to this Hugging Face name."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    start = f"blk.{layer[1]}." if layer else ""
    stored = [
        f"{start}{part}{kind}"
        for part in (_inner(architecture) if layer else _OUTER)
        for kind in ((".weight", ".bias") if part != _DECAY else ("",))
    ]
    return [each for each in stored if hf_name(each, architecture) == name]


def _inner(architecture: str) -> dict[str, str]:
    """Returns the mapping of GGUF to Hugging Face names for the modules of a layer."""
    return _INNER | {
        part: module
        for family, parts in _NAMES_BY_FAMILY.items()
        if architecture.startswith(family)
        for part, module in parts.items()
    }


def unused_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the beginnings of the names of tensors in layers that predict further tokens, such
    as `blk.24.`. `names` are the names of all tensors of a model."""
    return tuple({found[1] for name in names if (found := _NEXTN.fullmatch(name))})


def stored_offset(name: str, architecture: str) -> float:
    """Returns the difference between a tensor's values in GGUF files and in Hugging Face files. It
    is 1 for the norm weights of Gemma, Qwen3-Next and Qwen3.5, to which llama.cpp's converter adds
    1, and 0 for other tensors."""
    has_offset = architecture.startswith(("Gemma", *_LINEAR_FAMILIES))
    part = name.removesuffix(".weight").rpartition(".")[2]
    return float(has_offset and part.endswith("norm") and part != "ssm_norm")


def has_tiled_heads(architecture: str) -> bool:
    """Returns whether the value heads of linear attention are in llama.cpp's order: first the first
    value head of each key head, then the second of each, and so on. In Hugging Face files, the
    value heads of a key head are side by side."""
    return architecture.startswith("Qwen3_5")


def num_permuted_heads(name: str, config: ModelConfig) -> int:
    """Returns the number of heads if the rows of the tensor are in llama.cpp's order (`unpermute`).
    Returns 0 if they are in Hugging Face's order."""
    if config.architecture not in _PERMUTED:
        return 0
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_kv_heads}
    return heads.get(name.split(".")[-2], 0)
