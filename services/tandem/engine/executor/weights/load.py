"""Loads a decoder's weights from the safetensors files of a Hugging Face folder or from a GGUF
file.

Files are mapped into memory. A tensor that is stored in the compute dtype is used directly from the
mapped file. All processes that map the file share this memory. The config determines the name and
shape of every tensor. A missing, surplus or wrongly shaped tensor raises an error before any tensor
is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, overload

import torch

from tandem.engine.executor.weights.checkpoint import check_tied, map_files
from tandem.engine.executor.weights.decoder_weights import (
    AltUpWeights,
    CompressorWeights,
    CopyWeights,
    EntryWeights,
    ExpertWeights,
    IndexerWeights,
    LatentWeights,
    LaurelWeights,
    LayerInputWeights,
    LayerStreamWeights,
    LayerWeights,
    Linear,
    Mlp,
    ModelWeights,
    PerLayerWeights,
    Quantized,
    SharedKvWeights,
    StateWeights,
    StreamWeights,
)
from tandem.engine.executor.weights.experts import load_experts
from tandem.engine.executor.weights.released_memory import FilePages
from tandem.engine.executor.weights.rotary_rows import (
    RotatedRows,
    head_rows,
    indexer_rows,
    joined_delta_rows,
    query_and_gate_rows,
    query_rows,
    rotary_rows,
    rows_of_heads,
    token_products,
)
from tandem.engine.executor.weights.share import (
    WHOLE,
    Share,
    joined_parts,
    joined_products,
    share_of_layer,
    share_of_outputs,
)
from tandem.engine.executor.weights.tensors_by_name import KeptFor, TensorsByName
from tandem.models.checkpoint.check import check_weights
from tandem.models.checkpoint.expert_names import ExpertNames, shared_mlp
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.weight_shapes import (
    COPY_PROJECTIONS,
    EMBEDDING,
    FINAL_NORM,
    HEAD_STREAMS,
    LAYER_EMBEDDING,
    LAYER_NORM,
    LAYER_PROJECTION,
    MERGE_PROJECTIONS,
    OUTPUT,
    norm_names,
)
from tandem.models.config.compressor import Compressor
from tandem.models.config.deepseek_v4 import SharedKv
from tandem.models.config.experts import Experts
from tandem.models.config.indexer import Indexer
from tandem.models.config.latent import Latent
from tandem.models.config.layers import LayerSpec
from tandem.models.config.linear_attention import GatedDelta, KimiDelta, LinearAttention, Mamba2
from tandem.models.config.model import ModelConfig
from tandem.models.config.rope import Rope
from tandem.models.files import naming
from tandem.models.gguf.tensors import GgufBlocks

# Called with (number of bytes of the model's files loaded so far, number of bytes of all files).
OnProgress = Callable[[int, int], None]


def ignore_progress(num_bytes: int, num_bytes_all: int) -> None:
    """Does nothing; the default of `on_progress`."""


def load_weights(
    files: Sequence[Path],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kept_for: KeptFor = "",
    share: Share = WHOLE,
    on_progress: OnProgress = ignore_progress,
) -> ModelWeights:
    """Loads the weights in `dtype`. With `share`, loads what one rank of a tensor-parallel engine
    needs, for torch or Triton kernels.

    If `kept_for` is not empty, it names kernels. A quantized matrix then stays quantized if these
    kernels can read its format. The layers of the result are not loaded yet: each access to a layer
    loads the layer, a second access loads it again. `on_progress` is called after each loaded
    layer.

    Raises UnsupportedModel with the names of tensors that are missing, surplus or wrongly shaped,
    and ConfigError with the name of a file that cannot be read.
    """
    shapes = check_weights(files, config)
    stored = map_files(files, config)
    if config.tie_word_embeddings:
        with naming(files[0] if len(files) == 1 else files[0].parent):
            check_tied(stored)
    progress = LoadProgress(shapes, sum(file.stat().st_size for file in files), on_progress)
    pages = FilePages(files)
    # A rank divides mapped tensors, so it reads only its own rows, and moves its part then.
    loaded_on = device if share.num_ranks == 1 else torch.device("cpu")
    tensors = TensorsByName(stored, dtype=dtype, device=loaded_on, kept_for=kept_for, pages=pages)
    builder = _Builder(tensors, config, ExpertNames.of(config, stored))
    embedding = tensors.matrix(EMBEDDING)
    rows = embedding.blocks
    if kept_for == "native" and not _is_read_by_rows(rows):
        embedding = Linear(tensors.tensor(EMBEDDING), None)
        rows = None
    progress.note(EMBEDDING)
    output = embedding if config.tie_word_embeddings else tensors.matrix(OUTPUT)
    progress.note(OUTPUT)
    layers = _Layers(builder, config.layers, progress)
    final_norm = builder.norm(FINAL_NORM)
    if share.num_ranks == 1:
        return ModelWeights(
            embedding=embedding.weight,
            embedding_blocks=rows,
            layers=layers,
            pages=pages,
            final_norm=final_norm,
            output=output.weight,
            output_blocks=output.blocks,
            per_layer=builder.per_layer(),
            copies=builder.copies(),
            head_streams=builder.head_streams(),
        )
    output = share_of_outputs(output, share)
    own = share.of(config.hidden_size)
    return ModelWeights(
        embedding=_moved(
            embedding.weight if rows else embedding.weight[:, own.start : own.stop], device
        ),
        embedding_blocks=_moved(rows, device),
        layers=_RankLayers(layers, config, share, device),
        pages=pages,
        final_norm=_moved(final_norm, device),
        output=_moved(output.weight, device),
        output_blocks=_moved(output.blocks, device),
        per_layer=_moved(builder.per_layer(), device),
        copies=_moved(builder.copies(), device),
        head_streams=_moved(builder.head_streams(), device),
    )


def _is_read_by_rows(embedding: Quantized | None) -> bool:
    """Returns whether the native kernels can read a single row of the embedding in this format."""
    if isinstance(embedding, GgufBlocks):
        return embedding.order is None
    return not isinstance(embedding, Fp8)


class _LoadedByAccess(Sequence[LayerWeights]):
    """The layers of a model. Each access to a layer loads that layer again."""

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...

    @overload
    def __getitem__(self, index: slice) -> list[LayerWeights]: ...

    def __getitem__(self, index: int | slice) -> LayerWeights | list[LayerWeights]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._load(range(len(self))[index])

    def _load(self, index: int) -> LayerWeights:
        raise NotImplementedError


class _Layers(_LoadedByAccess):
    """The whole layers."""

    def __init__(
        self, builder: _Builder, specs: Sequence[LayerSpec], progress: LoadProgress
    ) -> None:
        self._builder = builder
        self._specs = specs
        self._progress = progress

    def _load(self, index: int) -> LayerWeights:
        name = f"model.layers.{index}"
        layer = self._builder.layer(name, self._specs[index])
        self._progress.note(f"{name}.")
        return layer

    def __len__(self) -> int:
        return len(self._specs)


class _RankLayers(_LoadedByAccess):
    """One rank's share of each layer, on the rank's device."""

    def __init__(
        self, layers: _Layers, config: ModelConfig, share: Share, device: torch.device
    ) -> None:
        self._layers = layers
        self._config = config
        self._share = share
        self._device = device

    def _load(self, index: int) -> LayerWeights:
        spec = self._config.layers[index]
        layer = share_of_layer(self._layers[index], self._config, spec, self._share)
        if self._device.type == "cpu":
            return layer  # views of the mapped files, which all ranks share
        moved: LayerWeights = _moved(layer, self._device)
        return joined_products(moved)

    def __len__(self) -> int:
        return len(self._layers)


def _moved(part: Any, device: torch.device) -> Any:
    """Moves the tensors in a dataclass or tuple to a device. Tensors on the device "meta", which
    only have a shape, stay there."""
    if isinstance(part, torch.Tensor):
        return part if part.is_meta else part.to(device)
    if isinstance(part, tuple):
        return tuple(_moved(each, device) for each in part)
    if isinstance(part, Quantized):
        return part.to(device)
    if is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in fields(part)]
        return replace(part, **{name: _moved(getattr(part, name), device) for name in names})
    return part


class _Builder:
    """Creates the weights of single layers from a checkpoint's tensors."""

    def __init__(self, tensors: TensorsByName, config: ModelConfig, names: ExpertNames) -> None:
        self._tensors = tensors
        self._config = config
        self._names = names

    def layer(self, name: str, spec: LayerSpec) -> LayerWeights:
        attention = f"{name}.self_attn"
        tensors = self._tensors
        mlp: Mlp | ExpertWeights | None = None
        if spec.experts:
            mlp = self._experts(name, spec.experts)
        elif spec.has_mlp:
            mlp = self._mlp(f"{name}.mlp")
        norms: dict[str, Any] = {
            field: self.norm(f"{name}.{stored}.weight")
            for field, stored in norm_names(self._config, spec).items()
        }
        if isinstance(spec.linear, KimiDelta):
            return LayerWeights(mlp=mlp, **self._kimi_delta(attention), **norms)
        if spec.linear is not None:
            of_state, out, state = self._state(
                f"{name}.linear_attn", spec.linear, is_beside=spec.has_attention
            )
            if not spec.has_attention:
                return LayerWeights(qkv=of_state, attention_out=out, mlp=mlp, state=state, **norms)
            own = tuple(self._numbers(f"{attention}.{part}_proj") for part in "qkv")
            o_proj = tensors.tensor(f"{attention}.o_proj.weight")
            return LayerWeights(
                qkv=(*self._rotary_first(own, spec), *of_state),
                attention_out=Linear(torch.cat((o_proj, out.weight), 1), None),
                mlp=mlp,
                state=state,
                projected_factors=self._projected_factors(spec.linear, state.conv.device),
                **norms,
            )
        if not spec.has_attention:
            return LayerWeights(qkv=(), attention_out=None, mlp=mlp, **norms)
        if self._config.shared_kv is not None:
            return LayerWeights(
                qkv=tensors.joined(f"{attention}.q_a_proj", f"{attention}.kv_proj"),
                attention_out=tensors.linear(f"{attention}.o_b_proj"),
                mlp=mlp,
                sinks=tensors.floats(f"{attention}.sinks"),
                shared_kv=self._shared_kv(attention, self._config.shared_kv),
                compressor=self._compressor(f"{attention}.compressor", spec.compressor),
                streams=LayerStreamWeights(
                    self._streams(f"{name}.attn_hc."), self._streams(f"{name}.ffn_hc.")
                ),
                **norms,
            )
        if self._config.qk_norm == "rotated_plain" and spec.rope.theta is not None:
            norms["q_norm"] = norms["k_norm"] = self._tensors.ones(self._config.head_dim)
        elif self._config.qk_norm and self._config.qk_norm != "rotated_plain":
            norms["q_norm"] = self._head_norm(f"{attention}.q_norm.weight", spec.rope)
            if spec.kv_source is None:
                norms["k_norm"] = self._head_norm(f"{attention}.k_norm.weight", spec.rope)
        latent = gate = None
        qkv: tuple[Linear, ...]
        if self._config.latent is not None:
            parts = token_products(self._config.latent)
            qkv = tuple(self._of_latent(f"{attention}.{part}", rows) for part, rows in parts)
            if not tensors.is_mapped(f"{attention}.{parts[0][0]}.weight"):
                qkv = joined_parts(qkv)
            latent = self._latent(attention, self._config.latent)
        elif self._config.has_fused_qkv:
            qkv = self._rotary_first((tensors.linear(f"{attention}.qkv_proj"),), spec)
        elif self._config.has_attention_gates:
            qkv, gate = self._gated_qkv(attention, spec.rope)
        else:
            parts_of_layer = "qkk" if spec.values_are_keys else "qkv"
            if spec.kv_source is not None:
                parts_of_layer = "q"
            names = [f"{attention}.{part}_proj" for part in parts_of_layer]
            has_gates = self._config.has_head_gates
            own = tuple(map(self._numbers, names)) if has_gates else tensors.joined(*names)
            qkv = self._rotary_first(own, spec)
        if self._config.has_head_gates:
            gate = self._numbers(f"{attention}.g_proj")
        return LayerWeights(
            qkv=qkv,
            attention_out=tensors.linear(f"{attention}.o_proj"),
            sinks=(
                tensors.tensor(f"{attention}.sinks")
                if self._config.has_sinks and not spec.lacks_sinks
                else None
            ),
            mlp=mlp,
            attention_gate=gate,
            latent=latent,
            indexer=self._indexer(f"{attention}.indexer", spec.indexer) if spec.indexer else None,
            scalar=tensors.tensor(f"{name}.layer_scalar")
            if self._config.has_layer_scalars
            else None,
            layer_inputs=self._layer_inputs(name),
            alt_up=self._alt_up(f"{name}.altup"),
            laurel=self._laurel(f"{name}.laurel"),
            **norms,
        )

    def per_layer(self) -> PerLayerWeights | None:
        """Returns the weights of the embeddings for each layer; None if there are none."""
        if self._config.per_layer_inputs is None:
            return None
        return PerLayerWeights(
            self._tensors.tensor(LAYER_EMBEDDING),
            Linear(self._tensors.tensor(LAYER_PROJECTION), None),
            self.norm(LAYER_NORM),
        )

    def copies(self) -> CopyWeights | None:
        """Returns the matrices of the copies of the residual stream; None if there are none."""
        if self._config.alt_up is None:
            return None
        make, merge = (
            tuple(self._tensors.linear(f"{name}.{at}") for at in range(self._config.alt_up.num - 1))
            for name in (COPY_PROJECTIONS, MERGE_PROJECTIONS)
        )
        return CopyWeights(make, merge)

    def head_streams(self) -> StreamWeights | None:
        """Returns the weights of the last sum of the streams; None if there is one stream."""
        return None if self._config.streams is None else self._streams(HEAD_STREAMS)

    def _streams(self, name: str) -> StreamWeights:
        floats = self._tensors.floats
        return StreamWeights(*(floats(f"{name}{part}") for part in ("fn", "base", "scale")))

    def _shared_kv(self, name: str, sizes: SharedKv) -> SharedKvWeights:
        out = self._tensors.tensor(f"{name}.o_a_proj.weight")
        return SharedKvWeights(
            q_norm=self.norm(f"{name}.q_a_norm.weight"),
            q_out=self._tensors.linear(f"{name}.q_b_proj"),
            kv_norm=self.norm(f"{name}.kv_norm.weight"),
            out_groups=out.view(sizes.num_groups, sizes.out_rank, -1),
        )

    def _compressor(self, name: str, sizes: Compressor | None) -> CompressorWeights | None:
        if sizes is None:
            return None
        tensors = self._tensors
        names = [name] if sizes.indexer is None else [name, f"{name}.indexer"]
        queries = head_weights = None
        if (indexer := sizes.indexer) is not None:
            queries = tensors.tensor(f"{name}.indexer.q_b_proj.weight")
            factor = (indexer.num_heads * indexer.dim) ** -0.5
            head_weights = tensors.floats(f"{name}.indexer.scorer.weights_proj.weight") * factor
        return CompressorWeights(
            inputs=tensors.joined(
                *(f"{each}.{part}_proj" for each in names for part in ("kv", "gate"))
            ),
            parts=tuple(
                EntryWeights(
                    tensors.floats(f"{each}.position_bias"), self.norm(f"{each}.kv_norm.weight")
                )
                for each in names
            ),
            queries=queries,
            head_weights=head_weights,
        )

    def _alt_up(self, name: str) -> AltUpWeights | None:
        if self._config.alt_up is None:
            return None
        return AltUpWeights(
            router_norm=self.norm(f"{name}.router_norm.weight"),
            router=self._tensors.linear(f"{name}.modality_router"),
            prediction=self._tensors.linear(f"{name}.prediction_coefs"),
            correction=self._tensors.linear(f"{name}.correction_coefs"),
            output_scale=self._tensors.tensor(f"{name}.correct_output_scale"),
        )

    def _laurel(self, name: str) -> LaurelWeights | None:
        if self._config.alt_up is None:
            return None
        return LaurelWeights(
            left=self._tensors.linear(f"{name}.linear_left"),
            right=self._tensors.linear(f"{name}.linear_right"),
            norm=self.norm(f"{name}.post_laurel_norm.weight"),
        )

    def _layer_inputs(self, name: str) -> LayerInputWeights | None:
        if self._config.per_layer_inputs is None:
            return None
        return LayerInputWeights(
            self._tensors.linear(f"{name}.per_layer_input_gate"),
            self._tensors.linear(f"{name}.per_layer_projection"),
            self.norm(f"{name}.post_per_layer_input_norm.weight"),
        )

    def norm(self, name: str) -> torch.Tensor:
        """Returns the weights of a norm. If the model adds an offset to them, the result includes
        the offset and is in float32. In bfloat16, 1 + 0.001 would be rounded to 1. The norms of
        DeepSeek V4 are in float32, too."""
        if not self._config.norm_offset and self._config.shared_kv is None:
            return self._tensors.tensor(name)
        return self._tensors.floats(name) + self._config.norm_offset

    def _gated_qkv(self, name: str, rope: Rope) -> tuple[tuple[Linear, ...], Linear]:
        """Returns the matrices q, k and v, and the matrix of the gates on attention's output.
        q_proj has the rows of the query and then of the gate of each head."""
        q, k, v = self._blocks_or_numbers([f"{name}.{part}_proj.weight" for part in "qkv"])
        of_queries, of_gates = query_and_gate_rows(self._config, rope)
        if (order := head_rows(self._config, rope)) is not None:
            k = _with_rows(k, rows_of_heads(self._config.num_kv_heads, len(order), order))
        return (_with_rows(q, of_queries), k, v), _with_rows(q, of_gates)

    def _state(
        self, name: str, sizes: LinearAttention, *, is_beside: bool
    ) -> tuple[tuple[Linear, ...], Linear, StateWeights]:
        """Returns the first matrices, the last matrix and the other weights of a layer that keeps a
        state. If `is_beside` is True, the layer has attention, too, whose matrices are parts of the
        same products."""
        tensors = self._tensors
        linear = self._numbers if is_beside else tensors.linear
        conv = [f"{name}.conv1d.weight"]
        first: tuple[Linear, ...]
        if isinstance(sizes, GatedDelta) and sizes.form == "apart":
            first = tuple(self._numbers(f"{name}.{part}_proj") for part in "qkvgba")
            conv = [f"{name}.{part}_conv1d.weight" for part in "qkv"]
        elif isinstance(sizes, GatedDelta):
            first = self._delta_products(name, sizes)
        else:
            first = (linear(f"{name}.in_proj"),)

        def floats(part: str) -> torch.Tensor | None:
            return tensors.floats(f"{name}.{part}") if f"{name}.{part}" in tensors else None

        norm, bias = f"{name}.norm.weight", f"{name}.conv1d.bias"
        factors = self._config.layer_factors
        state = StateWeights(
            conv=torch.cat([tensors.tensor(part) for part in conv]).squeeze(1),
            conv_bias=tensors.tensor(bias) if bias in tensors else None,
            a_log=floats("A_log"),
            dt_bias=floats("dt_bias"),
            skip=floats("D"),
            norm=tensors.tensor(norm) if norm in tensors else None,
            output_factor=1.0 if factors is None else factors.output,
        )
        return first, linear(f"{name}.out_proj"), state

    def _kimi_delta(self, name: str) -> dict[str, Any]:
        """Returns the fields of `LayerWeights` of a layer with Kimi Delta Attention."""
        tensors = self._tensors
        conv = [tensors.tensor(f"{name}.{part}_conv1d.weight") for part in "qkv"]
        return {
            "qkv": tuple(self._numbers(f"{name}.{part}_proj") for part in (*"qkvb", "f_a", "g_a")),
            "attention_out": tensors.linear(f"{name}.o_proj"),
            "state": StateWeights(
                conv=torch.cat(conv).squeeze(1),
                a_log=tensors.floats(f"{name}.A_log").flatten(),
                dt_bias=tensors.floats(f"{name}.dt_bias"),
                norm=tensors.tensor(f"{name}.o_norm.weight"),
                decay_out=self._numbers(f"{name}.f_b_proj"),
                gate_out=self._numbers(f"{name}.g_b_proj"),
            ),
        }

    def _numbers(self, name: str) -> Linear:
        """Returns a matrix that does not stay quantized. The kernels need matrices of one format
        for a product of several, and a checkpoint may have quantized only some of them."""
        weight = Linear(self._tensors.tensor(f"{name}.weight"), None)
        return self._tensors.with_bias(weight, f"{name}.bias")

    def _projected_factors(
        self, sizes: LinearAttention, device: torch.device
    ) -> torch.Tensor | None:
        """Returns the factors on the product of q, k, v and the first matrix of Mamba 2."""
        factors, config = self._config.layer_factors, self._config
        if factors is None or not isinstance(sizes, Mamba2):
            return None
        num_queries, num_keys = (
            num * config.head_dim for num in (config.num_attention_heads, config.num_kv_heads)
        )
        nums = (
            num_queries,
            num_keys,
            num_keys,
            sizes.num_outputs,
            *sizes.sections,
            sizes.num_heads,
        )
        values = (factors.query, factors.key, factors.value, *factors.projected)
        return torch.cat(
            [
                torch.full((num,), value, device=device)
                for num, value in zip(nums, values, strict=True)
            ]
        )

    def _delta_products(self, name: str, sizes: GatedDelta) -> tuple[Linear, ...]:
        """Returns the matrices of q, k and v, of z, of b and of a. If the first one stays
        quantized, the others do if their formats allow it. Otherwise none does."""
        tensors = self._tensors
        if f"{name}.in_proj_qkvz.weight" in tensors:
            qkvz = Linear(tensors.tensor(f"{name}.in_proj_qkvz.weight"), None)
            of_both, _ = joined_delta_rows(sizes)
            rows = torch.split(of_both, [sizes.num_channels, sizes.num_outputs])
            products = [_with_rows(qkvz, each) for each in rows]
        else:
            products = self._blocks_or_numbers(
                [f"{name}.in_proj_{part}.weight" for part in ("qkv", "z")]
            )
        is_joined = sizes.form == "joined"
        parts = ("ba",) if is_joined else ("b", "a")
        names = [f"{name}.in_proj_{part}.weight" for part in parts]
        if products[0].blocks is None:
            rates = [Linear(tensors.tensor(each), None) for each in names]
        else:
            rates = self._blocks_or_numbers(names)
        if is_joined:
            _, of_rates = joined_delta_rows(sizes)
            rates = [_with_rows(rates[0], each) for each in of_rates.chunk(2)]
        return (*products, *rates)

    def _blocks_or_numbers(self, names: Sequence[str]) -> list[Linear]:
        """Returns matrices that stay quantized in blocks if the kernels can read the formats of all
        of them. Matrices of fp8 numbers do not stay quantized."""
        found = self._tensors.quantized(names)
        if found and not any(isinstance(each.blocks, Fp8) for each in found):
            return found
        return [Linear(self._tensors.tensor(name), None) for name in names]

    def _of_latent(self, name: str, rotated: RotatedRows) -> Linear:
        weight = Linear(self._tensors.tensor(f"{name}.weight"), None)
        linear = self._tensors.with_bias(weight, f"{name}.bias")
        bias = None if linear.bias is None else rotated.in_halves(linear.bias)
        return Linear(rotated.in_halves(linear.weight), bias)

    def _latent(self, name: str, latent: Latent) -> LatentWeights:
        tensors = self._tensors
        q_norm = q_out = None
        if latent.q_rank is not None:
            q_norm = tensors.tensor(f"{name}.q_a_layernorm.weight")
            q_out = query_rows(latent).in_halves(tensors.tensor(f"{name}.q_b_proj.weight"))
        keys, values = _keys_and_values(name, latent, tensors)
        return LatentWeights(
            q_norm=q_norm,
            q_out=q_out,
            kv_norm=tensors.tensor(f"{name}.kv_a_layernorm.weight"),
            keys=keys,
            values=values,
        )

    def _indexer(self, name: str, indexer: Indexer) -> IndexerWeights:
        tensors = self._tensors
        if indexer.block_size is not None:
            return IndexerWeights(
                queries=tensors.tensor(f"{name}.q_proj.weight"),
                keys=tensors.tensor(f"{name}.k_proj.weight"),
                key_norm=self.norm(f"{name}.k_norm.weight"),
                query_norm=self.norm(f"{name}.q_norm.weight"),
            )
        order = indexer_rows(indexer)
        keys = tensors.tensor(f"{name}.wk.weight")
        order = order.to(keys.device)
        queries = tensors.tensor(f"{name}.wq_b.weight")
        queries = queries.view(indexer.num_heads, indexer.dim, -1)[:, order].flatten(0, 1)
        head_weights = tensors.floats(f"{name}.weights_proj.weight")
        return IndexerWeights(
            queries=queries,
            keys=keys[order],
            key_norm=tensors.tensor(f"{name}.k_norm.weight")[order],
            key_norm_bias=tensors.tensor(f"{name}.k_norm.bias")[order],
            head_weights=head_weights * (indexer.num_heads * indexer.dim) ** -0.5,
        )

    def _mlp(self, name: str) -> Mlp:
        is_fused = self._config.may_fuse_mlp and f"{name}.gate_up_proj.weight" in self._tensors
        if self._config.has_fused_mlp or is_fused:
            gate_up: tuple[Linear, ...] = (self._tensors.linear(f"{name}.gate_up_proj"),)
        elif not self._config.has_gates:
            gate_up = (self._tensors.linear(f"{name}.up_proj"),)
        else:
            gate_up = self._tensors.joined(f"{name}.gate_proj", f"{name}.up_proj")
        return Mlp(gate_up, self._tensors.linear(f"{name}.down_proj"))

    def _experts(self, layer: str, experts: Experts) -> ExpertWeights:
        shared = None
        if experts.shared_inner:
            shared = self._mlp(f"{layer}.{shared_mlp(experts)}")
        return load_experts(self._tensors, self._names, layer, experts, shared)

    def _rotary_first(self, parts: tuple[Linear, ...], spec: LayerSpec) -> tuple[Linear, ...]:
        """Returns the matrices with the rows of q, k and v in the order that the kernels expect.
        `parts` are these three matrices, or one matrix with the rows of all three."""
        orders = rotary_rows(self._config, spec)
        if not orders:
            return parts
        if len(parts) == 1:
            return (_with_rows(parts[0], orders["self_attn.qkv_proj"]),)
        q, k, v = parts
        return (
            _with_rows(q, orders["self_attn.q_proj"]),
            _with_rows(k, orders["self_attn.k_proj"]),
            v,
        )

    def _head_norm(self, name: str, rope: Rope) -> torch.Tensor:
        """Returns the weights of a norm of q or k, in the order of the elements of the heads."""
        weight = self.norm(name)
        if (of_head := head_rows(self._config, rope)) is None:
            return weight
        return weight.view(-1, self._config.head_dim)[:, of_head.to(weight.device)].flatten()


