"""Reads the static scales for fp8_e4m3 KV that some checkpoints have: one scale for K and one for V
in each layer.

Without static scales, fp8_e4m3 KV has a scale for each token (tandem_kernels/kv_fp8.py). Workers
that exchange KV must use the same static scales. The name of the KV data type therefore includes a
digest of the scales.
"""

from __future__ import annotations

from itertools import groupby

import torch
from safetensors import safe_open

from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.kv_scales import Place, find_kv_scales
from tandem.models.files import naming
from tandem.models.folder import ModelFolder
from tandem_kernels.kv_fp8 import FixedScales
from tandem_kernels.kv_int8 import SCALE_MAX, round_up


def fixed_scales(folder: ModelFolder) -> FixedScales | None:
    """Returns the static scales of a model, or None if the model has no static scales.

    Raises UnsupportedModel for a missing or invalid scale, and ConfigError with the name of a file
    that cannot be read.
    """
    stored = find_kv_scales(folder.weight_files, folder.config)
    if not stored:
        return None
    found: dict[Place, float] = {}
    by_file = sorted(stored.items(), key=lambda item: item[1].file)
    for file, items in groupby(by_file, lambda item: item[1].file):
        with naming(file), safe_open(file, "pt") as tensors:
            for place, (_, name) in items:
                found[place] = _scale(name, float(tensors.get_tensor(name)))
    # Layers without KV of their own have no scale, and the scale 1 is not used.
    layers = range(folder.config.num_layers)
    scales = [[found.get((i, which), 1.0) for which in "kv"] for i in layers]
    return FixedScales(round_up(torch.tensor(scales)))


def _scale(name: str, scale: float) -> float:
    if not 0 < scale <= SCALE_MAX:
        raise UnsupportedModel(
            f"{name} is {scale}; a scale of KV must be above 0, and at most {SCALE_MAX:.0f}"
        )
    return scale
