"""A decoder's weights, from the safetensors of a Hugging Face folder or from a GGUF file.

Files are mapped: a tensor that is stored in the compute dtype is never copied, and all processes
that map it share its memory. The config names and shapes every tensor; a missing, surplus or
wrongly shaped one is an error before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import overload

import torch
from safetensors.torch import load_file

from tandem.engine.executor.expert_weights import ExpertNames, Shapes
from tandem.engine.executor.file_pages import FilePages
from tandem.engine.executor.kv_scales import is_kv_scale
from tandem.engine.executor.latent_weights import LatentWeights, RotatedRows, token_products
from tandem.engine.executor.mxfp4 import dequantize
from tandem.engine.executor.weight_shapes import (
    EMBEDDING,
    FINAL_NORM,
    NORMS,
    OUTPUT,
    expected_shapes,
    rotary_rows,
)
from tandem.errors import UnsupportedModel
from tandem.models.broken_files import naming
from tandem.models.config import ModelConfig
from tandem.models.experts import Experts
from tandem.models.gguf.tensors import Blocks, is_packed, read_tensors
from tandem.models.layers import LayerSpec
from tandem.models.quantized.tensors import Coded, join_parts

Stored = Mapping[str, torch.Tensor | Blocks | Coded]

# Tables that old checkpoints carry along; they follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_NAMES_SHOWN_MAX = 3


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor  # [out, in]; on the device "meta" if `blocks` has the numbers
    bias: torch.Tensor | None  # [out]
    blocks: Blocks | None = None  # a quantized matrix, as its file has it


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: tuple[Linear, ...]  # gate and up, or one with the rows of both
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    router: Linear  # [experts, hidden]; may be float32
    mlps: tuple[Mlp, ...]
    shared: Mlp | None = None  # of all tokens
    correction: torch.Tensor | None = None  # [experts], float32


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's weights; norms that a family adds an offset to have it, and are float32."""

    qkv: tuple[Linear, ...]  # q, k and v, or one with the rows of all three; see also `latent`
    attention_out: Linear
    mlp: Mlp | ExpertWeights
    attention_norm: torch.Tensor | None = None  # before attention
    attention_post_norm: torch.Tensor | None = None  # of what it adds
    mlp_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim], or [all heads * head_dim]
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [heads]: scores without keys
    latent: LatentWeights | None = None  # qkv is of queries or their latent, and of a token's KV


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: torch.Tensor  # [vocab, hidden]; as Linear.weight
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor
    output: torch.Tensor  # [vocab, hidden]; the embedding itself when they are tied
    embedding_blocks: Blocks | None = None
    output_blocks: Blocks | None = None
    pages: FilePages = field(default_factory=FilePages)  # of the files

    def loaded(self) -> ModelWeights:
        """Returns the same with all layers in memory."""
        return replace(self, layers=tuple(self.layers))


def load_weights(
    files: Sequence[Path],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    keeps_blocks: bool = False,
) -> ModelWeights:
    """Loads the weights in `dtype`; with `keeps_blocks` those stay quantized that native kernels
    multiply so. A layer is loaded each time that it is asked for.

    Raises UnsupportedModel naming the tensors that are missing, surplus or wrongly shaped, and
    ConfigError naming a file that cannot be read."""
    stored = _map_files(files, config)
    with naming(files[0] if len(files) == 1 else files[0].parent):
        if config.num_layers > len(stored):
            raise UnsupportedModel(
                f"{config.num_layers} layers are more than the checkpoint has tensors"
            )
        _check(stored, expected_shapes(config, stored), config)
    pages = FilePages(files)
    builder = _Builder(stored, config, dtype, device, keeps_blocks, pages)
    embedding = builder.matrix(EMBEDDING)
    output = embedding if config.tie_word_embeddings else builder.matrix(OUTPUT)
    return ModelWeights(
        embedding=embedding.weight,
        embedding_blocks=embedding.blocks,
        layers=_Layers(builder, config.layers),
        pages=pages,
        final_norm=builder.norm(FINAL_NORM),
        output=output.weight,
        output_blocks=output.blocks,
    )


def _map_files(files: Sequence[Path], config: ModelConfig) -> Stored:
    if files[0].suffix.lower() == ".gguf":
        with naming(files[0]):
            return read_tensors(files[0], config)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with naming(file):
            tensors |= load_file(file)
    return tensors if config.quantization is None else join_parts(tensors, config.quantization)


