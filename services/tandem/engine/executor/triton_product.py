"""Products with a layer's matrices on the Triton kernels.

numbers                      torch's product
integers in groups           one kernel, which makes numbers of them in registers
other quantized matrices     numbers of some outputs at a time, and torch's product with them
"""

import torch
from torch.nn.functional import linear

from tandem.engine.executor.expand import pieces
from tandem.engine.executor.weights import Linear
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem_kernels.triton.packed_linear import can_multiply, packed_linear


def product(x: torch.Tensor, matrix: Linear) -> torch.Tensor:
    """Returns [rows, outputs] of x [rows, inputs]."""
    groups = matrix.blocks
    if isinstance(groups, PackedGroups) and is_multiplied(groups):
        return packed_linear(x, groups.data, groups.scales, groups.zeros, groups.mins, matrix.bias)
    parts = [linear(x, weight, bias) for weight, bias in pieces(matrix)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def is_multiplied(groups: PackedGroups) -> bool:
    """Returns whether the kernel takes a matrix as it is."""
    return groups.group_of_input is None and can_multiply(groups.shape[1], groups.scales.shape[1])
