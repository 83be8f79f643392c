"""Writes matrices.safetensors: small matrices that the package compressed-tensors packed.

    pip install compressed-tensors==0.20.0
    python tests/data/compressed_tensors/make.py

Of each preset: the tensors that the package stores of a matrix [2, 256], and `expected`, the
numbers in float32 that it reads them as. The metadata has its `quantization_config`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

PRESETS = ("W4A16", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK")
NUM_OUT, NUM_IN = 2, 256


def scales_of(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    parts = {
        "group": lambda: weight.unflatten(1, (-1, args.group_size)),
        "channel": lambda: weight.unsqueeze(1),
        "block": lambda: (
            weight.unflatten(1, (-1, args.block_structure[1])).movedim(1, 0).flatten(1)
        ),
    }[args.strategy]()
    scales, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    return scales


def pack(preset: str) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    model = torch.nn.ModuleDict({"x": torch.nn.Linear(NUM_IN, NUM_OUT, bias=False)}).bfloat16()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    groups = {"group_0": scheme}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, quantization_status="frozen")
    )
    linear = model["x"]
    scales = scales_of(linear.weight.data.float(), scheme.weights)
    linear.weight_scale.data.copy_(scales.view(linear.weight_scale.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    stored = {name: tensor.detach() for name, tensor in linear.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        compressor.update_config(folder)
        config = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    kind = BaseCompressor.get_value_from_registry(config["format"])
    exact = stored | {"weight_scale": stored["weight_scale"].float()}
    expected = kind.decompress(exact, linear.quantization_scheme)["weight"]
    return stored | {"expected": expected}, config


def main() -> None:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    configs = {}
    for preset in PRESETS:
        stored, config = pack(preset)
        tensors |= {f"{preset}.{name}": each.contiguous() for name, each in stored.items()}
        configs[preset] = json.dumps(config)
    save_file(tensors, Path(__file__).with_name("matrices.safetensors"), metadata=configs)


if __name__ == "__main__":
    main()