def _check(stored: Stored, expected: Shapes, config: ModelConfig) -> None:
    missing = expected.keys() - stored.keys()
    if missing:
        raise UnsupportedModel(f"the checkpoint lacks {_named(missing)}, which its config implies")
    surplus = {name for name in stored.keys() - expected.keys() if not _DERIVED.fullmatch(name)}
    extra = range(config.num_layers, config.num_layers + config.num_extra_layers)
    left = tuple(map(_layer_start, extra))
    surplus = {name for name in surplus if not (is_kv_scale(name) or name.startswith(left))}
    if config.tie_word_embeddings:
        surplus.discard(OUTPUT)  # some checkpoints store the tied matrix twice
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
        if not tensor.is_floating_point() and not (
            name.endswith(("_blocks", "_scales")) and tensor.dtype == torch.uint8
        ):
            raise UnsupportedModel(f"{name} holds {tensor.dtype}, not floating-point numbers")


def _layer_start(layer: int) -> str:
    return f"model.layers.{layer}."


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN_MAX
    shown = ", ".join(ordered[:_NAMES_SHOWN_MAX])
    return f"{shown} and {more} more tensors" if more > 0 else shown


class _Layers(Sequence[LayerWeights]):
    """Layers that are loaded when they are asked for, each time anew."""

    def __init__(self, builder: _Builder, specs: Sequence[LayerSpec]) -> None:
        self._builder = builder
        self._specs = specs

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...

    @overload
    def __getitem__(self, index: slice) -> list[LayerWeights]: ...

    def __getitem__(self, index: int | slice) -> LayerWeights | list[LayerWeights]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self._builder.layer(f"model.layers.{index}", self._specs[index])

    def __len__(self) -> int:
        return len(self._specs)


