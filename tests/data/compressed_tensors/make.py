"""Writes matrices.safetensors and fp4.safetensors: small matrices that the package
compressed-tensors packed.

    pip install compressed-tensors==0.20.0
    python tests/data/compressed_tensors/make.py

Of each model: the tensors that the package stores of its matrices [outputs, 256], and `expected`,
the numbers in float32 that it reads them as. The metadata has its `quantization_config`. A model
has one module for each target; a preset alone is of the module `x`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

PRESETS = ("W4A16", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16_ASYM")
ALL = ["Linear"]
FP4_PRESETS = ("NVFP4A16", "MXFP4A16")
# The targets and presets of models.
MODELS = {preset: [(ALL, preset)] for preset in (*PRESETS, *FP4_PRESETS)} | {
    "MIXED": [(ALL, "W4A16_ASYM"), (["re:.*attn"], "W8A16"), (["mlp.down"], "FP8_DYNAMIC")],
}
NUM_OUT = 2
NUM_IN = 256
MANY = 11  # outputs: zeros of one word of them are none that the package unpacks
MODULES = {
    "W4A16_ASYM": {"x": MANY},
    "MIXED": {"mlp.up": MANY, "mlp.down": NUM_OUT, "self_attn.q": NUM_OUT},
}


def parameters_of(
    weight: torch.Tensor, args: QuantizationArgs, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and zeros."""
    parts = {
        "group": lambda: weight.unflatten(1, (-1, args.group_size)),
        "tensor_group": lambda: weight.unflatten(1, (-1, args.group_size)),
        "channel": lambda: weight.unsqueeze(1),
        "block": lambda: (
            weight.unflatten(1, (-1, args.block_structure[1])).movedim(1, 0).flatten(1)
        ),
    }[args.strategy]()
    return calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=global_scale)


def model_of(name: str) -> torch.nn.Module:
    """Returns a model with the parameters of its quantization."""
    model = torch.nn.Module()
    for path, num_out in MODULES.get(name, {"x": NUM_OUT}).items():
        parent, _, child = path.rpartition(".")
        if parent and not hasattr(model, parent):
            setattr(model, parent, torch.nn.Module())
        linear = torch.nn.Linear(NUM_IN, num_out, bias=False).bfloat16()
        setattr(model.get_submodule(parent), child, linear)
    groups = {
        f"group_{i}": preset_name_to_scheme(preset, targets)
        for i, (targets, preset) in enumerate(MODELS[name])
    }
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, quantization_status="frozen")
    )
    for linear in linears(model).values():
        args = linear.quantization_scheme.weights
        weight = linear.weight.data.float()
        global_scale = None
        if args.strategy == "tensor_group":
            global_scale = generate_gparam(weight.amin(), weight.amax())
            linear.weight_global_scale.data.copy_(global_scale)
        scales, zeros = parameters_of(weight, args, global_scale)
        linear.weight_scale.data.copy_(scales.view(linear.weight_scale.shape))
        if not args.symmetric:
            linear.weight_zero_point.data.copy_(zeros.view(linear.weight_zero_point.shape))
    return model


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    return {path: each for path, each in model.named_modules() if isinstance(each, torch.nn.Linear)}


def pack(name: str) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    model = model_of(name)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    with tempfile.TemporaryDirectory() as folder:
        compressor.update_config(folder)
        config = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    found: dict[str, torch.Tensor] = {}
    for path, linear in linears(model).items():
        stored = {part: tensor.detach() for part, tensor in linear.state_dict().items()}
        scheme = linear.quantization_scheme
        kind = BaseCompressor.get_value_from_registry(scheme.format)
        if name in FP4_PRESETS:
            expected = numbers_of_fp4(kind, stored, scheme.weights)
        else:
            exact = stored | {"weight_scale": stored["weight_scale"].float()}
            expected = kind.decompress(exact, scheme)["weight"]
        parts = stored | {"expected": expected}
        prefix = f"{name}." if path == "x" else f"{name}.{path}."
        found |= {f"{prefix}{part}": each.contiguous() for part, each in parts.items()}
    return found, config


def numbers_of_fp4(
    kind: type[BaseCompressor], stored: dict[str, torch.Tensor], args: QuantizationArgs
) -> torch.Tensor:
    """Returns the numbers in float32. `decompress` would round them to bfloat16."""
    packed = stored["weight_packed"]
    numbers = unpack_fp4_from_uint8(packed, *(packed.shape[0], 2 * packed.shape[1]), torch.float32)
    scale = kind._decompress_scale(stored["weight_scale"], torch.float32)
    return dequantize(
        numbers,
        scale,
        args=args,
        global_scale=stored.get("weight_global_scale"),
        dtype=torch.float32,
    )


def main() -> None:
    torch.manual_seed(0)
    others = tuple(name for name in MODELS if name not in FP4_PRESETS)
    for file, names in (("matrices", others), ("fp4", FP4_PRESETS)):
        tensors: dict[str, torch.Tensor] = {}
        configs = {}
        for name in names:
            packed, config = pack(name)
            tensors |= packed
            configs[name] = json.dumps(config)
        path = Path(__file__).with_name(f"{file}.safetensors")
        save_file(tensors, path, metadata=configs)


if __name__ == "__main__":
    main()
