"""The types of numbers in memory, as decoder.h counts them."""

from enum import IntEnum


class Kind(IntEnum):
    F32 = 0
    BF16 = 1
    I8 = 2
    BF16_PAIRS = 3  # as packed for AMX and AVX512_BF16
    I8_I4 = 4  # KV: int8 keys, values of 4 bits
    I4 = 5  # KV
    F8 = 6  # KV: e4m3
    Q8_0 = 8  # this and those below: quantized groups of inputs, of weights alone
    Q4_0 = 9
    Q4_1 = 10
    Q5_0 = 11
    Q5_1 = 12
    Q6 = 13
