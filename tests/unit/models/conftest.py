"""Tiny models: random ones of each family, as GGUF files in llama.cpp's own arrangement."""

import re
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from tests.harness.quick_interpreter import patch_once

patch_once()

_PERMUTED = ("llama", "mistral", "mixtral", "smollm3", "granite")
_SIZES: dict[str, object] = {
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
KEYS = (
    *(f"llama.{key}" for key in _SIZES),
    *(f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "merges", "token_type")),
    *(f"tokenizer.ggml.{key}_token_id" for key in ("bos", "eos")),
    "general.architecture",
)
TOKENS = [*sorted(ByteLevel.alphabet()), "Ġt", "he", "Ġthe", "<s>", "</s>", "<think>", "[PAD]"]
MERGES = ["Ġ t", "h e", "Ġt he"]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
BOS, EOS, THINK = (TOKENS.index(token) for token in ("<s>", "</s>", "<think>"))

_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_OF_OLMO2 = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OF_GEMMA = _OF_OLMO2 | {"pre_feedforward_layernorm": "ffn_norm"}
_OF_DEEPSEEK = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate.e_score_correction": "exp_probs_b",
}
_LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_OF_LINEAR = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def _shared(name: str) -> dict[str, str]:
    return {f"mlp.{name}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}


_OF_QWEN_LINEAR = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
} | _shared("shared_expert")
_OF_GLM = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate.e_score_correction": "exp_probs_b",
} | _shared("shared_experts")
_NAMES_BY_FAMILY = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _OF_DEEPSEEK | _shared("shared_experts")),
    **dict.fromkeys(_LINEAR, _OF_QWEN_LINEAR),
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    "glm4_moe": _OF_GLM,
    "minimax_m2": {"mlp.e_score_correction": "exp_probs_b"},
    "ernie4_5_moe": {"mlp.gate.moe_statics.e_score_correction": "exp_probs_b"}
    | _shared("shared_experts"),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"),
        {
            "self_attn.query_layernorm": "attn_q_norm",
            "self_attn.key_layernorm": "attn_k_norm",
            "mlp.gate.wg": "ffn_gate_inp",
        }
        | _shared("shared_mlp"),
    ),
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    **dict.fromkeys(("olmo3", "exaone4"), _OF_OLMO2),
    "olmo2": _OF_OLMO2,
    "gemma2": _OF_GEMMA,
    "gemma3_text": _OF_GEMMA,
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "gpt_oss": {
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
        "self_attn.sinks": "attn_sinks",
    },
}


@pytest.fixture
def tiny_gguf():
    """Functions that make tiny GGUF files, and the ids of their special tokens."""
    return SimpleNamespace(
        write=write_gguf,
        tensors_of=gguf_tensors,
        vocab_size=len(TOKENS),
        bos=BOS,
        eos=EOS,
        think=THINK,
    )


def gguf_name(hf_name: str, model_type: str = "llama") -> str:
    module, kind = hf_name.rsplit(".", 1)
    if module.startswith("model.layers."):
        parts = _PARTS | _NAMES_BY_FAMILY.get(model_type, {})
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{parts[part]}.{kind}"
    return f"{_PARTS[module]}.{kind}"


def gguf_tensors(model) -> dict[str, np.ndarray]:
    """A transformers model's weights as convert_hf_to_gguf.py of llama.cpp would write them."""
    config = model.config
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = name.split(".")[-2]
        if ".linear_attn." in name:
            tensors |= linear_attention_tensors(name, array, config)
            continue
        if config.model_type == "gpt_oss" and ".experts." in name:
            tensors |= experts_of_gpt_oss(name, array)
            continue
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for half, rows in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                tensors[gguf_name(f"{stem}{half}_proj.weight")] = np.ascontiguousarray(rows)
            continue
        has_offset = config.model_type.startswith(("gemma", *_LINEAR))
        if has_offset and name.endswith("norm.weight"):
            array = array + 1
        if name.endswith(("experts.down_proj", "self_attn.sinks")):
            name += ".weight"
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if config.model_type in _PERMUTED and part in heads:
            rows = array.reshape(heads[part], 2, -1, *array.shape[1:])
            array = rows.swapaxes(1, 2).reshape(array.shape)
        tensors[gguf_name(name, config.model_type)] = np.ascontiguousarray(array)
    return tensors


