"""Loads a layer's experts, in whichever form a checkpoint has them (expert_weights.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.engine.executor.expert_weights import ExpertNames, bias_of
from tandem.engine.executor.mxfp4 import dequantize
from tandem.engine.executor.tensors_by_name import TensorsByName
from tandem.engine.executor.weights import ExpertWeights, Linear, Mlp
from tandem.models.experts import Experts

Parts = list[tuple[Linear, ...]]  # of each expert


def load_experts(
    tensors: TensorsByName, names: ExpertNames, layer: str, experts: Experts, shared: Mlp | None
) -> ExpertWeights:
    """Returns the experts of the layer with this name. `shared` is the MLP beside them."""
    gate_ups, downs = _products(tensors, names, layer, experts.num)
    correction = f"{layer}.{names.correction}"
    return ExpertWeights(
        router=_router(tensors, names, layer),
        shared=shared,
        correction=tensors.floats(correction) if experts.is_corrected else None,
        mlps=tuple(Mlp(gate_up, down[0]) for gate_up, down in zip(gate_ups, downs, strict=True)),
    )


def _router(tensors: TensorsByName, names: ExpertNames, layer: str) -> Linear:
    """Returns the router's matrix, of float32 where transformers computes with that."""
    name = f"{layer}.{names.router}"
    if names.form != "deepseek":
        return tensors.linear(name)
    return Linear(tensors.floats(f"{name}.weight"), None)


def _products(
    tensors: TensorsByName, names: ExpertNames, layer: str, num: int
) -> tuple[Parts, Parts]:
    """Returns gates and ups, and downs."""
    stacked = [f"{layer}.{name}" for name in names.stacked]
    if names.is_gguf:
        gates, ups, downs = (_of_stack(tensors, name, bias_of(name)) for name in stacked)
        return [gate + up for gate, up in zip(gates, ups, strict=True)], downs
    if names.form == "gpt_oss":
        gate_up, down = (_of_gpt_oss(tensors, name, names.is_mxfp4) for name in stacked)
        # Gates and ups take turns.
        weight, bias = (torch.cat([each[:, ::2], each[:, 1::2]], 1) for each in gate_up)
        return _one_by_one(weight, bias), _one_by_one(*down)
    if names.is_stacked:
        gate_ups, downs = (_of_stack(tensors, name, f"{name}_bias") for name in stacked)
        return gate_ups, downs
    parts = [[f"{layer}.{part}" for part in names.parts(i)] for i in range(num)]
    return (
        _apart(tensors, [(gate, up) for gate, up, _ in parts]),
        _apart(tensors, [(down,) for _, _, down in parts]),
    )


def _of_gpt_oss(
    tensors: TensorsByName, name: str, is_mxfp4: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights [experts, out, in] and biases [experts, out]."""
    bias = tensors.tensor(f"{name}_bias")
    if not is_mxfp4:
        return tensors.tensor(name).transpose(1, 2).contiguous(), bias
    blocks, scales = tensors.dense(f"{name}_blocks"), tensors.dense(f"{name}_scales")
    return tensors.on_device(dequantize(blocks, scales, bias.dtype)), bias


def _of_stack(tensors: TensorsByName, name: str, bias: str) -> Parts:
    """Returns the matrices of one tensor of all experts."""
    return _one_by_one(tensors.tensor(name), tensors.tensor(bias) if bias in tensors else None)


def _one_by_one(weights: torch.Tensor, biases: torch.Tensor | None) -> Parts:
    if biases is None:
        return [(Linear(weight, None),) for weight in weights]
    return [(Linear(*each),) for each in zip(weights, biases, strict=True)]


def _apart(tensors: TensorsByName, names: Sequence[Sequence[str]]) -> Parts:
    """Returns the matrix of each expert, or its parts: views of one tensor of all experts where
    that costs no copy that is not made anyway."""
    if tensors.is_mapped(names[0][0]):
        return [tuple(Linear(tensors.tensor(part), None) for part in parts) for parts in names]
    stacked = tensors.stacked([part for parts in names for part in parts])
    return _one_by_one(stacked.view(len(names), -1, stacked.shape[1]), None)
