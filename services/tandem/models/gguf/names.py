"""Maps GGUF tensor names to Hugging Face names. Finds the tensors whose values or row order differ
from those of Hugging Face files."""

import re

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
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
# Hugging Face names of these tensors have no suffix .weight or .bias.
_SINKS = "self_attn.sinks"
_CORRECTION = "mlp.gate.e_score_correction_bias"
_DEEPSEEK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": _CORRECTION,
}
# Start of a Hugging Face class name -> (GGUF name -> Hugging Face name). These names of a model
# family replace those in `_INNER` or are added to them.
_NAMES_BY_FAMILY = {
    "Gemma": {"ffn_norm": "pre_feedforward_layernorm"},
    "Phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "GptOss": {"attn_sinks": _SINKS, "ffn_gate_inp": "mlp.router"},
    "Deepseek": _DEEPSEEK,
}
_PERMUTED = tuple(
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Mixtral", "SmolLM3", "Granite")
)


def hf_name(name: str, architecture: str = "LlamaForCausalLM") -> str:
    """Returns the Hugging Face name of a GGUF tensor: `blk.0.attn_q.weight` becomes
    `model.layers.0.self_attn.q_proj.weight`.

    Raises UnsupportedModel for a tensor that the architecture does not have."""
    match = _NAME.fullmatch(name)
    parts = _OUTER if match and match["layer"] is None else _inner(architecture)
    if match is None or match["part"] not in parts:
        raise UnsupportedModel(
            f"the tensor {name:.80} does not belong to {architecture}, the architecture of this "
            "file"
        )
    module = parts[match["part"]]
    if match["layer"] is not None:
        module = f"model.layers.{match['layer']}.{module}"
    return module if module.endswith((_SINKS, _CORRECTION)) else f"{module}.{match['kind']}"


def gguf_names(name: str, architecture: str) -> list[str]:
    """Returns the GGUF names that `hf_name` maps to this Hugging Face name."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    start = f"blk.{layer[1]}." if layer else ""
    stored = [
        f"{start}{part}.{kind}"
        for part in (_inner(architecture) if layer else _OUTER)
        for kind in ("weight", "bias")
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


def stored_offset(name: str, architecture: str) -> float:
    """Returns the difference between a tensor's values in GGUF files and in Hugging Face files. It
    is 1 for Gemma's norm weights, to which llama.cpp's converter adds 1, and 0 for other
    tensors."""
    return float(_is_gemma(architecture) and name.split(".")[-2].endswith("norm"))


def _is_gemma(architecture: str) -> bool:
    return architecture.startswith("Gemma")


def num_permuted_heads(name: str, config: ModelConfig) -> int:
    """Returns the number of heads if the rows of the tensor are in llama.cpp's order (`unpermute`).
    Returns 0 if they are in Hugging Face's order."""
    if config.architecture not in _PERMUTED:
        return 0
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_kv_heads}
    return heads.get(name.split(".")[-2], 0)
