"""Multiplies activations with a layer's matrices:

format of the weights                    computed by
not quantized                            torch
PackedGroups, Fp8                        a Triton kernel, which dequantizes in registers
formats that the kernel does not read    torch, after a few rows at a time are dequantized
"""

from collections.abc import Sequence

import torch

from tandem.engine.executor.weights.decoder_weights import Linear, Quantized
from tandem.engine.executor.weights.expand import pieces
from tandem.models.checkpoint.quantized.fp8 import RUN, Fp8
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem_kernels.linear import linear
from tandem_kernels.triton.packed_linear import packed_linear
from tandem_kernels.triton.weight_tiles import Form, PackedWeight, can_multiply

_INTEGERS: tuple[Form, ...] = ("int4", "int5", "int6")  # by PackedGroups.high_bits


def project(x: torch.Tensor, parts: Sequence[Linear]) -> torch.Tensor:
    """Multiplies x by several matrices, such as q, k and v. Returns the products side by side,
    [rows, outputs of all matrices].

    On a CUDA device, `parts` has several matrices only if their quantized formats differ.
    weights/tensors_by_name.py joins other matrices with the same input to one matrix.
    """
    if len(parts) == 1:
        return product(x, parts[0])
    out = x.new_empty(len(x), sum(len(part.weight) for part in parts))
    first = 0
    for part in parts:
        end = first + len(part.weight)
        product(x, part, out=out[:, first:end])
        first = end
    return out


def product(x: torch.Tensor, matrix: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the product [rows, outputs] of x [rows, inputs]. If `out` is given, the product is
    written to it."""
    if matrix.blocks is None:
        return linear(x, matrix.weight, matrix.bias, out)
    packed = packed_weight(matrix.blocks)
    if packed is not None:
        order = matrix.blocks.order if isinstance(matrix.blocks, PackedGroups) else None
        if order is not None:
            x = x.index_select(1, order)
        return packed_linear(x, packed, matrix.bias, out=out)
    if out is None:
        out = x.new_empty(len(x), len(matrix.weight))
    first = 0
    for weight, bias in pieces(matrix):
        end = first + len(weight)
        linear(x, weight, bias, out[:, first:end])
        first = end
    return out


def packed_weight(blocks: Quantized) -> PackedWeight | None:
    """Returns a quantized matrix as the Triton kernels read it, without a copy. Returns None if
    they do not read its format.

    The inputs of the result are in the order in which the matrix stores them.
    """
    num_in = blocks.shape[-1]
    packed: PackedWeight | None = None
    if isinstance(blocks, Fp8):
        group_size = RUN if blocks.scales.shape[1] > 1 else 0
        packed = PackedWeight("e4m3", blocks.data, group_size, blocks.scales)
    elif isinstance(blocks, PackedGroups):
        num_groups = blocks.scales.shape[1]
        packed = PackedWeight(
            _form_of(blocks),
            blocks.data,
            num_in // num_groups if num_groups > 1 else 0,
            blocks.scales,
            blocks.zeros,
            blocks.mins,
            blocks.block_scales,
            blocks.block_mins,
            blocks.high,
            blocks.zero,
        )
    return packed if packed is not None and can_multiply(packed) else None


def _form_of(groups: PackedGroups) -> Form:
    if groups.data.dtype == torch.int8:
        return "int8"
    if groups.scales.dtype == torch.float8_e8m0fnu:
        return "mxfp4"
    return _INTEGERS[groups.high_bits]
