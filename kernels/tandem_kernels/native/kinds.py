"""The C++ decoder's constants for number formats, stages and activations (decoder.h, stages.h), and
the sizes of packed weights.
"""

from enum import IntEnum

PANEL = 16  # Outputs per panel of packed weights; head sizes are a multiple of it.
_STEP_INPUTS = 32  # In pair and fp8 formats, the number of inputs is padded to a multiple of this.


class Kind(IntEnum):
    """The format of numbers in weights, activations or KV."""

    F32 = 0
    BF16 = 1
    I8 = 2
    BF16_PAIRS = 3  # interleaved pairs of inputs, for AMX and AVX512_BF16
    I8_I4 = 4  # KV: int8 keys, 4-bit values
    I4 = 5  # KV: 4-bit keys and values
    F8 = 6  # KV: e4m3
    # KV of latent attention: int8 latents; the rotated keys are fp32, or bf16 in I8_BF16
    I8_F32 = 7
    I8_BF16 = 15
    Q8_0 = 8  # this kind and the following ones are for weights; groups of inputs share a scale
    Q4_0 = 9
    Q4_1 = 10
    Q5_0 = 11
    Q5_1 = 12
    Q6 = 13
    MXFP4 = 14  # E2M1 numbers with power-of-2 scales
    Q4_Z32 = 19  # 4-bit numbers; each group of 32 inputs (Q4_Z64: 64) has a zero point
    Q4_Z64 = 20
    F8_F32 = 16  # e4m3 weights with scales; expanded to fp32 in products
    F8_BF16 = 17  # e4m3 weights with scales; expanded to bf16, then multiplied in fp32
    F8_PAIRS = 18  # e4m3 weights with scales; expanded to BF16_PAIRS in products


class Stage(IntEnum):
    """A stage of a step. It ends when all threads have finished it."""

    EMBED = 0
    NORM = 1  # includes the choice of experts
    QKV = 2
    PLACE = 3  # head norms, RoPE, and storing K and V in the pool
    ATTENTION = 4
    ATTENTION_OUT = 5
    GATE_UP = 6
    SILU = 7
    DOWN = 8
    OUTPUT = 9


class Activation(IntEnum):
    """The activation function of an MLP. CLAMPED is the form of gpt-oss."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED = 2


# bytes per weight; 1 for all other kinds
_WEIGHT_BYTES = {Kind.F32: 4, Kind.BF16: 2, Kind.BF16_PAIRS: 2}
_BY_STEPS = (Kind.BF16_PAIRS, Kind.F8_F32, Kind.F8_BF16, Kind.F8_PAIRS)


def packed_bytes(shape: tuple[int, int], kind: Kind) -> int:
    """Returns the size in bytes of packed weights [out, in] for kinds without groups."""
    num_out, num_in = shape
    if kind in _BY_STEPS:
        num_in = whole_steps(num_in)
    return -(-num_out // PANEL) * PANEL * num_in * _WEIGHT_BYTES.get(kind, 1)


def whole_steps(num_in: int) -> int:
    """Rounds a number of inputs up to the padded size of the pair and fp8 formats."""
    return -(-num_in // _STEP_INPUTS) * _STEP_INPUTS
