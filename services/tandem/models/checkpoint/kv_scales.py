"""Finds the static scales that a checkpoint has for a KV cache in fp8: one number per layer for K,
and one for V.

The table lists the names of the scales of K. The scales of V have the same names with v_scale in
place of k_scale, and v_proj in place of k_proj.

name of the scale of K in layer N           used by
model.layers.N.self_attn.k_scale            compressed-tensors
model.layers.N.self_attn.k_proj.k_scale     ModelOpt
model.layers.N.self_attn.qkv_proj.k_scale   checkpoints that store Q, K and V as one matrix
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.headers import FLOATS, read_header
from tandem.models.config.model import ModelConfig

_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([kv]|qkv)_proj\.)?([kv])_scale")

Place = tuple[int, str]  # layer number, and "k" or "v"


class StoredScale(NamedTuple):
    file: Path
    name: str


def place_of_scale(name: str) -> Place | None:
    """Parses the name of a KV scale into the layer and "k" or "v". Returns None for other names."""
    found = _NAME.fullmatch(name)
    if found is None or found[2] not in (None, "qkv", found[3]):
        return None
    return int(found[1]), found[3]


def find_kv_scales(files: Sequence[Path], config: ModelConfig) -> dict[Place, StoredScale]:
    """Finds the K and V scales of all layers that have KV of their own in the headers of
    safetensors files. Returns {} for GGUF files, and if neither the files nor the config have KV
    scales.

    Raises UnsupportedModel for a scale that is missing or is not a single number, and ConfigError
    naming a file that is truncated or invalid."""
    if files[0].suffix.lower() == ".gguf":
        return {}
    found: dict[Place, StoredScale] = {}
    for file in files:
        tensors = read_header(file).tensors
        for own, name in config.names_of(tensors).items():
            if (place := place_of_scale(own)) is None:
                continue
            each = tensors[name]
            if math.prod(each.shape) != 1 or each.dtype not in FLOATS:
                raise UnsupportedModel(
                    f"{file}: {name} has type {each.dtype} and shape {list(each.shape)}; a KV "
                    "scale must be a single floating-point number"
                )
            found[place] = StoredScale(file, name)
    if not found and not config.has_kv_scales:
        return {}
    wanted = [
        (number, which)
        for number, layer in enumerate(config.layers)
        if layer.has_attention and layer.kv_source is None
        for which in "kv"
    ]
    if missing := [place for place in wanted if place not in found]:
        layer, which = missing[0]
        raise UnsupportedModel(
            f"{files[0].parent}: the checkpoint lacks {which}_scale of layer {layer}; kv-dtype "
            "fp8_e4m3 needs k_scale and v_scale of all layers with KV, so add them, or set another "
            "kv-dtype"
        )
    return {place: found[place] for place in wanted}
