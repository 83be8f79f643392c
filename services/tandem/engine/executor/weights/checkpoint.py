"""Maps the tensors of a checkpoint into memory. models/checkpoint/check.py has checked the
checkpoint before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tandem.engine.executor.weights.mxfp4 import Mxfp4, join_mxfp4
from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.quantized.tensors import Coded, join_parts
from tandem.models.checkpoint.weight_shapes import EMBEDDING, OUTPUT
from tandem.models.config.model import ModelConfig
from tandem.models.files import naming
from tandem.models.gguf.tensors import GgufBlocks, read_tensors

Stored = Mapping[str, torch.Tensor | GgufBlocks | Coded | Mxfp4]


def map_files(files: Sequence[Path], config: ModelConfig) -> Stored:
    """Returns the tensors of the files by name, without copying them into memory. If a file stores
    a quantized matrix as several tensors, such as codes and scales, the result has one object for
    the matrix.

    Raises ConfigError with the name of the file if a file cannot be read.
    """
    if files[0].suffix.lower() == ".gguf":
        with naming(files[0]):
            return read_tensors(files, config)
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, Path] = {}
    for file in files:
        with naming(file):
            stored = load_file(file)
            names = config.names_of(stored)
            loaded = {own: stored[name] for own, name in names.items()}
        tensors |= loaded
        places |= dict.fromkeys(loaded, file)
    if config.is_mxfp4:
        return join_mxfp4(tensors)
    if config.quantization is None:
        return tensors
    return join_parts(tensors, config.quantization, places)


def check_tied(stored: Stored) -> None:
    """Raises UnsupportedModel if the config ties the output matrix to the embedding but the
    checkpoint stores an output matrix that differs from the embedding.

    A checkpoint may store the tied matrix twice, as two equal matrices. If the two matrices differ,
    transformers does not tie them, and so would compute other logits than Tandem.
    """
    output, embedding = (_parts_of(stored.get(name)) for name in (OUTPUT, EMBEDDING))
    if not output:
        return
    are_alike = output.keys() == embedding.keys()
    if not (are_alike and all(_are_equal(output[part], embedding[part]) for part in output)):
        raise UnsupportedModel(
            f"tie_word_embeddings is true, but {OUTPUT} differs from {EMBEDDING}; set "
            "tie_word_embeddings to false in config.json"
        )


def _parts_of(
    matrix: torch.Tensor | GgufBlocks | Coded | Mxfp4 | None,
) -> Mapping[str, torch.Tensor]:
    """Returns the tensors in which a checkpoint stores a matrix. The keys are kinds of tensors,
    such as "weight" or names for codes and scales. The result is empty for GGUF, because a GGUF
    file stores a tied matrix only once."""
    if isinstance(matrix, Coded):
        return matrix.by_kind
    return {"weight": matrix} if isinstance(matrix, torch.Tensor) else {}


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype:
        return torch.equal(one.float(), other.float())
    bits = torch.uint8 if one.dtype.is_floating_point and one.dtype.itemsize == 1 else one.dtype
    return torch.equal(one.view(bits), other.view(bits))
