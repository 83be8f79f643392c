"""Divides a model's weights among the ranks of a tensor-parallel engine (torch and Triton kernels).

matrix                     what a rank has of it
q, k, v                    the outputs of its own heads. If there are fewer KV heads than ranks,
                           several ranks have the same KV head.
gate, up                   its share of the outputs, of each expert and of the shared MLP, too
experts, with              its share of the experts, each of them whole
`splits_experts`
attention output, down     its share of the outputs; with `splits_inputs` its share of the inputs
output (vocabulary)        its share of the outputs
embedding                  its share of each token's elements; all of it if it is quantized
states                     the matrices, channels and factors of its own heads. The norm of Mamba
                           2 is whole if ranks share one of its groups.
gates of attention         those of its own heads
latent attention           the matrices of its own heads, and all of the matrices that compute
                           the latents
indexers                   all of those that choose tokens. Of those that choose blocks for each
                           KV head, the queries of the rank's own KV heads
compressed attention       the queries and output groups of its own heads, and all of the matrices
                           that compute latents, keys and entries
copies of the residual     all
stream, embeddings for
each layer
norms, routers of experts  all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from tandem.engine.cache.layout.rank_heads import RankHeads
from tandem.engine.executor.weights.decoder_weights import (
    ExpertWeights,
    IndexerWeights,
    LatentWeights,
    LayerWeights,
    Linear,
    Mlp,
    SharedKvWeights,
    StateWeights,
    joined,
)
from tandem.engine.executor.weights.lora import LoraLayer, LoraWeights, Parts
from tandem.models.config.indexer import Indexer
from tandem.models.config.layers import LayerSpec
from tandem.models.config.linear_attention import GatedDelta, KimiDelta, LinearAttention, Mamba2
from tandem.models.config.model import ModelConfig
from tandem_kernels.lora import LoraHeads, LoraPart


class Share(NamedTuple):
    """The place of one rank among the ranks of an engine."""

    rank: int
    num_ranks: int
    # False: a rank computes its share of the outputs of each matrix from all inputs, so an output
    # is the same sum for any number of ranks. True: the attention output and down matrices are
    # divided by inputs instead, and the ranks' products have to be added.
    splits_inputs: bool = False
    splits_experts: bool = False  # True: a rank has some of the experts, False: a part of each

    def of(self, num: int) -> range:
        """Returns this rank's part of the numbers from 0 to before `num`."""
        return self.parts(num)[self.rank]

    def parts(self, num: int) -> list[range]:
        """Returns the part of each rank."""
        ends = [num * rank // self.num_ranks for rank in range(self.num_ranks + 1)]
        return [range(first, end) for first, end in pairwise(ends)]

    def kv_heads(self, num: int) -> range:
        """Returns this rank's heads of a model with `num` KV heads. If there are fewer heads than
        ranks, it is one head, which other ranks have, too."""
        return RankHeads(num, self.num_ranks).of(self.rank)

    def config(self, model: ModelConfig) -> ModelConfig:
        """Returns the config of a model with only this rank's heads."""

        def with_own_heads(layer: LayerSpec) -> LayerSpec:
            if layer.heads is None:
                return layer
            num_kv = len(self.kv_heads(layer.heads.num_kv))
            return replace(layer, heads=replace(layer.heads, num_kv=num_kv))

        return replace(
            model,
            num_attention_heads=len(self.of(model.num_attention_heads)),
            num_kv_heads=len(self.kv_heads(model.num_kv_heads)),
            layers=tuple(map(with_own_heads, model.layers)),
        )


WHOLE = Share(0, 1)


def share_of_layer(
    layer: LayerWeights, config: ModelConfig, spec: LayerSpec, share: Share
) -> LayerWeights:
    """Returns the part of a layer's weights that a rank needs. `config` is the whole model's. The
    tensors are views of the layer's tensors where its rows or columns are contiguous."""
    heads = share.of(config.num_attention_heads)
    mlp = layer.mlp
    if layer.attention_out is not None:
        outputs, inputs = _qkv_outputs(config, spec, share), _out_inputs(config, spec, share)
        factors = layer.projected_factors
        layer = replace(
            layer,
            qkv=_rows(layer.qkv, outputs),
            attention_out=_out(layer.attention_out, inputs, share),
            projected_factors=None if factors is None else _parts_of(factors, outputs),
        )
    if layer.state is not None:
        assert spec.linear is not None
        layer = replace(layer, state=_state(layer.state, spec.linear, share))
    if (gate := layer.attention_gate) is not None:
        own = _times(heads, len(gate.weight) // config.num_attention_heads)
        layer = replace(layer, attention_gate=_rows((gate,), [own])[0])
    if mlp is not None:
        own_mlp = _experts(mlp, share) if isinstance(mlp, ExpertWeights) else _mlp(mlp, share)
        layer = replace(layer, mlp=own_mlp)
    if layer.indexer is not None and spec.indexer is not None:
        layer = replace(layer, indexer=_indexer(layer.indexer, spec.indexer, share))
    if layer.shared_kv is not None:
        layer = replace(layer, shared_kv=_shared_kv(layer.shared_kv, config, share))
    return replace(
        layer,
        sinks=None if layer.sinks is None else layer.sinks[heads.start : heads.stop],
        latent=None if layer.latent is None else _latent(layer.latent, config, share),
    )


def share_of_lora(weights: LoraWeights, config: ModelConfig, share: Share) -> LoraWeights:
    """Returns the part of an adapter that a rank needs. Of a matrix of which the rank has some
    outputs, it has the same rows of B and all of A."""
    own = share.of(config.num_attention_heads)
    heads = slice(own.start, own.stop)
    gate_dim = config.head_dim if config.has_attention_gates else 1

    def of_heads(found: LoraHeads | None) -> LoraHeads | None:
        return None if found is None else LoraHeads(found.a[heads], found.b[heads])

    def out(parts: Parts, inputs: Sequence[range]) -> Parts:
        if not share.splits_inputs:
            return _lora_rows(parts, [share.of(config.hidden_size)])
        return tuple(replace(part, a=_columns(part.a, inputs).contiguous()) for part in parts)

    def layer(whole: LoraLayer, spec: LayerSpec) -> LoraLayer:
        num_inner = spec.inner or config.intermediate_size
        if spec.experts is not None:
            num_inner = spec.experts.shared_inner
        inner = share.of(num_inner)
        gate_up = [inner, _after(num_inner, inner)]
        of_state = range(0)  # the outputs of this rank's part of the state
        if spec.linear is not None:
            per_head = spec.linear.num_outputs // spec.linear.num_heads
            of_state = _times(share.of(spec.linear.num_heads), per_head)
        return LoraLayer(
            qkv=_lora_rows(whole.qkv, _qkv_outputs(config, spec, share)),
            q_out=_lora_rows(whole.q_out, [_queries(config, spec, share)]),
            attention_gate=_lora_rows(whole.attention_gate, [_times(own, gate_dim)]),
            decay_out=_lora_rows(whole.decay_out, [of_state]),
            gate_out=_lora_rows(whole.gate_out, [of_state]),
            attention_out=out(whole.attention_out, _out_inputs(config, spec, share)),
            gate_up=_lora_rows(whole.gate_up, gate_up if config.has_gates else [inner]),
            down=out(whole.down, [inner]),
            latent_keys=of_heads(whole.latent_keys),
            latent_values=of_heads(whole.latent_values),
        )

    return replace(weights, layers=tuple(map(layer, weights.layers, config.layers)))


def share_of_outputs(matrix: Linear, share: Share) -> Linear:
    """Returns a rank's share of the outputs of a matrix, as a view."""
    return _rows((matrix,), [share.of(len(matrix.weight))])[0]


def joined_products(layer: LayerWeights) -> LayerWeights:
    """Copies the matrices q, k and v to one matrix, and gate and up to another, so that one kernel
    multiplies them. Quantized matrices whose formats differ stay separate."""

    def mlp(weights: Mlp) -> Mlp:
        return replace(weights, gate_up=joined_parts(weights.gate_up))

    mlps = layer.mlp
    if layer.qkv:
        layer = replace(layer, qkv=joined_parts(layer.qkv))
    if isinstance(mlps, ExpertWeights):
        shared = None if mlps.shared is None else mlp(mlps.shared)
        return replace(layer, mlp=replace(mlps, shared=shared))
    return layer if mlps is None else replace(layer, mlp=mlp(mlps))


def joined_parts(parts: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """Copies matrices with the same input to one matrix. Quantized matrices whose formats differ
    stay separate."""
    quantized = [part.blocks for part in parts if part.blocks is not None]
    blocks = joined(quantized) if len(quantized) == len(parts) else None
    if len(parts) == 1 or (quantized and blocks is None):
        return parts
    weight = torch.cat([part.weight for part in parts])
    bias = None
    if (one := next((part.bias for part in parts if part.bias is not None), None)) is not None:
        biases = (one.new_zeros(len(p.weight)) if p.bias is None else p.bias for p in parts)
        bias = torch.cat(list(biases))
    return (Linear(weight, bias, blocks),)


def _mlp(mlp: Mlp, share: Share) -> Mlp:
    num_inner = mlp.down.weight.shape[1]
    own = share.of(num_inner)
    has_gates = sum(len(part.weight) for part in mlp.gate_up) > num_inner
    outputs = [own, _after(num_inner, own)] if has_gates else [own]
    return Mlp(_rows(mlp.gate_up, outputs), _out(mlp.down, [own], share))


def _experts(weights: ExpertWeights, share: Share) -> ExpertWeights:
    own = share.of(len(weights.mlps))
    return replace(
        weights,
        mlps=(
            weights.mlps[own.start : own.stop]
            if share.splits_experts
            else tuple(_mlp(mlp, share) for mlp in weights.mlps)
        ),
        shared=None if weights.shared is None else _mlp(weights.shared, share),
    )


def _latent(weights: LatentWeights, config: ModelConfig, share: Share) -> LatentWeights:
    assert config.latent is not None
    own = share.of(config.num_attention_heads)
    heads = slice(own.start, own.stop)
    queries = _times(own, config.latent.q_dim)
    return replace(
        weights,
        q_out=None if weights.q_out is None else weights.q_out[queries.start : queries.stop],
        keys=weights.keys[heads],
        values=weights.values[heads],
    )


def _shared_kv(weights: SharedKvWeights, config: ModelConfig, share: Share) -> SharedKvWeights:
    groups = share.of(len(weights.out_groups))
    queries = _times(share.of(config.num_attention_heads), config.head_dim)
    return replace(
        weights,
        q_out=_rows((weights.q_out,), [queries])[0],
        out_groups=weights.out_groups[groups.start : groups.stop],
    )


def _indexer(weights: IndexerWeights, sizes: Indexer, share: Share) -> IndexerWeights:
    if sizes.block_size is None:
        return weights  # All heads of attention have one choice, which each rank computes.
    own = _times(share.kv_heads(sizes.num_heads), sizes.dim)
    return replace(weights, queries=weights.queries[own.start : own.stop])


def _queries(config: ModelConfig, spec: LayerSpec, share: Share) -> range:
    """Returns the outputs of a rank's heads in the matrix that computes queries."""
    size = config.heads_of(spec).dim if config.latent is None else config.latent.q_dim
    return _times(share.of(config.num_attention_heads), size)


def _state(weights: StateWeights, sizes: LinearAttention, share: Share) -> StateWeights:
    heads = share.of(sizes.num_heads)
    channels = _consecutive(sizes.sections, sizes.channels_of(heads))

    def of_heads(numbers: torch.Tensor | None) -> torch.Tensor | None:
        return None if numbers is None else numbers[heads.start : heads.stop]

    outputs = _times(heads, sizes.num_outputs // sizes.num_heads)

    def of_outputs(matrix: Linear | None) -> Linear | None:
        return None if matrix is None else _rows((matrix,), [outputs])[0]

    norm, dt_bias = weights.norm, weights.dt_bias
    if norm is not None and isinstance(sizes, Mamba2) and sizes.num_groups % share.num_ranks == 0:
        norm = norm[outputs.start : outputs.stop]
    if dt_bias is not None:
        of_bias = outputs if isinstance(sizes, KimiDelta) else heads
        dt_bias = dt_bias[of_bias.start : of_bias.stop]
    return replace(
        weights,
        conv=_parts_of(weights.conv, channels),
        conv_bias=None if weights.conv_bias is None else _parts_of(weights.conv_bias, channels),
        a_log=of_heads(weights.a_log),
        dt_bias=dt_bias,
        skip=of_heads(weights.skip),
        norm=norm,
        decay_out=of_outputs(weights.decay_out),
        gate_out=of_outputs(weights.gate_out),
    )


def _state_outputs(sizes: LinearAttention, share: Share) -> list[range]:
    """Returns the outputs that a rank has of the first matrices of a layer with a state
    (`LayerWeights.qkv`)."""
    heads = share.of(sizes.num_heads)
    outputs = _times(heads, sizes.num_outputs // sizes.num_heads)
    channels = sizes.channels_of(heads)
    nums: list[int]
    if isinstance(sizes, GatedDelta):
        nums = [*sizes.sections, sizes.num_outputs, sizes.num_heads, sizes.num_heads]
        return _consecutive(nums, [*channels, outputs, heads, heads])
    if isinstance(sizes, KimiDelta):
        nums = [*sizes.sections, sizes.num_heads, sizes.dim, sizes.dim]
        return _consecutive(nums, [*channels, heads, range(sizes.dim), range(sizes.dim)])
    if isinstance(sizes, Mamba2):
        nums = [sizes.num_outputs, *sizes.sections, sizes.num_heads]
        return _consecutive(nums, [outputs, *channels, heads])
    return _consecutive([sizes.num_outputs] * 3, [outputs] * 3)


def _consecutive(nums: Sequence[int], ranges: Sequence[range]) -> list[range]:
    """Returns the ranges in sections of `nums` numbers each, counted from the first section on."""
    firsts = accumulate(nums, initial=0)
    return [_after(first, own) for first, own in zip(firsts, ranges, strict=False)]


def _parts_of(rows: torch.Tensor, ranges: Sequence[range]) -> torch.Tensor:
    return torch.cat([rows[own.start : own.stop] for own in ranges])


def _qkv_outputs(config: ModelConfig, spec: LayerSpec, share: Share) -> list[range]:
    """Returns the outputs that a rank has of the matrices that are multiplied by a layer's input.
    The outputs of all matrices are counted from the first to the last."""
    of_state = [] if spec.linear is None else _state_outputs(spec.linear, share)
    if not spec.has_attention:
        return of_state
    queries = _queries(config, spec, share)
    latent = config.latent
    if (shared := config.shared_kv) is not None:
        return [range(shared.q_rank), _after(shared.q_rank, range(config.head_dim))]
    if latent is None:
        heads = config.heads_of(spec)
        value_dim = config.value_dim or heads.dim
        nums = [config.num_attention_heads * heads.dim]
        own = [queries]
        if spec.kv_source is None:
            kv_heads = share.kv_heads(heads.num_kv)
            nums += [heads.num_kv * heads.dim, heads.num_kv * value_dim]
            own += [_times(kv_heads, heads.dim), _times(kv_heads, value_dim)]
        return _consecutive(nums, own) + [_after(sum(nums), part) for part in of_state]
    if latent.q_rank is not None:  # the first matrix computes the latents of queries
        return [range(latent.q_rank), _after(latent.q_rank, range(latent.kv_dim))]
    num_queries = config.num_attention_heads * latent.q_dim
    return [queries, _after(num_queries, range(latent.kv_dim))]


def _out_inputs(config: ModelConfig, spec: LayerSpec, share: Share) -> list[range]:
    """Returns the inputs of the attention output's matrix that a rank's heads compute: those of
    attention, and then those of the state."""
    size = config.value_dim or config.heads_of(spec).dim
    if config.latent is not None:
        size = config.latent.value_dim
    own = _times(share.of(config.num_attention_heads), size)
    if (shared := config.shared_kv) is not None:
        own = _times(share.of(shared.num_groups), shared.out_rank)
    parts = [own] if spec.has_attention else []
    if spec.linear is not None:
        heads = share.of(spec.linear.num_heads)
        of_state = _times(heads, spec.linear.num_outputs // spec.linear.num_heads)
        first = config.num_attention_heads * size if parts else 0
        parts.append(_after(first, of_state))
    return parts


def _out(matrix: Linear, inputs: Sequence[range], share: Share) -> Linear:
    """Returns a rank's share of a matrix whose inputs the ranks have computed. This rank has
    computed `inputs`."""
    if not share.splits_inputs:
        return share_of_outputs(matrix, share)
    assert matrix.blocks is None
    bias = matrix.bias if share.rank == 0 else None  # added only once to the sum
    return Linear(_columns(matrix.weight, inputs), bias)


def _columns(matrix: torch.Tensor, ranges: Sequence[range]) -> torch.Tensor:
    parts = [matrix[:, own.start : own.stop] for own in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _rows(parts: Sequence[Linear], ranges: Sequence[range]) -> tuple[Linear, ...]:
    """Returns a matrix for each range of rows. `parts` are one or several matrices, whose rows are
    counted from the first to the last matrix. A range lies in one of them."""
    found = []
    for rows in ranges:
        first = 0
        for part in parts:
            if rows.stop <= first + len(part.weight):
                found.append(_between(part, rows.start - first, rows.stop - first))
                break
            first += len(part.weight)
    assert len(found) == len(ranges)
    return tuple(found)


def _between(matrix: Linear, first: int, end: int) -> Linear:
    return Linear(
        matrix.weight[first:end],
        None if matrix.bias is None else matrix.bias[first:end],
        None if matrix.blocks is None else matrix.blocks.between(first, end),
    )


def _lora_rows(parts: Parts, ranges: Sequence[range]) -> Parts:
    """Returns the parts that compute only the outputs `ranges`, which become consecutive."""
    found = []
    first = 0  # of the range among the rank's outputs
    for rows in ranges:
        for part in parts:
            begin, end = max(rows.start, part.first), min(rows.stop, part.first + len(part.b))
            if begin < end:
                own = part.b[begin - part.first : end - part.first]
                found.append(LoraPart(first + begin - rows.start, part.a, own))
        first += len(rows)
    return tuple(found)


def _times(numbers: range, size: int) -> range:
    return range(numbers.start * size, numbers.stop * size)


def _after(first: int, numbers: range) -> range:
    return range(first + numbers.start, first + numbers.stop)
