// Rows of quantized blocks, as GGUF files hold them, and blocks that have a zero.
//
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h has the types of GGUF. Each is decoded
// into groups of 32 inputs:
//
//     weight = scale * (number - zero) + min      numbers >= 0; zero or min is 0

#pragma once

#include <cstdint>

#include "decoder.h"

namespace tandem {

constexpr int kGroup = 32;

struct Group {
    uint8_t numbers[kGroup];
    float scales[2];  // of its halves, which differ for Q6_K only
    float min;
    int zero;
};

// Blocks with a zero, which no GGUF file has: a float16 scale, a byte for the zero, and the nibbles of
// 32 inputs or of twice 32.
constexpr int32_t kZeroedBy32 = 1032, kZeroedBy64 = 1064;

struct BlockType {
    int32_t type;  // as GGUF files number them, or one of those below
    Kind kind;     // as which it is packed
    int inputs, bytes;
    int zero;      // of all groups, or where `decode` writes none
    void (*decode)(const uint8_t* block, Group* groups);  // inputs / kGroup of them
};

// Null: not a type that is decoded here.
const BlockType* block_type(int32_t type);

float widen_half(uint16_t half);
uint16_t narrow_half(float x);  // to the nearest, ties to even

}  // namespace tandem
