// The packed format of quantized weights. A weight is scale * (number - zero) + min.
//
// A panel has 16 outputs. It is a sequence of units of 64 inputs, padded with zeros. A unit has two
// groups of 32 inputs. It is stored in whole cache lines, in the order in which a product reads it:
//
// 1. Numbers. A group is eight vectors of 64 bytes. Vector v has inputs 4 v to 4 v + 3 of the
//    group: byte 4 n + i belongs to input 4 v + i of output n. A kind with 8 bits stores vector
//    after vector. A kind with 4 to 6 bits stores the lower 4 bits of vectors v and v + 4 in the
//    same bytes, v in the low nibbles. A kind with 2 or 3 bits stores the lower 2 bits of vectors
//    v, v + 2, v + 4 and v + 6 in the same bytes, v in the lowest bits.
// 2. High bits. A kind with 3 or 5 bits has one vector per group, and bit v of its bytes belongs to
//    vector v. A kind with 6 bits has two vectors per group. Bits 2 i and 2 i + 1 of the first
//    belong to vector i, those of the second to vector 4 + i.
// 3. Scales of the 16 outputs in float16, one per group. Q2_K, Q3_K and kinds with 6 bits have two
//    per group, for 16 inputs each. MXFP4 has bfloat16 scales, because these can represent all
//    powers of 2. In Q4_Z64, both groups of a unit share a scale and a zero point.
// 4. The minimums in float16, or the zero points, if the kind has them, in the order of the scales.
//
// MXFP4 stores 4-bit codes (E2M1), which are decoded to twice their value plus 12. IQ4 stores 4-bit
// codes of a table, which are decoded to the value plus 128. TERNARY stores 0, 1 or 2.

#pragma once

#include <cstdint>

#include "decoder.h"

namespace tandem {

constexpr int kUnitInputs = 64;
constexpr int kHalf = 16;           // inputs in half a group
constexpr int kVectorBytes = 64;    // 4 inputs of 16 outputs
constexpr int kScaleBytes = 2 * 16;  // scales of 16 outputs

constexpr uint8_t kMxNumbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The value of each code of IQ4_NL and IQ4_XS, plus 128.
constexpr uint8_t kIqNumbers[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                    129, 141, 153, 166, 181, 197, 217, 241};

// What the numbers of a kind are: as stored, or entries of kMxNumbers or kIqNumbers.
enum class Numbers { kStored, kMx, kIq };

// The properties of a quantized kind. `kZeroInputs` is the number of inputs that share a scale and
// a zero point; 0: the zero point is the same for all weights of the kind. `kHalves`: a scale for
// 16 inputs instead of 32.
template <int kBitsOf, bool kHasMinsOf, Numbers kNumbers = Numbers::kStored, int kZeroInputs = 0,
          bool kHalves = false>
struct Format {
    static constexpr int kBits = kBitsOf;
    static constexpr bool kHasMins = kHasMinsOf;
    static constexpr bool kHasCodes = kNumbers != Numbers::kStored;
    static constexpr bool kHasPowers = kNumbers == Numbers::kMx;  // scales are powers of 2
    // Whether numbers may be up to 255.
    static constexpr bool kIsWide = kBits == 8 || kNumbers == Numbers::kIq;
    static constexpr bool kHasZeros = kZeroInputs > 0;
    static constexpr bool kIsTernary = kBits == 2 && !kHasMins;
    static constexpr int kZero = kHasPowers   ? 12
                                 : kHasMins   ? 0
                                 : kIsWide    ? 128
                                 : kIsTernary ? 1
                                              : 1 << (kBits - 1);
    static constexpr int kScaleInputs = kHasZeros ? kZeroInputs : kHalves ? 16 : 32;
    static constexpr int kNumScales = kUnitInputs / kScaleInputs;  // scales of an output in a unit
    static constexpr int kLowBits = kBits == 8 ? 8 : kBits > 3 ? 4 : 2;
    static constexpr int kHighBits = kBits - kLowBits;
    static constexpr int kLowBytes = kVectorBytes * kLowBits;  // bytes of a group
    static constexpr int kHighBytes = kVectorBytes * kHighBits;
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
        case Q6: return work(Format<6, false, Numbers::kStored, 0, true>{});
        case MXFP4: return work(Format<4, false, Numbers::kMx>{});
        case Q4_Z32: return work(Format<4, false, Numbers::kStored, 32>{});
        case Q4_Z64: return work(Format<4, false, Numbers::kStored, 64>{});
        case IQ4: return work(Format<4, false, Numbers::kIq>{});
        case Q2_K: return work(Format<2, true, Numbers::kStored, 0, true>{});
        case Q3_K: return work(Format<3, false, Numbers::kStored, 0, true>{});
        case TERNARY: return work(Format<2, false>{});
        default: return work(Format<8, false>{});
    }
}

inline bool is_quantized(int32_t kind) {
    return (kind >= Q8_0 && kind <= MXFP4) || (kind >= Q4_Z32 && kind <= TERNARY);
}

inline int num_units(int in) { return (in + kUnitInputs - 1) / kUnitInputs; }

}  // namespace tandem
