"""Loads a decoder's weights, from the safetensors of a Hugging Face folder or from a GGUF file.

Files are mapped: a tensor that is stored in the compute dtype is never copied, and all processes
that map it share its memory. The config names and shapes every tensor; a missing, surplus or
wrongly shaped one is an error before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

import torch

from tandem.engine.executor.checkpoint import check_tied, map_files
from tandem.engine.executor.file_pages import FilePages
from tandem.engine.executor.latent_weights import LatentWeights, RotatedRows, token_products
from tandem.engine.executor.load_experts import load_experts
from tandem.engine.executor.load_progress import LoadProgress, Tell, nobody
from tandem.engine.executor.rotary_rows import rotary_rows
from tandem.engine.executor.tensors_by_name import KeptFor, TensorsByName
from tandem.engine.executor.weights import (
    ExpertWeights,
    LayerWeights,
    Linear,
    Mlp,
    ModelWeights,
    Quantized,
)
from tandem.models.checkpoint.check import check_weights
from tandem.models.checkpoint.expert_names import ExpertNames
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.weight_shapes import EMBEDDING, FINAL_NORM, NORMS, OUTPUT
from tandem.models.config.experts import Experts
from tandem.models.config.layers import LayerSpec
from tandem.models.config.model import ModelConfig
from tandem.models.files import naming
from tandem.models.gguf.tensors import Blocks


def load_weights(
    files: Sequence[Path],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kept_for: KeptFor = "",
    tell: Tell = nobody,
) -> ModelWeights:
    """Loads the weights in `dtype`. Matrices stay quantized if they are kept for kernels that
    multiply so, or that expand them. A layer is loaded each time that it is asked for. `tell` hears
    of the progress.

    Raises UnsupportedModel naming the tensors that are missing, surplus or wrongly shaped, and
    ConfigError naming a file that cannot be read."""
    shapes = check_weights(files, config)
    stored = map_files(files, config)
    if config.tie_word_embeddings:
        with naming(files[0] if len(files) == 1 else files[0].parent):
            check_tied(stored)
    progress = LoadProgress(shapes, sum(file.stat().st_size for file in files), tell)
    pages = FilePages(files)
    tensors = TensorsByName(stored, dtype=dtype, device=device, kept_for=kept_for, pages=pages)
    builder = _Builder(tensors, config, ExpertNames.of(config, stored))
    embedding = tensors.matrix(EMBEDDING)
    rows = embedding.blocks
    if kept_for == "native" and not _is_read_by_rows(rows):
        embedding, rows = Linear(tensors.tensor(EMBEDDING), None), None
    progress.note(EMBEDDING)
    output = embedding if config.tie_word_embeddings else tensors.matrix(OUTPUT)
    progress.note(OUTPUT)
    return ModelWeights(
        embedding=embedding.weight,
        embedding_blocks=rows,
        layers=_Layers(builder, config.layers, progress),
        pages=pages,
        final_norm=builder.norm(FINAL_NORM),
        output=output.weight,
        output_blocks=output.blocks,
    )


def _is_read_by_rows(embedding: Quantized | None) -> bool:
    """Returns whether the native kernels look up rows of such an embedding."""
    if isinstance(embedding, Blocks):
        return embedding.order is None
    return not isinstance(embedding, Fp8)


class _Layers(Sequence[LayerWeights]):
    """Layers that are loaded when they are asked for, each time anew."""

    def __init__(
        self, builder: _Builder, specs: Sequence[LayerSpec], progress: LoadProgress
    ) -> None:
        self._builder = builder
        self._specs = specs
        self._progress = progress

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...

    @overload
    def __getitem__(self, index: slice) -> list[LayerWeights]: ...

    def __getitem__(self, index: int | slice) -> LayerWeights | list[LayerWeights]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        name = f"model.layers.{index}"
        layer = self._builder.layer(name, self._specs[index])
        self._progress.note(f"{name}.")
        return layer

    def __len__(self) -> int:
        return len(self._specs)


class _Builder:
    """Makes layers of tensors."""

    def __init__(self, tensors: TensorsByName, config: ModelConfig, names: ExpertNames) -> None:
        self._tensors = tensors
        self._config = config
        self._names = names

    def layer(self, name: str, spec: LayerSpec) -> LayerWeights:
        attention, tensors = f"{name}.self_attn", self._tensors
        norms = {
            field: self.norm(f"{name}.{stored}.weight")
            for field, stored in NORMS[self._config.norms].items()
        }
        if self._config.qk_norm:
            norms["q_norm"] = self.norm(f"{attention}.q_norm.weight")
            norms["k_norm"] = self.norm(f"{attention}.k_norm.weight")
        latent = None
        qkv: tuple[Linear, ...]
        if self._config.latent is not None:
            parts = token_products(self._config.latent)
            qkv = tuple(self._of_latent(f"{attention}.{part}", rows) for part, rows in parts)
            latent = LatentWeights.read(attention, self._config.latent, tensors)
        elif self._config.is_fused:
            qkv = (self._rotary_first(tensors.linear(f"{attention}.qkv_proj")),)
        else:
            qkv = tensors.joined(*(f"{attention}.{part}_proj" for part in "qkv"))
        return LayerWeights(
            qkv=qkv,
            attention_out=tensors.linear(f"{attention}.o_proj"),
            sinks=tensors.tensor(f"{attention}.sinks") if self._config.has_sinks else None,
            mlp=self._experts(name, spec.experts) if spec.experts else self._mlp(f"{name}.mlp"),
            latent=latent,
            **norms,
        )

    def norm(self, name: str) -> torch.Tensor:
        """Returns the weights of a norm. With an offset they are float32: in bfloat16 the sum
        would lose most of its digits."""
        if not self._config.norm_offset:
            return self._tensors.tensor(name)
        return self._tensors.floats(name) + self._config.norm_offset

    def _of_latent(self, name: str, rotated: RotatedRows) -> Linear:
        weight = Linear(self._tensors.tensor(f"{name}.weight"), None)
        linear = self._tensors.with_bias(weight, f"{name}.bias")
        bias = None if linear.bias is None else rotated.in_halves(linear.bias)
        return Linear(rotated.in_halves(linear.weight), bias)

    def _mlp(self, name: str) -> Mlp:
        if self._config.is_fused:
            gate_up: tuple[Linear, ...] = (self._tensors.linear(f"{name}.gate_up_proj"),)
        else:
            gate_up = self._tensors.joined(f"{name}.gate_proj", f"{name}.up_proj")
        return Mlp(gate_up, self._tensors.linear(f"{name}.down_proj"))

    def _experts(self, layer: str, experts: Experts) -> ExpertWeights:
        shared = self._mlp(f"{layer}.mlp.shared_experts") if experts.shared_inner else None
        return load_experts(self._tensors, self._names, layer, experts, shared)

    def _rotary_first(self, qkv: Linear) -> Linear:
        rows = rotary_rows(self._config)
        if rows is None:
            return qkv
        bias = None if qkv.bias is None else qkv.bias[rows.to(qkv.bias.device)]
        if qkv.blocks is not None:
            return replace(qkv, bias=bias, blocks=qkv.blocks.in_order(rows))
        return Linear(qkv.weight[rows.to(qkv.weight.device)], bias)