def linear_attention_tensors(name: str, array: np.ndarray, config) -> dict[str, np.ndarray]:
    """The tensors of a layer with linear attention that the script makes of one tensor."""
    layer, part = re.fullmatch(r"model\.layers\.(\d+)\.linear_attn\.(.+)", name).groups()
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    group = num_values // num_keys

    def tiled(rows: np.ndarray) -> np.ndarray:
        """First the first value head of each key head, then the second of each, and so on."""
        if config.model_type == "qwen3_next":
            return rows
        heads = rows.reshape(num_keys, group, -1, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    if part == "in_proj_qkvz.weight":
        heads = array.reshape(num_keys, -1, array.shape[1])
        sections = np.split(heads, [key_dim, 2 * key_dim, 2 * key_dim + group * value_dim], axis=1)
        q, k, v, z = (each.reshape(-1, array.shape[1]) for each in sections)
        found = {"in_proj_qkv.weight": np.concatenate([q, k, v]), "in_proj_z.weight": z}
    else:
        if part == "A_log":
            array = -np.exp(array)
        if part == "conv1d.weight":
            array = array.squeeze(1)
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            first = 2 * num_keys * key_dim
            array = np.concatenate([array[:first], tiled(array[first:])])
        elif part == "out_proj.weight":
            array = tiled(array.T).T
        elif part not in ("in_proj_ba.weight", "norm.weight"):
            array = tiled(array)
        found = {part: array}
    return {
        f"blk.{layer}.{_OF_LINEAR[part]}": np.ascontiguousarray(each)
        for part, each in found.items()
    }


def split_latent(tensors: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    """The keys and the values of latents apart, as newer versions of the script write them."""
    split = {}
    for name, array in tensors.items():
        if not name.endswith("attn_kv_b.weight"):
            split[name] = array
            continue
        heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        split[name.replace("kv_b", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
        split[name.replace("kv_b", "v_b")] = np.ascontiguousarray(values)
    return split


def experts_of_gpt_oss(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Gates and ups, which take turns, or downs; matrices [experts, in, out] are turned."""
    kind = "bias" if name.endswith("_bias") else "weight"
    stem, _, part = name.removesuffix("_bias").rpartition(".")
    array = array if kind == "bias" else array.swapaxes(1, 2)
    halves = {"gate_proj": array[:, ::2], "up_proj": array[:, 1::2]}
    found = halves if part == "gate_up_proj" else {part: array}
    return {
        gguf_name(f"{stem}.{part}.{kind}"): np.ascontiguousarray(each)
        for part, each in found.items()
    }


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    tokenizer: str = "gpt2",
    keys: dict[str, object] | None = None,
    types: dict[str, gguf.GGMLQuantizationType | None] | None = None,
    tokens: dict[int, str] | None = None,
    kinds: dict[int, int] | None = None,
    further: dict[str, object] | None = None,
    **splitting: int,
) -> Path:
    """Writes a file, or with `splitting` its parts.

    `keys` are more metadata under the architecture, or other sizes; `types` are those of tensors
    that are quantized, `tokens` other texts of some, and `kinds` other types. `further` are
    metadata by their whole keys. The file lacks those that are None."""
    writer = gguf.GGUFWriter(path, architecture, **splitting)
    own_kinds = dict(enumerate([CONTROL, CONTROL, USER_DEFINED, UNUSED], len(TOKENS) - 4))
    own_kinds |= kinds or {}
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": tokenizer,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [(tokens or {}).get(i, text) for i, text in enumerate(TOKENS)],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [own_kinds.get(i, NORMAL) for i in range(len(TOKENS))],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
    }
    metadata |= {f"{architecture}.{key}": value for key, value in (_SIZES | (keys or {})).items()}
    for key, value in (metadata | (further or {})).items():
        if value is None:
            continue
        adds = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        adds.get(type(value), writer.add_array)(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
