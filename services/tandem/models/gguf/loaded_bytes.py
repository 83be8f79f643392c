"""Counts the memory of a GGUF model's tensors after the kernels have loaded them. Does not import
torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from gguf import GGMLQuantizationType as Type

from tandem.models.gguf.layout import StoredTensor, read_parts
from tandem.models.gguf.names import ROPE_TABLES, unused_layers

# Bits per weight in the packed matrices of the native kernels. These kernels convert matrices of
# other types to the compute dtype.
PACKED_BITS = {
    Type.Q4_0: 4.5,
    Type.Q4_1: 5.0,
    Type.Q5_0: 5.5,
    Type.Q5_1: 6.0,
    Type.Q8_0: 8.5,
    Type.Q2_K: 4.0,
    Type.Q3_K: 4.0,
    Type.Q4_K: 5.0,
    Type.Q5_K: 6.0,
    Type.Q6_K: 7.0,
    Type.IQ4_NL: 4.5,
    Type.IQ4_XS: 4.5,
    Type.TQ1_0: 2.5,
    Type.TQ2_0: 2.5,
    Type.MXFP4: 4.5,
}
# Types that stay as they are for the torch and Triton kernels. They convert the others, too.
KEPT_TYPES = frozenset(
    {Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0}
    | {Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.MXFP4}
)
_DENSE = (Type.F32, Type.F16, Type.BF16)


def loaded_bytes(
    files: Sequence[Path], *, is_native: bool, dtype_bytes: int, has_latents: bool
) -> int:
    """Returns an upper bound of the bytes of a model's weights in memory, if quantized weights stay
    quantized. The native kernels round sizes of matrices up, which is not counted.

    `is_native` is False for the torch and Triton kernels. `dtype_bytes` is the size of a number in
    the compute dtype. With `has_latents`, the matrices that compute or expand latents become
    numbers of the compute dtype.

    Raises ConfigError for a truncated or invalid file.
    """
    tensors = read_parts(files, skips_strings=True).tensors
    unused = unused_layers(each.name for each in tensors)
    total = 0.0
    for each in tensors:
        if each.name in ROPE_TABLES or each.name.startswith(unused):
            continue
        is_latent = has_latents and ".attn_" in each.name and "attn_output" not in each.name
        bits = None if is_latent else _kept_bits(each, is_native)
        num_weights = math.prod(each.shape)
        if bits is None:
            total += max(num_weights * dtype_bytes, each.end - each.begin)
        else:
            total += num_weights * bits / 8
    return int(total)


def _kept_bits(tensor: StoredTensor, is_native: bool) -> float | None:
    """Returns the bits per weight of a tensor that stays quantized; None if it does not."""
    if is_native:
        return PACKED_BITS.get(tensor.type)
    if tensor.type not in KEPT_TYPES:
        return None
    return 8 * (tensor.end - tensor.begin) / math.prod(tensor.shape)
