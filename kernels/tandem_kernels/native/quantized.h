// The packed format of quantized weights: panels of 16 outputs, each a sequence of units of 64
// inputs (padded with zeros), in the order in which a product reads them:
//
//     numbers    two groups of 32 inputs, each of eight vectors; vector v has inputs 4 v .. 4 v + 3
//                of its group, and byte 4 n + i is input 4 v + i of output n
//                    8 bits: vector after vector
//                    fewer: the lower 4 bits of vectors v and v + 4 share bytes; v has the low nibble
//     high bits  5 bits: a byte for both groups; bit v belongs to vector v
//                6 bits: two vectors of bytes per group; bits 2 i, 2 i + 1 of the first belong to
//                vector i, those of the second to vector 4 + i
//     scales     float16 of 16 outputs, group after group; for 6 bits two per group (16 inputs each);
//                for MXFP4 bfloat16, which represents all powers of 2
//     mins       float16 in the same order, if the kind has minimums; or its zero points (integers)
//
// A weight is scale * (number - zero) + min. Units are whole cache lines. MXFP4 stores 4-bit codes
// (E2M1), which are decoded to twice the value plus 12. In Q4_Z64, all inputs of a unit share a scale
// and a zero point.

#pragma once

#include <cstdint>

#include "decoder.h"

namespace tandem {

constexpr int kUnitInputs = 64;
constexpr int kHalf = 16;           // inputs in half a group
constexpr int kVectorBytes = 64;    // 4 inputs of 16 outputs
constexpr int kScaleBytes = 2 * 16;  // scales of 16 outputs

constexpr uint8_t kMxNumbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// `kZeroInputs` is the number of inputs that share a scale and a zero point; 0: the kind has a
// constant zero point.
template <int kBitsOf, bool kHasMinsOf, bool kHasCodesOf = false, int kZeroInputs = 0>
struct Format {
    static constexpr int kBits = kBitsOf;
    static constexpr bool kHasMins = kHasMinsOf;
    static constexpr bool kHasCodes = kHasCodesOf;  // MXFP4
    static constexpr bool kHasZeros = kZeroInputs > 0;
    static constexpr int kZero = kHasCodes ? 12 : kHasMins ? 0 : 1 << (kBits - 1);
    static constexpr int kScaleInputs = kHasZeros ? kZeroInputs : kBits == 6 ? 16 : 32;
    static constexpr int kNumScales = kUnitInputs / kScaleInputs;  // scales of an output in a unit
    static constexpr int kLowBytes = kVectorBytes * (kBits == 8 ? 8 : 4);  // bytes of a group
    static constexpr int kHighBytes = kVectorBytes * (kBits == 5 ? 1 : kBits == 6 ? 2 : 0);
    static constexpr int kHigh = 2 * kLowBytes;
    static constexpr int kScales = kHigh + 2 * kHighBytes;
    static constexpr int kMins = kScales + kScaleBytes * kNumScales;
    static constexpr int kZeros = kMins;
    static constexpr int kUnitBytes =
        kMins + (kHasMins || kHasZeros ? kScaleBytes * kNumScales : 0);
};

// Calls `work` with the format type of a quantized kind.
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
