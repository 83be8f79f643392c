"""Reads the static scales of KV in fp8_e4m3 that a checkpoint may have: of K and V of each layer.

They take the place of the scales that tokens have of their own (tandem_kernels/kv_fp8.py). All
workers of a model must have the same; their digest is part of the KV data type's name.
"""

from __future__ import annotations

import torch
from safetensors import safe_open

from tandem.errors import UnsupportedModel
from tandem.models.broken_files import naming
from tandem.models.checkpoint.kv_scale_names import place_of_scale
from tandem.models.source import ModelFolder
from tandem_kernels.kv_fp8 import FixedScales
from tandem_kernels.kv_int8 import SCALE_MAX, round_up


def fixed_scales(folder: ModelFolder) -> FixedScales | None:
    """Returns the scales of a model; None if neither its files nor its config tell of any.

    Raises UnsupportedModel for a scale that is missing or no scale, and ConfigError naming a file
    that cannot be read.
    """
    found: dict[tuple[int, str], float] = {}
    for file in () if folder.is_gguf else folder.weight_files:
        with naming(file), safe_open(file, "pt") as tensors:
            for name in list(tensors.keys()):  # of safetensors, which is no dict
                if (place := place_of_scale(name)) is not None:
                    found[place] = _scale(name, tensors.get_tensor(name))
    if not found and not folder.config.has_kv_scales:
        return None
    wanted = [[(layer, which) for which in "kv"] for layer in range(folder.config.num_layers)]
    missing = [key for of_layer in wanted for key in of_layer if key not in found]
    if missing:
        layer, which = missing[0]
        raise UnsupportedModel(
            f"{folder.path}: the checkpoint lacks {which}_scale of layer {layer}; static scales of "
            "KV must be there for K and V of all layers, or kv-dtype be another than fp8_e4m3"
        )
    scales = torch.tensor([[found[key] for key in of_layer] for of_layer in wanted])
    return FixedScales(round_up(scales))


def _scale(name: str, tensor: torch.Tensor) -> float:
    scale = float(tensor.float()) if tensor.numel() == 1 else float("nan")
    if not 0 < scale <= SCALE_MAX:
        raise UnsupportedModel(
            f"{name} is {tensor.flatten()[:4].tolist()} of shape {list(tensor.shape)}; a scale of "
            f"KV must be one number above 0, at most {SCALE_MAX:.0f}"
        )
    return scale
