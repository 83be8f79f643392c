"""Loads a layer's experts. Checkpoints store experts in several forms, which the class
`ExpertNames` describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tandem.engine.executor.weights.decoder_weights import ExpertWeights, Linear, Mlp
from tandem.engine.executor.weights.tensors_by_name import TensorsByName
from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.expert_names import ExpertNames, bias_of
from tandem.models.checkpoint.weight_shapes import EXPERT_NORMS, EXPERT_SCALES, ROUTER_SCALE
from tandem.models.config.experts import Experts
from tandem.models.config.families import LIKE_DEEPSEEK
from tandem.models.gguf.tensors import GgufBlocks

# For each expert, a tuple of matrices: gate and up, one matrix that has both, or down.
Parts = list[tuple[Linear, ...]]


def load_experts(
    tensors: TensorsByName, names: ExpertNames, layer: str, experts: Experts, shared: Mlp | None
) -> ExpertWeights:
    """Loads the experts of a layer. `layer` is the prefix of the names of the layer's tensors.
    `shared` is the MLP that all tokens use, or None."""
    gate_ups, downs = _products(tensors, names, layer, experts.num)
    correction = f"{layer}.{names.correction}"
    return ExpertWeights(
        router=_router(tensors, names, layer),
        shared=shared,
        shared_gate=(
            Linear(tensors.tensor(f"{layer}.mlp.shared_expert_gate.weight"), None)
            if experts.has_shared_gate
            else None
        ),
        table=_table(tensors, f"{layer}.{names.table}", experts) if experts.has_table else None,
        correction=tensors.floats(correction).flatten() if experts.is_corrected else None,
        mlps=tuple(Mlp(gate_up, down[0]) for gate_up, down in zip(gate_ups, downs, strict=True)),
        **(_own_norms(tensors, layer) if experts.has_own_norms else {}),
    )


def _table(tensors: TensorsByName, name: str, experts: Experts) -> torch.Tensor:
    """Returns the experts of each token id, [vocab, top_k]. Raises UnsupportedModel if one of them
    does not exist."""
    table = tensors.integers(name)
    lowest, highest = table.aminmax()
    if lowest < 0 or highest >= experts.num:
        raise UnsupportedModel(
            f"{name} has numbers from {int(lowest)} to {int(highest)}; experts have the numbers "
            f"from 0 to {experts.num - 1}"
        )
    return table


def _own_norms(tensors: TensorsByName, layer: str) -> dict[str, torch.Tensor]:
    """Returns the fields of ExpertWeights that experts with norms of their own need."""
    scale = tensors.floats(f"{layer}.{ROUTER_SCALE}")
    norms = {
        field: tensors.tensor(f"{layer}.{name}.weight") for field, name in EXPERT_NORMS.items()
    }
    return norms | {
        "router_norm": scale * len(scale) ** -0.5,
        "scales": tensors.floats(f"{layer}.{EXPERT_SCALES}"),
    }


def _router(tensors: TensorsByName, names: ExpertNames, layer: str) -> Linear:
    """Returns the router's matrix [experts, hidden]. It is float32 if transformers computes the
    router of this model family in float32."""
    name = f"{layer}.{names.router}"
    if names.form in LIKE_DEEPSEEK:
        return Linear(tensors.floats(f"{name}.weight"), None)
    return tensors.with_bias(Linear(tensors.tensor(f"{name}.weight"), None), f"{name}.bias")


def _products(
    tensors: TensorsByName, names: ExpertNames, layer: str, num: int
) -> tuple[Parts, Parts]:
    """Returns the gate and up matrices of each expert, and the down matrix of each expert."""
    stacked = [f"{layer}.{name}" for name in names.stacked]
    if names.is_gguf:
        matrices = [*tensors.matrices(stacked[:2]), tensors.matrix(stacked[2])]
        biased = map(tensors.with_bias, matrices, map(bias_of, stacked))
        gates, ups, downs = map(_one_by_one, biased)
        return [gate + up for gate, up in zip(gates, ups, strict=True)], downs
    if names.form == "gpt_oss":
        gate_up = _gates_first(_of_gpt_oss(tensors, stacked[0], names.is_mxfp4))
        down = _of_gpt_oss(tensors, stacked[1], names.is_mxfp4)
        return _one_by_one(gate_up), _one_by_one(down)
    if names.form == "llama4":
        transposed = (tensors.tensor(name).transpose(1, 2).contiguous() for name in stacked)
        gate_ups, downs = (_one_by_one(Linear(weight, None)) for weight in transposed)
        return gate_ups, downs
    if names.is_stacked:
        gate_ups, downs = (_one_by_one(tensors.matrix(name)) for name in stacked)
        return gate_ups, downs
    parts = [[f"{layer}.{part}" for part in names.parts(i)] for i in range(num)]
    return (
        _apart(tensors, [tuple(first) for *first, _ in parts]),
        _apart(tensors, [(down,) for *_, down in parts]),
    )


def _of_gpt_oss(tensors: TensorsByName, name: str, is_mxfp4: bool) -> Linear:
    """Returns the weights [experts, out, in] and biases [experts, out] of a product from a gpt-oss
    checkpoint."""
    bias = tensors.tensor(f"{name}_bias")
    if is_mxfp4:
        return replace(tensors.matrix(name), bias=bias)
    return Linear(tensors.tensor(name).transpose(1, 2).contiguous(), bias)


def _gates_first(gate_up: Linear) -> Linear:
    """Reorders the rows of each expert so that all gate rows come before all up rows. In the
    checkpoint, gate and up rows alternate.

    Quantized blocks are reordered in place, because nothing else uses them.
    """
    assert gate_up.bias is not None
    bias = _sorted(gate_up.bias)
    if gate_up.blocks is None:
        return Linear(_sorted(gate_up.weight), bias)
    assert isinstance(gate_up.blocks, GgufBlocks)
    for of_expert in gate_up.blocks.matrices():
        of_expert.data.copy_(_sorted(of_expert.data.unsqueeze(0)).squeeze(0))
    return replace(gate_up, bias=bias)


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    """Returns rows 0, 2, 4, ... and then rows 1, 3, 5, ... of each expert. `rows` is
    [experts, rows, ...]."""
    return torch.cat([rows[:, ::2], rows[:, 1::2]], 1)


def _one_by_one(stack: Linear) -> Parts:
    """Splits a tensor with the matrices of all experts into one matrix per expert, without
    copying."""
    num = len(stack.weight)
    biases = [None] * num if stack.bias is None else stack.bias
    blocks = stack.blocks.matrices() if isinstance(stack.blocks, GgufBlocks) else [None] * num
    return [(Linear(*each),) for each in zip(stack.weight, biases, blocks, strict=True)]


def _apart(tensors: TensorsByName, names: Sequence[Sequence[str]]) -> Parts:
    """Returns the matrices of each expert. `names` has the names of each expert's tensors.

    Matrices are not copied if they stay quantized or can be used directly from the mapped file.
    Otherwise the copies of all experts are in one tensor, and the result has views of this tensor.
    """
    every = [part for parts in names for part in parts]
    apart = tensors.matrices(every) if tensors.is_mapped(every[0]) else tensors.quantized(every)
    if apart:
        parts = len(names[0])
        return [tuple(apart[at : at + parts]) for at in range(0, len(apart), parts)]
    stacked = tensors.stacked(every)
    return _one_by_one(Linear(stacked.view(len(names), -1, stacked.shape[1]), None))