class _Builder:
    """Brings tensors, by name, into the compute dtype and onto the device."""

    def __init__(
        self,
        stored: Stored,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        keeps_blocks: bool,
        pages: FilePages,
    ) -> None:
        self._stored = stored
        self._keeps_blocks = keeps_blocks
        self._pages = pages
        self._config = config
        self._dtype = dtype
        self._device = device
        self._names = ExpertNames.of(config, stored)

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._dense(name)
        tensor = stored.to(device=self._device, dtype=self._dtype)
        if tensor is not stored:
            self._drop(name)
        return tensor

    def matrix(self, name: str) -> Linear:
        """Returns a matrix without a bias, quantized if it is kept so."""
        stored = self._stored[name]
        if not self._keeps_blocks or not isinstance(stored, Blocks) or not is_packed(stored):
            return Linear(self.tensor(name), None)
        return Linear(torch.empty(stored.shape, dtype=self._dtype, device="meta"), None, stored)

    def layer(self, name: str, spec: LayerSpec) -> LayerWeights:
        attention = f"{name}.self_attn"
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
            latent = LatentWeights.read(attention, self._config.latent, self.tensor)
        elif self._config.is_fused:
            qkv = (self._rotary_first(self._linear(f"{attention}.qkv_proj")),)
        else:
            qkv = self._joined(*(f"{attention}.{part}_proj" for part in "qkv"))
        return LayerWeights(
            qkv=qkv,
            attention_out=self._linear(f"{attention}.o_proj"),
            sinks=self.tensor(f"{attention}.sinks") if self._config.has_sinks else None,
            mlp=self._experts(name, spec.experts) if spec.experts else self._mlp(f"{name}.mlp"),
            latent=latent,
            **norms,
        )

    def _of_latent(self, name: str, rotated: RotatedRows) -> Linear:
        linear = self._linear(name)
        bias = None if linear.bias is None else rotated.in_halves(linear.bias)
        return Linear(rotated.in_halves(linear.weight), bias)

    def _mlp(self, name: str) -> Mlp:
        if self._config.is_fused:
            gate_up: tuple[Linear, ...] = (self._linear(f"{name}.gate_up_proj"),)
        else:
            gate_up = self._joined(f"{name}.gate_proj", f"{name}.up_proj")
        return Mlp(gate_up, self._linear(f"{name}.down_proj"))

    def _experts(self, layer: str, experts: Experts) -> ExpertWeights:
        names = self._names
        gate_ups: list[tuple[Linear, ...]]
        downs: list[tuple[Linear, ...]]
        if names.form == "gpt_oss":
            gate_up, down = (self._of_gpt_oss(f"{layer}.{name}") for name in names.stacked)
            # Gates and ups take turns.
            weight, bias = (torch.cat([each[:, ::2], each[:, 1::2]], 1) for each in gate_up)
            gate_ups = [(Linear(*each),) for each in zip(weight, bias, strict=True)]
            downs = [(Linear(*each),) for each in zip(*down, strict=True)]
        elif names.is_stacked:
            *gates, downs = (self._of_stack(f"{layer}.{name}") for name in names.stacked)
            gate_ups = [tuple(part for (part,) in parts) for parts in zip(*gates, strict=True)]
        else:
            parts = [[f"{layer}.{part}" for part in names.parts(i)] for i in range(experts.num)]
            gate_ups = self._of_experts([(gate, up) for gate, up, _ in parts])
            downs = self._of_experts([(down,) for _, _, down in parts])
        has_shared = experts.shared_inner > 0
        correction = f"{layer}.{names.correction}"
        return ExpertWeights(
            router=self._router(f"{layer}.{names.router}"),
            shared=self._mlp(f"{layer}.mlp.shared_experts") if has_shared else None,
            correction=self._floats(correction) if experts.is_corrected else None,
            mlps=tuple(
                Mlp(gate_up, down[0]) for gate_up, down in zip(gate_ups, downs, strict=True)
            ),
        )

    def _router(self, name: str) -> Linear:
        """Returns the router's matrix, of float32 where transformers computes with that."""
        if self._names.form != "deepseek":
            return self._linear(name)
        return Linear(self._floats(f"{name}.weight"), None)

    def _of_gpt_oss(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights [experts, out, in] and biases [experts, out]."""
        bias = self.tensor(f"{name}_bias")
        if not self._names.is_mxfp4:
            return self.tensor(name).transpose(1, 2).contiguous(), bias
        blocks, scales = self._dense(f"{name}_blocks"), self._dense(f"{name}_scales")
        return dequantize(blocks, scales, self._dtype).to(self._device), bias

    def _of_stack(self, name: str) -> list[tuple[Linear, ...]]:
        return [(Linear(each, None),) for each in self.tensor(name)]

    def _of_experts(self, names: Sequence[Sequence[str]]) -> list[tuple[Linear, ...]]:
        """Returns the matrix of each expert, or its parts: views of one tensor of all experts where
        that costs no copy that is not made anyway."""
        if self._is_mapped(names[0][0]):
            return [tuple(Linear(self.tensor(part), None) for part in parts) for parts in names]
        stacked = self._stacked([part for parts in names for part in parts])
        return [(Linear(each, None),) for each in stacked.chunk(len(names))]

    def _rotary_first(self, qkv: Linear) -> Linear:
        rows = rotary_rows(self._config)
        if rows is None:
            return qkv
        rows = rows.to(self._device)
        return Linear(qkv.weight[rows], None if qkv.bias is None else qkv.bias[rows])

    def norm(self, name: str) -> torch.Tensor:
        """Returns the weights of a norm. With an offset they are float32: in bfloat16 the sum
        would lose most of its digits."""
        if not self._config.norm_offset:
            return self.tensor(name)
        return self._floats(name) + self._config.norm_offset

    def _floats(self, name: str) -> torch.Tensor:
        return self._dense(name).to(device=self._device, dtype=torch.float32)

    def _dense(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        return stored if isinstance(stored, torch.Tensor) else stored.numbers()

    def _drop(self, name: str) -> None:
        stored = self._stored[name]
        if isinstance(stored, Coded):
            for part in stored.parts.values():
                self._pages.drop(part)
        else:
            self._pages.drop(stored.data if isinstance(stored, Blocks) else stored)

    def _optional(self, name: str) -> torch.Tensor | None:
        return self.tensor(name) if name in self._stored else None

    def _linear(self, name: str) -> Linear:
        return replace(self.matrix(f"{name}.weight"), bias=self._optional(f"{name}.bias"))

    def _joined(self, *names: str) -> tuple[Linear, ...]:
        """One matrix for products of the same input, where it costs no copy that is not made
        anyway: mapped tensors stay apart."""
        if self._keeps_blocks:
            linears = tuple(self._linear(name) for name in names)
            if all(linear.blocks for linear in linears):
                return linears
        if self._is_mapped(f"{names[0]}.weight"):
            return tuple(self._linear(name) for name in names)
        has_bias = f"{names[0]}.bias" in self._stored
        return (
            Linear(
                self._stacked([f"{name}.weight" for name in names]),
                self._stacked([f"{name}.bias" for name in names]) if has_bias else None,
            ),
        )

    def _is_mapped(self, name: str) -> bool:
        """Returns whether a tensor is used as it lies in its file."""
        stored = self._stored[name]
        if not isinstance(stored, torch.Tensor):
            return False
        return stored.dtype == self._dtype and stored.device == self._device

    def _stacked(self, names: list[str]) -> torch.Tensor:
        shapes = [self._stored[name].shape for name in names]
        sizes = [shape[0] for shape in shapes]
        shape = (sum(sizes), *shapes[0][1:])
        stacked = torch.empty(shape, dtype=self._dtype, device=self._device)
        for rows, name in zip(torch.split(stacked, sizes), names, strict=True):
            rows.copy_(self._dense(name))
            self._drop(name)
        return stacked
