// The packed format of quantized weights. A weight is scale * (number - zero) + min.
//
// A panel has 16 outputs. It is a sequence of units of 64 inputs, padded with zeros. A unit has two
// groups of 32 inputs. It is stored in whole cache lines, in the order in which a product reads it:
//
// 1. Numbers. A group is eight vectors of 64 bytes. Vector v has inputs 4 v to 4 v + 3 of the
//    group: byte 4 n + i belongs to input 4 v + i of output n. A kind with 8 bits stores vector
//    after vector. A kind with fewer bits stores the lower 4 bits of vectors v and v + 4 in the
//    same bytes, v in the low nibbles.
// 2. High bits. A kind with 5 bits has one vector per group, and bit v of its bytes belongs to
//    vector v. A kind with 6 bits has two vectors per group. Bits 2 i and 2 i + 1 of the first
//    belong to vector i, those of the second to vector 4 + i.
// 3. Scales of the 16 outputs in float16, one per group. A kind with 6 bits has two per group, for
//    16 inputs each. MXFP4 has bfloat16 scales, because these can represent all powers of 2. In
//    Q4_Z64, both groups of a unit share a scale and a zero point.
// 4. The minimums in float16, or the zero points, if the kind has them, in the order of the scales.
//
// MXFP4 stores 4-bit codes (E2M1), which are decoded to twice their value plus 12.

#pragma once

#include <cstdint>

#include "decoder.h"

namespace tandem {

constexpr int kUnitInputs = 64;
constexpr int kHalf = 16;           // inputs in half a group
constexpr int kVectorBytes = 64;    // 4 inputs of 16 outputs
constexpr int kScaleBytes = 2 * 16;  // scales of 16 outputs

constexpr uint8_t kMxNumbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The properties of a quantized kind. `kZeroInputs` is the number of inputs that share a scale and
// a zero point; 0: the zero point is the same for all weights of the kind.
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
