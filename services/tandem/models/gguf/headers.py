"""Reads the tensor headers of GGUF files and converts tensor names to Hugging Face names. Does not
import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from tandem.errors import UnsupportedModel
from tandem.models.gguf.layout import StoredTensor, read_parts
from tandem.models.gguf.names import CORRECTION, ROPE_TABLES, hf_name, unused_layers


def read_headers(files: Sequence[Path], architecture: str) -> dict[str, StoredTensor]:
    """Returns the headers of a model's tensors by their Hugging Face names and with the shapes of
    Hugging Face files. Leaves out RoPE tables, which are part of the config, and layers that
    predict further tokens.

    Raises ConfigError for a truncated or invalid file, and UnsupportedModel naming a tensor that
    the architecture does not have or whose type cannot be dequantized.
    """
    headers: dict[str, StoredTensor] = {}
    readable: dict[gguf.GGMLQuantizationType, bool] = {}
    tensors = read_parts(files, skips_strings=True).tensors
    unused = unused_layers(each.name for each in tensors)
    for each in tensors:
        if each.name in ROPE_TABLES or each.name.startswith(unused):
            continue
        name = hf_name(each.name, architecture)
        if name in headers:
            raise UnsupportedModel(
                f"the model has {headers[name].name} and {each.name}, which are two names of the "
                "same tensor; only one of them is allowed"
            )
        if not readable.setdefault(each.type, _can_dequantize(each.type)):
            raise UnsupportedModel(
                f"{each.name} is of type {each.type.name}, which the gguf package cannot dequantize"
            )
        headers[name] = replace(each, shape=_hf_shape(name, each.shape))
    return headers


def _hf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape with the sizes of 1 that llama.cpp's converter removes."""
    if name.endswith("linear_attn.conv1d.weight") and len(shape) == 2:
        return shape[0], 1, shape[1]
    if name.endswith("mlp.shared_expert_gate.weight") and len(shape) == 1:
        return 1, *shape
    if name.endswith(CORRECTION):  # Ernie 4.5 has one row of numbers.
        return shape[-1:]
    return shape


def _can_dequantize(kind: gguf.GGMLQuantizationType) -> bool:
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
