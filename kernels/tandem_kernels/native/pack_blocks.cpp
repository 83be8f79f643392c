// Packs quantized blocks into panels (quantized.h), or dequantizes them to fp32.

#include <cstring>
#include <vector>

#include "blocks.h"
#include "pack.h"
#include "quantized.h"

namespace tandem {
namespace {

constexpr int64_t kPanel = 16;

struct Rows {
    const BlockType& type;
    const uint8_t* blocks;
    int64_t num_blocks;  // blocks in a row

    void decode(int64_t row, Group* groups) const {
        const uint8_t* block = blocks + row * num_blocks * type.bytes;
        const int num_groups = type.inputs / kGroup;  // groups in a block
        for (int64_t i = 0; i < num_blocks; ++i, groups += num_groups) {
            for (int g = 0; g < num_groups; ++g) groups[g].zero = type.zero;
            type.decode(block + i * type.bytes, groups);
        }
    }
};

void put_half(uint8_t* to, float x) {
    const uint16_t half = narrow_half(x);
    std::memcpy(to, &half, sizeof half);
}

// Converts a power of 2 to bfloat16, which is the upper half of the float, and writes it.
void put_power(uint8_t* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const auto upper = static_cast<uint16_t>(bits >> 16);
    std::memcpy(to, &upper, sizeof upper);
}

// For each number in a table of numbers, its code. Two codes of MXFP4 mean 0; the lower one is used.
struct Codes {
    uint8_t of[256] = {};

    constexpr explicit Codes(const uint8_t (&numbers)[16]) {
        for (int code = 15; code >= 0; --code) of[numbers[code]] = static_cast<uint8_t>(code);
    }
};

constexpr Codes kCodesOfMx(kMxNumbers), kCodesOfIq(kIqNumbers);

template <class F>
uint8_t stored_number(uint8_t number) {
    if (!F::kHasCodes) return number;
    return (F::kHasPowers ? kCodesOfMx : kCodesOfIq).of[number];
}

// Writes the weights of one output for a group of 32 inputs to the packed panel. The output's bits
// in the panel must be zeros before.
template <class F>
void put_group(const Group& group, int index, int lane, uint8_t* unit) {
    for (int i = 0; i < kGroup; ++i) {
        const int vector = i / 4, byte = 4 * lane + i % 4;
        uint8_t* low = unit + index * F::kLowBytes + byte;
        uint8_t* high = unit + F::kHigh + index * F::kHighBytes + byte;
        constexpr int kLow = F::kLowBits;
        const int number = stored_number<F>(group.numbers[i]), above = number >> kLow;
        low[vector % kLow * kVectorBytes] |=
            static_cast<uint8_t>((number & ((1 << kLow) - 1)) << vector / kLow * kLow);
        if (F::kHighBits == 1) *high |= static_cast<uint8_t>(above << vector);
        if (F::kHighBits == 2)
            high[vector / 4 * kVectorBytes] |= static_cast<uint8_t>(above << vector % 4 * 2);
    }
    constexpr int kScales = F::kNumScales > 2 ? 2 : 1;  // scales in a group
    const int first = index * F::kNumScales / 2;
    for (int half = 0; half < kScales; ++half) {
        uint8_t* const to = unit + (first + half) * kScaleBytes + 2 * lane;
        (F::kHasPowers ? put_power : put_half)(to + F::kScales, group.scales[half]);
        if (F::kHasMins) put_half(to + F::kMins, group.mins[half]);
        if (F::kHasZeros) put_half(to + F::kMins, static_cast<float>(group.zero));
    }
}

}  // namespace

bool pack_blocks(const void* blocks, int32_t type, int64_t rows, int64_t in, int64_t first_output,
                 void* panels) {
    const BlockType* known = block_type(type);
    if (known == nullptr) return false;
    const Rows from{*known, static_cast<const uint8_t*>(blocks), in / known->inputs};
    std::vector<Group> groups(in / kGroup);
    by_format(known->kind, [&](auto format) {
        using F = decltype(format);
        const int64_t panel_bytes = static_cast<int64_t>(num_units(in)) * F::kUnitBytes;
        for (int64_t row = 0; row < rows; ++row) {
            from.decode(row, groups.data());
            const int64_t output = first_output + row;
            uint8_t* unit = static_cast<uint8_t*>(panels) + output / kPanel * panel_bytes;
            for (size_t g = 0; g < groups.size(); ++g)
                put_group<F>(groups[g], g % 2, output % kPanel, unit + g / 2 * F::kUnitBytes);
        }
    });
    return true;
}

// The product and the sum are rounded separately, as in numpy.
bool widen_blocks(const void* blocks, int32_t type, int64_t rows, int64_t in, float* to) {
    const BlockType* known = block_type(type);
    if (known == nullptr) return false;
    const Rows from{*known, static_cast<const uint8_t*>(blocks), in / known->inputs};
    std::vector<Group> groups(in / kGroup);
    for (int64_t row = 0; row < rows; ++row) {
        from.decode(row, groups.data());
        for (const Group& group : groups)
            for (int i = 0; i < kGroup; ++i) {
                const int half = i / (kGroup / 2);
                *to++ = group.scales[half] * static_cast<float>(group.numbers[i] - group.zero) +
                        group.mins[half];
            }
    }
    return true;
}

}  // namespace tandem
