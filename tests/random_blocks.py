"""Random quantized matrices of each type that the native kernels multiply."""

from __future__ import annotations

import math

import gguf
import numpy as np
import torch

from tandem.models.gguf.tensors import BlocksType, GgufBlocks, ZeroedType

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
# Types that only the native kernels multiply.
NATIVE_TYPES = ("IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0")
ZEROED = ("Q4_Z32", "Q4_Z64")  # in no GGUF file
# offsets of a block's float16 numbers, and their size for weights of about 1
_SCALES: dict[str, dict[int, float]] = {
    "Q4_0": {0: 1 / 4.6},
    "Q4_1": {0: 1 / 4.6, 2: -7.5 / 4.6},
    "Q5_0": {0: 1 / 9.2},
    "Q5_1": {0: 1 / 9.2, 2: -15.5 / 9.2},
    "Q8_0": {0: 1 / 74},
    "Q4_K": {0: 0.7 / 31 / 4.6, 2: 0.7 * 7.5 / 31 / 4.6},
    "Q5_K": {0: 0.7 / 31 / 9.2, 2: 0.7 * 15.5 / 31 / 9.2},
    "Q6_K": {208: 1 / 74 / 18},
    "MXFP4": {},
    "IQ4_NL": {0: 1 / 70},
    "IQ4_XS": {0: 1 / 70 / 18},
    "Q2_K": {80: 0.7 / 7.5 / 1.1, 82: 0.7 * 1.5 / 7.5 / 1.1},
    "Q3_K": {108: 1 / 2.3 / 18},
    "TQ1_0": {52: 1 / 0.8},
    "TQ2_0": {64: 1 / 1.1},
    "Q4_Z32": {0: 1 / 6.7},
    "Q4_Z64": {0: 1 / 6.7},
}


def random_blocks(
    name: str, num_out: int, num_in: int, seed: int = 0, size: float = 1.0
) -> GgufBlocks:
    """Creates weights of about size / sqrt(num_in), in blocks of otherwise random bits."""
    chance = np.random.default_rng(seed)
    block_type: BlocksType
    if name in ZEROED:
        block_type = ZeroedType[name]
        block_inputs = int(name.removeprefix("Q4_Z"))
        block_bytes = 3 + block_inputs // 2
    else:
        block_type = gguf.GGMLQuantizationType[name]
        block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[block_type]
    num_blocks = num_out * num_in // block_inputs
    blocks = chance.integers(0, 256, (num_blocks, block_bytes), np.uint8)
    for at, scale in _SCALES[name].items():
        sizes = size * scale / num_in**0.5 * chance.uniform(0.7, 1.3, (num_blocks, 1))
        blocks[:, at : at + 2] = sizes.astype(np.float16).view(np.uint8)
    if name == "MXFP4":  # numbers of about 3 and a power-of-2 scale
        blocks[:, 0] = (
            127 - round(math.log2(3 * num_in**0.5 / size)) + chance.integers(-1, 1, num_blocks)
        )
    if name in ZEROED:
        blocks[:, 2] %= 17
    return GgufBlocks(torch.from_numpy(blocks.reshape(num_out, -1)), block_type, (num_out, num_in))
