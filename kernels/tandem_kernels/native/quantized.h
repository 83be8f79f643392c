// How quantized weights are packed: panels of 16 outputs, each a row of units of 64 inputs (zeros
// after the last), in the order in which a product reads them:
//
//     numbers    two groups of 32 inputs, each of eight vectors; vector v has inputs 4 v .. 4 v + 3 of
//                its group, byte 4 n + i is input 4 v + i of output n
//                    8 bits: vector after vector
//                    fewer: the lower 4 bits of vectors v and v + 4 share bytes, v has the lower half
//     high bits  5 bits: byte of both groups, bit v is of vector v
//                6 bits: two vectors of bytes a group; bits 2 i, 2 i + 1 of the first are of vector i,
//                of the second of vector 4 + i
//     scales     float16 of 16 outputs, group after group; two a group (of 16 inputs) for 6 bits;
//                for MXFP4 bfloat16, which holds all powers of 2
//     mins       float16 likewise, where the kind has any; or its zeros, which are whole numbers
//
// A weight is scale * (number - zero) + min. Units are whole cache lines. MXFP4 stores codes of 4 bits
// (E2M1), which stand for numbers: twice the value, and 12. Of Q4_Z64, all inputs of a unit share a
// scale and a zero.

#pragma once

#include <cstdint>

#include "decoder.h"

namespace tandem {

constexpr int kUnitInputs = 64;
constexpr int kHalf = 16;           // inputs: half of a group
constexpr int kVectorBytes = 64;    // 16 outputs, 4 inputs each
constexpr int kScaleBytes = 2 * 16;  // of 16 outputs

constexpr uint8_t kMxNumbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// `kZeroInputs`: how many inputs share a scale and a zero; 0: the kind has one zero.
template <int kBitsOf, bool kHasMinsOf, bool kHasCodesOf = false, int kZeroInputs = 0>
struct Format {
    static constexpr int kBits = kBitsOf;
    static constexpr bool kHasMins = kHasMinsOf;
    static constexpr bool kHasCodes = kHasCodesOf;  // MXFP4
    static constexpr bool kHasZeros = kZeroInputs > 0;
    static constexpr int kZero = kHasCodes ? 12 : kHasMins ? 0 : 1 << (kBits - 1);
    static constexpr int kScaleInputs = kHasZeros ? kZeroInputs : kBits == 6 ? 16 : 32;
    static constexpr int kNumScales = kUnitInputs / kScaleInputs;  // of an output in a unit
    static constexpr int kLowBytes = kVectorBytes * (kBits == 8 ? 8 : 4);  // of a group
    static constexpr int kHighBytes = kVectorBytes * (kBits == 5 ? 1 : kBits == 6 ? 2 : 0);
    static constexpr int kHigh = 2 * kLowBytes;
    static constexpr int kScales = kHigh + 2 * kHighBytes;
    static constexpr int kMins = kScales + kScaleBytes * kNumScales;
    static constexpr int kZeros = kMins;
    static constexpr int kUnitBytes =
        kMins + (kHasMins || kHasZeros ? kScaleBytes * kNumScales : 0);
};

// Calls `work` with the format of a quantized kind.
template <class Work>
auto by_format(int32_t kind, Work work) {
    switch (kind) {
        case Q4_0: return work(Format<4, false>{});
        case Q4_1: return work(Format<4, true>{});
        case Q5_0: return work(Format<5, false>{});
        case Q5_1: return work(Format<5, true>{});
        case Q6: return work(Format<6, false>{});
        case MXFP4: return work(Format<4, false, true>{});
        case Q4_Z32: return work(Format<4, false, false, 32>{});
        case Q4_Z64: return work(Format<4, false, false, 64>{});
        default: return work(Format<8, false>{});
    }
}

inline bool is_quantized(int32_t kind) {
    return (kind >= Q8_0 && kind <= MXFP4) || kind == Q4_Z32 || kind == Q4_Z64;
}

inline int num_units(int in) { return (in + kUnitInputs - 1) / kUnitInputs; }

}  // namespace tandem
