"""The tensors that a checkpoint has: all that its config implies, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tandem.engine.executor.expert_weights import Shapes
from tandem.engine.executor.kv_scales import is_kv_scale
from tandem.engine.executor.mxfp4 import Mxfp4, join_mxfp4
from tandem.engine.executor.weight_shapes import EMBEDDING, OUTPUT
from tandem.errors import UnsupportedModel
from tandem.models.broken_files import naming
from tandem.models.config import ModelConfig
from tandem.models.gguf.tensors import Blocks, read_tensors
from tandem.models.quantized.tensors import Coded, join_parts

Stored = Mapping[str, torch.Tensor | Blocks | Coded | Mxfp4]

# Tables that old checkpoints carry along; they follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_NAMES_SHOWN_MAX = 3


def map_files(files: Sequence[Path], config: ModelConfig) -> Stored:
    if files[0].suffix.lower() == ".gguf":
        with naming(files[0]):
            return read_tensors(files[0], config)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with naming(file):
            tensors |= load_file(file)
    if config.is_mxfp4:
        return join_mxfp4(tensors)
    return tensors if config.quantization is None else join_parts(tensors, config.quantization)


def check(stored: Stored, expected: Shapes, config: ModelConfig) -> None:
    missing = expected.keys() - stored.keys()
    if missing:
        raise UnsupportedModel(f"the checkpoint lacks {_named(missing)}, which its config implies")
    surplus = {name for name in stored.keys() - expected.keys() if not _DERIVED.fullmatch(name)}
    extra = range(config.num_layers, config.num_layers + config.num_extra_layers)
    left = tuple(map(_layer_start, extra))
    surplus = {name for name in surplus if not (is_kv_scale(name) or name.startswith(left))}
    if config.tie_word_embeddings:
        _check_tied(stored)
        surplus.discard(OUTPUT)
    if surplus:
        raise UnsupportedModel(f"the checkpoint has {_named(surplus)}, which its config denies")
    for name, shape in expected.items():
        tensor = stored[name]
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(
                f"{name} has shape {list(tensor.shape)}; the config implies {list(shape)}"
            )
        if not isinstance(tensor, torch.Tensor):
            continue
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"{name} holds {tensor.dtype}, not floating-point numbers")


def _check_tied(stored: Stored) -> None:
    """Some checkpoints store the tied matrix twice. Raises UnsupportedModel if two matrices differ:
    transformers does not tie them then."""
    output, embedding = stored.get(OUTPUT), stored.get(EMBEDDING)
    if not (isinstance(output, torch.Tensor) and isinstance(embedding, torch.Tensor)):
        return
    if not torch.equal(output, embedding):
        raise UnsupportedModel(
            f"tie_word_embeddings is true, and {OUTPUT} differs from {EMBEDDING}: set it to false"
        )


def _layer_start(layer: int) -> str:
    return f"model.layers.{layer}."


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN_MAX
    shown = ", ".join(ordered[:_NAMES_SHOWN_MAX])
    return f"{shown} and {more} more tensors" if more > 0 else shown
