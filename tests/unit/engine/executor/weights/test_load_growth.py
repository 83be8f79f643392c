"""A process that loads a model grows by its tensors once, and by few more while it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from tandem.common.config.engine import EngineConfig
from tandem.common.dtypes import compute_dtype, cpu_has_bfloat16
from tandem.models.checkpoint.weight_shapes import expected_shapes
from tandem.models.config.model import ModelConfig
from tandem.models.gguf.loaded_bytes import PACKED_BITS
from tandem.models.source import resolve
from tests.random_blocks import random_blocks
from tests.tiny_models import make_tiny_model
from tests.unit.models import conftest as tiny_gguf

_GROWTH_MAX = 1.15  # times the tensors' bytes
_MORE_AT_PEAK = 2  # tensors
_NUM_BYTES = {"float32": 4, "bfloat16": 2}
# Each case is a process: in CI, torch loads int4 matrices, K-types and experts.
_SLOW_TORCH = pytest.param("torch", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[int]]:
    """A folder with 250 MB of weights in float32, and the number of weights of each tensor.

    As usual the embedding is the largest: a layer's tensors are there at once before it is packed.
    """
    folder = tmp_path_factory.mktemp("random")
    sizes = {"vocab_size": 16_000, "hidden_size": 768, "intermediate_size": 2048}
    _, model = make_tiny_model("llama", folder, num_hidden_layers=6, **sizes)
    return str(folder), [parameter.numel() for parameter in model.parameters()]


def check(
    model: str, dtype: str, num_bytes: list[int], kernels: str = "native", num_tokens: int = 1
) -> None:
    arguments = [model, dtype, kernels, str(num_tokens)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine.executor.weights.load_growth", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[5],
    )
    assert done.returncode == 0, done.stderr
    stayed, peak = map(int, done.stdout.split())
    assert stayed <= _GROWTH_MAX * sum(num_bytes)
    assert peak <= _GROWTH_MAX * sum(num_bytes) + _MORE_AT_PEAK * max(num_bytes)
    # Else it was not measured: rows of an embedding are read from the file as tokens need them.
    assert stayed >= sum(num_bytes) - max(num_bytes) - 10_000_000


def bytes_once_loaded(folder: Path) -> list[int]:
    """Returns the bytes of each tensor. Those in bfloat16 get the type that the processor computes
    in, which is float32 where it has no bfloat16."""
    dtype = compute_dtype(EngineConfig(model=str(folder)), has_bfloat16=cpu_has_bfloat16())
    return [
        tensor.numel() * _NUM_BYTES[dtype] if tensor.dtype == torch.bfloat16 else tensor.nbytes
        for tensor in load_file(folder / "model.safetensors").values()
    ]


def bytes_in_file(file: Path) -> list[int]:
    """Returns the bytes of each tensor of a GGUF file."""
    return [int(tensor.n_bytes) for tensor in GGUFReader(file).tensors]


_EXPERTS = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 64,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}


@pytest.fixture(scope="module")
def mxfp4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss with 210 MB of experts, whose bits are random but for those of scales."""
    folder = tmp_path_factory.mktemp("mxfp4")
    make_tiny_model("gpt-oss", folder)  # for its other files
    stored: dict[str, torch.Tensor] = {}
    config = ModelConfig.from_hf(_EXPERTS)
    for name, shape in expected_shapes(config, []).items():
        if len(shape) < 3:
            stored[name] = torch.randn(shape).bfloat16() / 30
            continue
        *rows, num_in = shape
        stored[f"{name}_blocks"] = torch.randint(256, (*rows, num_in // 32, 16)).byte()
        stored[f"{name}_scales"] = torch.full((*rows, num_in // 32), 121).byte()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_EXPERTS))
    return folder


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 3 with 220 MB of experts in Q4_0."""
    hidden, inner, num = 512, 2048, 16
    rows = {"attn_q": hidden, "attn_k": 128, "attn_v": 128, "attn_output": hidden}
    norms = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": 64, "attn_k_norm": 64}
    chance = np.random.default_rng(0)  # else all tokens would choose the same experts
    embedding = chance.standard_normal((len(tiny_gguf.TOKENS), hidden)).astype(np.float16)
    tensors = {
        "token_embd.weight": embedding,
        "output_norm.weight": np.ones(hidden, np.float32),
    }
    types: dict[str, gguf.GGMLQuantizationType | None] = {}
    for layer in range(8):
        name = f"blk.{layer}."
        tensors |= {
            f"{name}{part}.weight": np.ones(size, np.float32) for part, size in norms.items()
        }
        tensors |= {
            f"{name}{part}.weight": np.ones((size, hidden), np.float16)
            for part, size in rows.items()
        }
        router = chance.standard_normal((num, hidden)).astype(np.float32)
        tensors[f"{name}ffn_gate_inp.weight"] = router
        for part in ("gate", "up", "down"):
            num_out, num_in = (hidden, inner) if part == "down" else (inner, hidden)
            blocks = np.ones((num, num_out, num_in // 32 * 18), np.uint8)
            tensors[f"{name}ffn_{part}_exps.weight"] = blocks
            types[f"{name}ffn_{part}_exps.weight"] = gguf.GGMLQuantizationType.Q4_0
    keys = {
        "embedding_length": hidden,
        "block_count": 8,
        "attention.head_count": 8,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "expert_count": num,
        "expert_used_count": 4,
        "expert_feed_forward_length": inner,
    }
    path = tmp_path_factory.mktemp("gguf") / "experts.gguf"
    return tiny_gguf.write_gguf(path, tensors, architecture="qwen3moe", keys=keys, types=types)


_SIZES = {
    "vocab_size": 4000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "dtype": "bfloat16",
}
_FP8 = {
    "fp8": {"weight_block_size": [128, 128]},
    "compressed-tensors": {
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
            }
        },
    },
    "modelopt": {"quant_algo": "FP8"},
}


@pytest.fixture(
    scope="module",
    params=[
        "fp8",
        pytest.param("compressed-tensors", marks=pytest.mark.slow),
        pytest.param("modelopt", marks=pytest.mark.slow),
    ],
)
def fp8_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with 230 MB of matrices in fp8: scales for blocks, outputs or all of a matrix."""
    folder = tmp_path_factory.mktemp("fp8")
    make_tiny_model("llama", folder)  # for its other files
    config = json.loads((folder / "config.json").read_text()) | _SIZES
    config["quantization_config"] = {"quant_method": request.param} | _FP8[request.param]
    scales: dict[str, Callable[[int, int], tuple[int, ...]]] = {
        "fp8": lambda num_out, num_in: (-(-num_out // 128), -(-num_in // 128)),
        "compressed-tensors": lambda num_out, _: (num_out, 1),
        "modelopt": lambda _, __: (),
    }
    stored: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(ModelConfig.from_hf(config), []).items():
        stored[name] = torch.randn(shape).bfloat16()
        if name.endswith("_proj.weight"):
            stored[name] = stored[name].to(torch.float8_e4m3fn)
            scale = torch.full(scales[request.param](*shape), 0.01)
            suffix = "_scale_inv" if request.param == "fp8" else "_scale"
            stored[name + suffix] = scale
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kernels", ["native", _SLOW_TORCH])
def test_matrices_of_fp8(fp8_folder: Path, kernels: str) -> None:
    check(str(fp8_folder), "auto", bytes_once_loaded(fp8_folder), kernels)


@pytest.fixture(scope="module")
def int4_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with 120 MB of matrices in int4, in groups of 128 or as many as its name says: zeros
    that differ, or all 8. Inputs may be in the order of activations."""
    method, *rest = request.param.split()
    size = int(rest[0]) if method == "awq" and rest else 128
    folder = tmp_path_factory.mktemp("int4")
    make_tiny_model("llama", folder)  # for its other files
    config = json.loads((folder / "config.json").read_text()) | _SIZES
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": size}
    if method == "gptq" and rest:
        config["quantization_config"]["desc_act"] = True
    stored: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(ModelConfig.from_hf(config), []).items():
        if not name.endswith("_proj.weight"):
            stored[name] = torch.randn(shape).bfloat16()
            continue
        (num_out, num_in), stem = shape, name.removesuffix("weight")
        packed = (num_in, num_out // 8) if method == "awq" else (num_in // 8, num_out)
        stored[f"{stem}qweight"] = torch.randint(-(1 << 31), 1 << 31, packed).int()
        zeros = torch.full((num_in // size, num_out // 8), 0x77777777, dtype=torch.int32)
        if method == "awq" or rest:
            zeros.random_(-(1 << 31), (1 << 31) - 1)
        if method == "gptq" and rest:
            stored[f"{stem}g_idx"] = (torch.randperm(num_in) // size).int()
        stored[f"{stem}qzeros"] = zeros
        stored[f"{stem}scales"] = torch.rand(num_in // size, num_out).half() / 100
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("int4_folder", "kernels"),
    [
        ("awq", "native"),
        ("gptq", "torch"),
        *(
            pytest.param(name, kernels, marks=pytest.mark.slow)
            for name in ("awq", "gptq", "awq 32", "awq 64", "gptq shuffled")
            for kernels in ("native", "torch")
            if (name, kernels) not in (("awq", "native"), ("gptq", "torch"))
        ),
    ],
    indirect=["int4_folder"],
)
def test_matrices_of_int4(int4_folder: Path, kernels: str) -> None:
    check(str(int4_folder), "auto", bytes_once_loaded(int4_folder), kernels)


@pytest.mark.parametrize("kernels", ["native", _SLOW_TORCH])
def test_experts_of_mxfp4(mxfp4_folder: Path, kernels: str) -> None:
    check(str(mxfp4_folder), "auto", bytes_once_loaded(mxfp4_folder), kernels, num_tokens=64)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_experts_of_a_gguf_file(gguf_file: Path, kernels: str) -> None:
    check(str(gguf_file), "auto", bytes_in_file(gguf_file), kernels, num_tokens=64)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("Q4_K", "native"),
        ("Q6_K", "torch"),
        pytest.param("Q4_K", "torch", marks=pytest.mark.slow),
        pytest.param("Q6_K", "native", marks=pytest.mark.slow),
        pytest.param("Q5_K", "native", marks=pytest.mark.slow),
        pytest.param("Q5_K", "torch", marks=pytest.mark.slow),
    ],
)
def test_matrices_of_k_types(name: str, kernels: str, tmp_path: Path) -> None:
    file = k_types_file(tmp_path / "random.gguf", name)
    check(str(file), "auto", bytes_in_file(file), kernels)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "TQ1_0"])
def test_matrices_that_are_larger_when_packed(name: str, tmp_path: Path) -> None:
    file = k_types_file(tmp_path / "random.gguf", name)
    bits = PACKED_BITS[gguf.GGMLQuantizationType[name]]
    packed = [int(tensor.n_elements * bits / 8) for tensor in GGUFReader(file).tensors]
    assert sum(packed) > _GROWTH_MAX * sum(bytes_in_file(file))
    check(str(file), "auto", packed)


def k_types_file(path: Path, name: str) -> Path:
    """Writes a Llama with 390 million weights in one type, the same ones in all layers.

    It is so large for Q4_K: packed, it has 5 bits for each 4.5.
    """
    hidden, inner, kv_size, num_layers = 1024, 8192, 256, 14
    shapes = {
        "attn_q": (hidden, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    of_layer = {part: random_blocks(name, *shape).data.numpy() for part, shape in shapes.items()}
    embedding = random_blocks(name, len(tiny_gguf.TOKENS), hidden).data.numpy()
    quantized = {"token_embd.weight": embedding}
    norms = ["output_norm"]
    for layer in range(num_layers):
        norms += [f"blk.{layer}.{norm}" for norm in ("attn_norm", "ffn_norm")]
        quantized |= {f"blk.{layer}.{part}.weight": blocks for part, blocks in of_layer.items()}
    keys = {
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "block_count": num_layers,
        "attention.head_count": 16,
        "attention.head_count_kv": 4,
    }
    types = dict.fromkeys(quantized, gguf.GGMLQuantizationType[name])
    tensors = quantized | {f"{norm}.weight": np.ones(hidden, np.float32) for norm in norms}
    return tiny_gguf.write_gguf(path, tensors, keys=keys, types=types)


@pytest.mark.parametrize("kernels", ["native", _SLOW_TORCH])
@pytest.mark.parametrize("dtype", _NUM_BYTES)
def test_a_folder(random_model: tuple[str, list[int]], dtype: str, kernels: str) -> None:
    folder, numbers = random_model
    check(folder, dtype, [number * _NUM_BYTES[dtype] for number in numbers], kernels)


@pytest.mark.parametrize("kernels", ["native", _SLOW_TORCH])
def test_a_gguf_file_as_it_is(kernels: str) -> None:
    (file,) = resolve("smollm2").weight_files
    check("smollm2", "auto", bytes_in_file(file), kernels)


def test_a_gguf_file_that_is_converted() -> None:
    (file,) = resolve("smollm2").weight_files
    check(
        "smollm2", "bfloat16", [2 * int(tensor.n_elements) for tensor in GGUFReader(file).tensors]
    )


_LLAMA: dict[str, Any] = {
    "vocab_size": 4000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "dtype": "bfloat16",
}
GROUP = 128
# Bits, and whether there are zeros.
PRESETS = {"W4A16": (4, False), "W4A16_ASYM": (4, True), "W8A16": (8, False)}


def weights_of(num_bits: int, has_zeros: bool) -> dict[str, Any]:
    return {
        "type": "int",
        "num_bits": num_bits,
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": not has_zeros,
    }


def scales_of(*size: int) -> torch.Tensor:
    """Returns scales that float16 holds: a matrix with others would be converted."""
    return ((torch.rand(size) + 0.5) / 100).bfloat16()


def write_folder(folder: Path, preset: str) -> Path:
    """Writes a Llama with 120 MB of matrices in int4, or 240 MB in int8, as a preset says."""
    num_bits, has_zeros = PRESETS[preset]
    make_tiny_model("llama", folder)  # for its other files
    group = {"targets": ["Linear"], "weights": weights_of(num_bits, has_zeros)}
    config = json.loads((folder / "config.json").read_text()) | _LLAMA
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }
    word = 32 // num_bits
    stored: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(ModelConfig.from_hf(config), []).items():
        if not name.endswith("_proj.weight"):
            stored[name] = torch.randn(shape).bfloat16()
            continue
        (num_out, num_in), stem = shape, name.removesuffix("weight")
        packed = num_out, num_in // word
        stored[f"{stem}weight_packed"] = torch.randint(-(1 << 31), 1 << 31, packed).int()
        if has_zeros:
            zeros = num_out // word, num_in // GROUP
            stored[f"{stem}weight_zero_point"] = torch.randint(-(1 << 31), 1 << 31, zeros).int()
        stored[f"{stem}weight_scale"] = scales_of(num_out, num_in // GROUP)
        stored[f"{stem}weight_shape"] = torch.tensor(shape)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


HIDDEN, INNER, NUM_EXPERTS, NUM_LAYERS, HEADS = 512, 512, 32, 8, 8
PLAIN, ROPE, VALUE, RANK = 64, 32, 64, 128
# Products with latents become numbers of the compute dtype.
OF_LATENTS = {
    "attn_q": (HEADS * (PLAIN + ROPE), HIDDEN),
    "attn_kv_a_mqa": (RANK + ROPE, HIDDEN),
    "attn_kv_b": (HEADS * (PLAIN + VALUE), RANK),
}


def write_deepseek(path: Path) -> Path:
    """Writes a DeepSeek V2 with 215 MB in Q8_0, of which 5 MB are products with latents."""
    chance = np.random.default_rng(0)  # else all tokens would choose the same experts
    embedding = chance.standard_normal((len(tiny_gguf.TOKENS), HIDDEN)).astype(np.float16)
    tensors = {
        "token_embd.weight": embedding,
        "output_norm.weight": np.ones(HIDDEN, np.float32),
    }
    quantized = OF_LATENTS | {"attn_output": (HIDDEN, HEADS * VALUE)}
    for part, num in (("exps", NUM_EXPERTS), ("shexp", 1)):
        of_all = (num,) if num > 1 else ()
        quantized |= {f"ffn_{each}_{part}": (*of_all, INNER, HIDDEN) for each in ("gate", "up")}
        quantized[f"ffn_down_{part}"] = (*of_all, HIDDEN, INNER)
    types: dict[str, gguf.GGMLQuantizationType | None] = {}
    for layer in range(NUM_LAYERS):
        name = f"blk.{layer}."
        norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_kv_a_norm": RANK}
        tensors |= {f"{name}{norm}.weight": np.ones(n, np.float32) for norm, n in norms.items()}
        router = chance.standard_normal((NUM_EXPERTS, HIDDEN)).astype(np.float32)
        tensors[f"{name}ffn_gate_inp.weight"] = router
        for part, (*rows, num_in) in quantized.items():
            tensors[f"{name}{part}.weight"] = np.ones((*rows, num_in // 32 * 34), np.uint8)
            types[f"{name}{part}.weight"] = gguf.GGMLQuantizationType.Q8_0
    keys = {
        "embedding_length": HIDDEN,
        "block_count": NUM_LAYERS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "attention.key_length": PLAIN + ROPE,
        "attention.value_length": VALUE,
        "attention.kv_lora_rank": RANK,
        "rope.dimension_count": ROPE,
        "expert_count": NUM_EXPERTS,
        "expert_used_count": 4,
        "expert_feed_forward_length": INNER,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
    }
    return tiny_gguf.write_gguf(path, tensors, architecture="deepseek2", keys=keys, types=types)


def bytes_of_deepseek(file: Path) -> list[int]:
    """Returns the bytes of each tensor once it is loaded."""
    dtype = compute_dtype(EngineConfig(model=str(file)), has_bfloat16=cpu_has_bfloat16())
    of_number = {"float32": 4, "bfloat16": 2}[dtype]
    return [
        int(tensor.n_elements) * of_number
        if tensor.name.split(".")[-2] in OF_LATENTS
        else int(tensor.n_bytes)
        for tensor in GGUFReader(file).tensors
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("preset", PRESETS)
def test_matrices_of_compressed_tensors(preset: str, kernels: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, preset)
    check(str(folder), "auto", bytes_once_loaded(folder), kernels)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_latents_and_experts_of_a_gguf_file(kernels: str, tmp_path: Path) -> None:
    file = write_deepseek(tmp_path / "deepseek.gguf")
    check(str(file), "auto", bytes_of_deepseek(file), kernels, num_tokens=64)
