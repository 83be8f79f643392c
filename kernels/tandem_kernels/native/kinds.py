"""Numbers by which C++ knows kinds of numbers, stages and activations (decoder.h, stages.h).

Also the sizes of packed weights.
"""

from enum import IntEnum

PANEL = 16  # outputs side by side in packed weights; head sizes are a multiple of it
_STEP_INPUTS = 32  # in pairs and in fp8, the inputs of an output are rounded up to


class Kind(IntEnum):
    F32 = 0
    BF16 = 1
    I8 = 2
    BF16_PAIRS = 3  # as packed for AMX and AVX512_BF16
    I8_I4 = 4  # KV: int8 keys, values of 4 bits
    I4 = 5  # KV
    F8 = 6  # KV: e4m3
    I8_F32 = 7  # KV of latent attention: latents of int8, rotated keys of fp32, or bf16
    I8_BF16 = 15
    Q8_0 = 8  # this and those below: quantized groups of inputs, of weights alone
    Q4_0 = 9
    Q4_1 = 10
    Q5_0 = 11
    Q5_1 = 12
    Q6 = 13
    MXFP4 = 14  # numbers of E2M1, and scales that are powers of 2
    Q4_Z32 = 19  # a zero for each group, of 32 inputs or 64
    Q4_Z64 = 20
    F8_F32 = 16  # weights of e4m3 with scales, which become numbers of fp32 in products
    F8_BF16 = 17  # of bf16, which are computed with as fp32
    F8_PAIRS = 18  # as BF16_PAIRS


class Stage(IntEnum):
    """A stage of a step; it ends when all threads are through with it."""

    EMBED = 0
    NORM = 1  # and the choice of experts
    QKV = 2
    PLACE = 3  # head norms, rotation, K and V into the pool
    ATTENTION = 4
    ATTENTION_OUT = 5
    GATE_UP = 6
    SILU = 7
    DOWN = 8
    OUTPUT = 9


class Activation(IntEnum):
    """A function that the gates of an MLP go through."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED = 2


_WEIGHT_BYTES = {Kind.F32: 4, Kind.BF16: 2, Kind.BF16_PAIRS: 2}  # 1 of all others
_BY_STEPS = (Kind.BF16_PAIRS, Kind.F8_F32, Kind.F8_BF16, Kind.F8_PAIRS)


def packed_bytes(shape: tuple[int, int], kind: Kind) -> int:
    """Returns the bytes of the packed panels of weights [out, in] that are not in groups."""
    num_out, num_in = shape
    if kind in _BY_STEPS:
        num_in = whole_steps(num_in)
    return -(-num_out // PANEL) * PANEL * num_in * _WEIGHT_BYTES.get(kind, 1)


def whole_steps(num_in: int) -> int:
    """Returns a number of inputs rounded up, as products in pairs read them."""
    return -(-num_in // _STEP_INPUTS) * _STEP_INPUTS
