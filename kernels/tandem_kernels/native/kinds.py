"""Enums with the integer codes that the C++ decoder uses for number formats, stages and activations
(decoder.h, stages.h), and functions that compute the sizes of packed weights.
"""

from enum import IntEnum

PANEL = 16  # number of outputs in a panel of packed weights; head sizes are multiples of 16
_STEP_INPUTS = 32  # in the kinds *_PAIRS and F8_*, the inputs are padded to a multiple of 32


class Kind(IntEnum):
    """The format of numbers in weights, activations or KV."""

    F32 = 0
    BF16 = 1
    I8 = 2
    BF16_PAIRS = 3  # bf16 weights in the order that AMX and AVX512_BF16 need (decoder.h)
    I8_I4 = 4  # KV: int8 keys, 4-bit values
    I4 = 5  # KV: 4-bit keys and values
    F8 = 6  # KV: e4m3
    # For KV of latent attention: int8 latents and rotated keys, which are fp32 in I8_F32 and bf16
    # in I8_BF16.
    I8_F32 = 7
    I8_BF16 = 15
    Q8_0 = 8  # this and the next kinds are for weights in which a group of inputs shares a scale
    Q4_0 = 9
    Q4_1 = 10
    Q5_0 = 11
    Q5_1 = 12
    Q6 = 13
    MXFP4 = 14  # E2M1 numbers with power-of-2 scales
    Q4_Z32 = 19  # 4-bit numbers; 32 inputs share a zero point (in Q4_Z64: 64)
    Q4_Z64 = 20
    IQ4 = 21  # 4-bit codes of a table (IQ4_NL and IQ4_XS)
    Q2_K = 22
    Q3_K = 23
    TERNARY = 24  # -1, 0 and 1 (TQ1_0 and TQ2_0)
    F8_F32 = 16  # e4m3 weights with scales; a product first converts them to fp32
    # Weights are e4m3 with scales. A product rounds them to bf16 and then multiplies in fp32.
    F8_BF16 = 17
    F8_PAIRS = 18  # e4m3 weights with scales; a product first converts them to BF16_PAIRS


class Stage(IntEnum):
    """A stage of a step. It ends when all threads have finished it."""

    EMBED = 0
    NORM = 1  # the norm of a layer, and the choice of experts
    QKV = 2
    PLACE = 3  # head norms, RoPE, and storing K and V in the pool
    ATTENTION = 4
    ATTENTION_OUT = 5
    GATE_UP = 6
    SILU = 7
    DOWN = 8
    OUTPUT = 9


class Activation(IntEnum):
    """The activation function of an MLP. gpt-oss uses CLAMPED (triton/activation.py)."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED = 2
    RELU_SQUARED = 3  # of an MLP without gates


class StateForm(IntEnum):
    """The kind of a layer that keeps a state (state_layer.h)."""

    GATED_DELTA = 0
    MAMBA2 = 1
    SHORT_CONV = 2
    KIMI_DELTA = 3


# Bytes per weight. Kinds that are not listed have 1.
_WEIGHT_BYTES = {Kind.F32: 4, Kind.BF16: 2, Kind.BF16_PAIRS: 2}
_BY_STEPS = (Kind.BF16_PAIRS, Kind.F8_F32, Kind.F8_BF16, Kind.F8_PAIRS)


def packed_bytes(shape: tuple[int, int], kind: Kind) -> int:
    """Returns the size in bytes of packed weights [out, in], for kinds in which weights do not
    share scales in groups."""
    num_out, num_in = shape
    if kind in _BY_STEPS:
        num_in = whole_steps(num_in)
    return -(-num_out // PANEL) * PANEL * num_in * _WEIGHT_BYTES.get(kind, 1)


def whole_steps(num_in: int) -> int:
    """Rounds a number of inputs up to a multiple of 32, as the kinds *_PAIRS and F8_* require."""
    return -(-num_in // _STEP_INPUTS) * _STEP_INPUTS
