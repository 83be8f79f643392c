"""Maps the tensors of a checkpoint, which models/checkpoint/check.py has checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tandem.engine.executor.mxfp4 import Mxfp4, join_mxfp4
from tandem.errors import UnsupportedModel
from tandem.models.broken_files import naming
from tandem.models.checkpoint.weight_shapes import EMBEDDING, OUTPUT
from tandem.models.config import ModelConfig
from tandem.models.gguf.tensors import Blocks, read_tensors
from tandem.models.quantized.tensors import Coded, join_parts

Stored = Mapping[str, torch.Tensor | Blocks | Coded | Mxfp4]


def map_files(files: Sequence[Path], config: ModelConfig) -> Stored:
    """Returns the tensors, which stay in the files' pages; those of a quantized matrix as one."""
    if files[0].suffix.lower() == ".gguf":
        with naming(files[0]):
            return read_tensors(files[0], config)
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, Path] = {}
    for file in files:
        with naming(file):
            loaded = load_file(file)
        tensors |= loaded
        places |= dict.fromkeys(loaded, file)
    if config.is_mxfp4:
        return join_mxfp4(tensors)
    if config.quantization is None:
        return tensors
    return join_parts(tensors, config.quantization, places)


def check_tied(stored: Stored) -> None:
    """Some checkpoints store the tied matrix twice. Raises UnsupportedModel if two matrices differ:
    transformers does not tie them then."""
    output, embedding = stored.get(OUTPUT), stored.get(EMBEDDING)
    if not (isinstance(output, torch.Tensor) and isinstance(embedding, torch.Tensor)):
        return
    if not torch.equal(output, embedding):
        raise UnsupportedModel(
            f"tie_word_embeddings is true, and {OUTPUT} differs from {EMBEDDING}: set it to false"
        )
