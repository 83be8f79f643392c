// Decodes rows of quantized blocks: GGUF's types, and blocks with a zero point.
//
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h defines GGUF's types. Each is
// decoded into groups of 32 inputs:
//
//     weight = scale * (number - zero) + min      numbers >= 0; zero or min is 0
//
// Numbers of IQ4_NL and IQ4_XS are values of a table, plus 128.

#pragma once

#include <cstdint>

#include "decoder.h"

namespace tandem {

constexpr int kGroup = 32;

struct Group {
    uint8_t numbers[kGroup];
    // Of the two halves of the group. They differ for Q2_K, Q3_K and Q6_K only.
    float scales[2], mins[2];
    int zero;
};

// Two block types that GGUF does not have. A block has a float16 scale, a byte for the zero point,
// and 4 bits for each of 32 or 64 inputs.
constexpr int32_t kZeroedBy32 = 1032, kZeroedBy64 = 1064;

struct BlockType {
    int32_t type;  // GGUF's type number, or kZeroedBy32 or kZeroedBy64
    Kind kind;     // kind to which blocks are packed
    int inputs, bytes;
    int zero;      // zero point of all groups, unless `decode` sets the zero point of each group
    // Decodes a block to inputs / kGroup groups.
    void (*decode)(const uint8_t* block, Group* groups);
};

// Returns the description of a block type; null if the type is not supported.
const BlockType* block_type(int32_t type);

float widen_half(uint16_t half);
uint16_t narrow_half(float x);  // rounds to nearest, ties to even

}  // namespace tandem