def _with_rows(matrix: Linear, rows: torch.Tensor) -> Linear:
    """Returns a matrix with the outputs `rows` of a matrix, in that order."""
    bias = None if matrix.bias is None else matrix.bias[rows.to(matrix.bias.device)]
    if matrix.blocks is not None:
        weight = matrix.weight.new_empty(len(rows), matrix.weight.shape[1])
        return Linear(weight, bias, matrix.blocks.in_order(rows))
    return Linear(matrix.weight[rows.to(matrix.weight.device)], bias)


def _keys_and_values(
    name: str, latent: Latent, tensors: TensorsByName
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the fields `keys` and `values` of `LatentWeights`. A checkpoint stores keys and
    values as two matrices, or as one matrix with the rows of both."""
    if f"{name}.k_b_proj.weight" in tensors:
        keys, values = (tensors.tensor(f"{name}.{part}_b_proj.weight") for part in "kv")
        return keys, values
    rows = tensors.tensor(f"{name}.kv_b_proj.weight")
    rows = rows.view(-1, latent.plain_dim + latent.value_dim, latent.kv_rank)
    of_keys, of_values = torch.split(rows, [latent.plain_dim, latent.value_dim], 1)
    return of_keys.transpose(1, 2).contiguous(), of_values.contiguous()


class LoadProgress:
    """Reports the progress of loading weights, in bytes of the model's files.

    The number of bytes is an estimate: when 30% of all elements are loaded, 30% of the files' bytes
    are reported. A layer that is loaded again, for a second decoder, is counted only once.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        num_bytes: int,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        """`shapes` has the shapes of all tensors by name. `num_bytes` is the total size of the
        files."""
        self._shapes = shapes
        self._num_bytes = num_bytes
        self._num_elements = max(1, sum(map(prod, shapes.values())))
        self._loaded: dict[str, int] = {}
        self._on_progress = on_progress
        on_progress(0, num_bytes)

    def note(self, start: str) -> None:
        """Records that all tensors whose names begin with `start` are loaded."""
        if start in self._loaded:
            return
        named = (shape for name, shape in self._shapes.items() if name.startswith(start))
        self._loaded[start] = sum(map(prod, named))
        share = min(1.0, sum(self._loaded.values()) / self._num_elements)
        self._on_progress(round(share * self._num_bytes), self._num_bytes)
