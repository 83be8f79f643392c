"""Writes a GGUF file's tensors as float32 safetensors under Hugging Face's names."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from tandem.errors import UnsupportedModel

_SHARD_BYTES_MAX = 2 << 30  # bounds the memory that a conversion takes

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
_OF_GEMMA = {"ffn_norm": "pre_feedforward_layernorm"}
_PERMUTED = ("llama", "mistral", "mixtral", "smollm3", "granite")
_ROPE_FREQS = "rope_freqs.weight"


def read_rope_freqs(reader: Any) -> np.ndarray | None:
    """Returns the [head_dim / 2] divisors of the rotary frequencies, or None if there are none."""
    return next((_dequantize(t) for t in reader.tensors if t.name == _ROPE_FREQS), None)


def write_weights(reader: Any, folder: Path, *, config: dict[str, Any]) -> None:
    """Writes model.safetensors, or numbered shards and their index when it would be large.

    `reader` is a gguf.GGUFReader, `config` the model's config.json. Raises UnsupportedModel for a
    tensor that has no place in the architecture or a quantization that gguf cannot undo.
    """
    tensors = [tensor for tensor in reader.tensors if tensor.name != _ROPE_FREQS]
    names = {tensor.name: hf_name(tensor.name, config["model_type"]) for tensor in tensors}
    shards = list(_shards(tensors))
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        arrays = {names[tensor.name]: _array(tensor, config) for tensor in shard}
        save_file(arrays, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(arrays, file_name))
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def hf_name(name: str, model_type: str = "") -> str:
    """Renames `blk.0.attn_q.weight` to `model.layers.0.self_attn.q_proj.weight`."""
    match = _NAME.fullmatch(name)
    parts = _OUTER if match and match["layer"] is None else _INNER
    if match is None or match["part"] not in parts:
        raise UnsupportedModel(
            f"the tensor {name} is not supported; those of Llama, Qwen and OLMo 2 are"
        )
    module = parts[match["part"]]
    if model_type.startswith("gemma"):
        module = _OF_GEMMA.get(match["part"], module)
    if match["layer"] is not None:
        module = f"model.layers.{match['layer']}.{module}"
    return f"{module}.{match['kind']}"


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of a head's rows: pairs side by side -> first and second half.

    GGUF's llama rotates neighbouring rows (2i, 2i+1), Hugging Face's rows (i, i + head_dim / 2).
    `rows`: [num_heads * head_dim, ...] of a weight or a bias.
    """
    half = rows.shape[0] // num_heads // 2
    pairs = rows.reshape(num_heads, half, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _shards(tensors: list[Any]) -> Iterator[list[Any]]:
    shard: list[Any] = []
    num_bytes = 0
    for tensor in tensors:
        tensor_bytes = 4 * int(tensor.n_elements)
        if shard and num_bytes + tensor_bytes > _SHARD_BYTES_MAX:
            yield shard
            shard, num_bytes = [], 0
        shard.append(tensor)
        num_bytes += tensor_bytes
    yield shard


def _array(tensor: Any, config: dict[str, Any]) -> np.ndarray:
    array = _dequantize(tensor)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    part = tensor.name.split(".")[-2]
    if config["model_type"].startswith("gemma") and part.endswith("norm"):
        return array - np.float32(1)  # which Gemma's norms add
    is_permuted = config["model_type"] in _PERMUTED and part in heads
    return unpermute(array, heads[part]) if is_permuted else array


def _dequantize(tensor: Any) -> np.ndarray:
    try:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"the tensor {tensor.name} is of type {tensor.tensor_type.name}, "
            "which the gguf package cannot dequantize"
        ) from error
    return np.ascontiguousarray(array, dtype=np.float32)
