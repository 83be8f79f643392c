"""Reads the tensor headers of GGUF files and converts tensor names to Hugging Face names. Does not
import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from tandem.errors import UnsupportedModel
from tandem.models.gguf.layout import StoredTensor, read_parts
from tandem.models.gguf.names import ROPE_TABLES, hf_name


def read_headers(files: Sequence[Path], architecture: str) -> dict[str, StoredTensor]:
    """Returns the headers of a model's tensors by their Hugging Face names, except RoPE tables,
    which are part of the config.

    Raises ConfigError for a truncated or invalid file, and UnsupportedModel naming a tensor that
    the architecture does not have or whose type cannot be dequantized.
    """
    headers: dict[str, StoredTensor] = {}
    readable: dict[gguf.GGMLQuantizationType, bool] = {}
    for each in read_parts(files, skips_strings=True).tensors:
        if each.name in ROPE_TABLES:
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
        headers[name] = each
    return headers


def _can_dequantize(kind: gguf.GGMLQuantizationType) -> bool:
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
