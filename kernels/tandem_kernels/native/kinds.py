"""Numbers by which C++ knows kinds of numbers, stages and activations (decoder.h, stages.h)."""

from enum import IntEnum


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
