#include "blocks.h"

#include <cmath>
#include <cstring>

#include "quantized.h"

namespace tandem {
namespace {

float half_at(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, sizeof half);
    return widen_half(half);
}

void scale_all(Group& group, float scale, float min = 0.0f) {
    group.scales[0] = group.scales[1] = scale;
    group.mins[0] = group.mins[1] = min;
}

// Unpacks the nibbles of 16 bytes; the low nibbles are the first 16 numbers.
void take_nibbles(const uint8_t* nibbles, uint8_t* numbers) {
    for (int i = 0; i < 16; ++i) {
        numbers[i] = nibbles[i] & 15;
        numbers[i + 16] = nibbles[i] >> 4;
    }
}

void add_fifth_bits(const uint8_t* bits, uint8_t* numbers) {
    for (int i = 0; i < kGroup; ++i) numbers[i] |= (bits[i / 8] >> i % 8 & 1) << 4;
}

void q4_0(const uint8_t* block, Group* groups) {
    scale_all(*groups, half_at(block));
    take_nibbles(block + 2, groups->numbers);
}

void q4_1(const uint8_t* block, Group* groups) {
    scale_all(*groups, half_at(block), half_at(block + 2));
    take_nibbles(block + 4, groups->numbers);
}

void q5_0(const uint8_t* block, Group* groups) {
    scale_all(*groups, half_at(block));
    take_nibbles(block + 6, groups->numbers);
    add_fifth_bits(block + 2, groups->numbers);
}

void q5_1(const uint8_t* block, Group* groups) {
    scale_all(*groups, half_at(block), half_at(block + 2));
    take_nibbles(block + 8, groups->numbers);
    add_fifth_bits(block + 4, groups->numbers);
}

void q8_0(const uint8_t* block, Group* groups) {
    scale_all(*groups, half_at(block));
    for (int i = 0; i < kGroup; ++i) groups->numbers[i] = block[2 + i] ^ 0x80;
}

// Returns half of 2^(e - 127). MXFP4 numbers are decoded to twice their values, so the scale is
// halved.
float half_of_power(uint8_t e) {
    const uint32_t bits = e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return power;
}

void mxfp4(const uint8_t* block, Group* groups) {
    scale_all(*groups, half_of_power(block[0]));
    take_nibbles(block + 1, groups->numbers);
    for (uint8_t& number : groups->numbers) number = kMxNumbers[number];
}

// Unpacks the scale and minimum of a group, 6 bits each, from 12 bytes for eight groups.
struct SixBits {
    int scale, min;

    SixBits(const uint8_t* packed, int group) {
        if (group < 4) {
            scale = packed[group] & 63;
            min = packed[group + 4] & 63;
        } else {
            scale = (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4;
            min = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
        }
    }
};

void scale_k(const uint8_t* block, int index, Group& group) {
    const SixBits bits(block + 4, index);
    scale_all(group, half_at(block) * bits.scale, -(half_at(block + 2) * bits.min));
}

// Unpacks group `index` of 32 numbers. Two groups share 32 bytes: the first has the low nibbles.
void take_k(const uint8_t* nibbles, int index, uint8_t* numbers) {
    for (int i = 0; i < kGroup; ++i)
        numbers[i] = nibbles[index / 2 * kGroup + i] >> index % 2 * 4 & 15;
}

void q4_k(const uint8_t* block, Group* groups) {
    for (int g = 0; g < 8; ++g) {
        scale_k(block, g, groups[g]);
        take_k(block + 16, g, groups[g].numbers);
    }
}

void q5_k(const uint8_t* block, Group* groups) {
    for (int g = 0; g < 8; ++g) {
        scale_k(block, g, groups[g]);
        take_k(block + 48, g, groups[g].numbers);
        for (int i = 0; i < kGroup; ++i) groups[g].numbers[i] |= (block[16 + i] >> g & 1) << 4;
    }
}

void q6_k(const uint8_t* block, Group* groups) {
    const float scale = half_at(block + 208);
    for (int g = 0; g < 8; ++g) {
        const uint8_t* low = block + g / 4 * 64 + g % 2 * kGroup;
        const uint8_t* high = block + 128 + g / 4 * kGroup;
        for (int i = 0; i < kGroup; ++i)
            groups[g].numbers[i] = static_cast<uint8_t>((low[i] >> g % 4 / 2 * 4 & 15) |
                                                        (high[i] >> g % 4 * 2 & 3) << 4);
        for (int half = 0; half < 2; ++half)
            groups[g].scales[half] = scale * static_cast<int8_t>(block[192 + 2 * g + half]);
        groups[g].mins[0] = groups[g].mins[1] = 0.0f;
    }
}

// Unpacks group `index` of 2-bit numbers. Four groups share 32 bytes.
void take_pairs_of_bits(const uint8_t* bits, int index, uint8_t* numbers) {
    for (int i = 0; i < kGroup; ++i)
        numbers[i] = bits[index / 4 * kGroup + i] >> index % 4 * 2 & 3;
}

void q2_k(const uint8_t* block, Group* groups) {
    const float scale = half_at(block + 80), min = half_at(block + 82);
    for (int g = 0; g < 8; ++g) {
        take_pairs_of_bits(block + 16, g, groups[g].numbers);
        for (int half = 0; half < 2; ++half) {
            const uint8_t packed = block[2 * g + half];
            groups[g].scales[half] = scale * (packed & 15);
            groups[g].mins[half] = -(min * (packed >> 4));
        }
    }
}

void q3_k(const uint8_t* block, Group* groups) {
    const uint8_t* const scales = block + 96;
    for (int g = 0; g < 8; ++g) {
        scale_all(groups[g], 0.0f);
        take_pairs_of_bits(block + 32, g, groups[g].numbers);
        for (int i = 0; i < kGroup; ++i) groups[g].numbers[i] |= (block[i] >> g & 1) << 2;
        for (int half = 0; half < 2; ++half) {
            const int s = 2 * g + half;
            const int low = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
            const int high = scales[8 + s % 4] >> s / 4 * 2 & 3;
            groups[g].scales[half] = half_at(block + 108) * ((low | high << 4) - 32);
        }
    }
}

void take_iq(const uint8_t* nibbles, uint8_t* numbers) {
    take_nibbles(nibbles, numbers);
    for (int i = 0; i < kGroup; ++i) numbers[i] = kIqNumbers[numbers[i]];
}

void iq4_nl(const uint8_t* block, Group* groups) {
    scale_all(*groups, half_at(block));
    take_iq(block + 2, groups->numbers);
}

void iq4_xs(const uint8_t* block, Group* groups) {
    for (int g = 0; g < 8; ++g) {
        const int low = block[4 + g / 2] >> g % 2 * 4 & 15;
        const int high = block[2 + g / 4] >> g % 4 * 2 & 3;
        scale_all(groups[g], half_at(block) * ((low | high << 4) - 32));
        take_iq(block + 8 + 16 * g, groups[g].numbers);
    }
}

// Unpacks ternary numbers, 0 to 2. A byte b has five of them: number n is the integer part of
// 3 b 3^n / 256, modulo 3.
void tq1_0(const uint8_t* block, Group* groups) {
    constexpr int kPowers[] = {1, 3, 9, 27, 81};
    int at = 0;
    const auto take = [&](int first, int num_bytes, int num_each) {
        for (int n = 0; n < num_each; ++n)
            for (int i = 0; i < num_bytes; ++i, ++at) {
                const auto rest = static_cast<uint8_t>(block[first + i] * kPowers[n]);
                groups[at / kGroup].numbers[at % kGroup] = rest * 3 >> 8;
            }
    };
    take(0, 32, 5);
    take(32, 16, 5);
    take(48, 4, 4);
    for (int g = 0; g < 8; ++g) scale_all(groups[g], half_at(block + 52));
}

void tq2_0(const uint8_t* block, Group* groups) {
    for (int g = 0; g < 8; ++g) {
        scale_all(groups[g], half_at(block + 64));
        take_pairs_of_bits(block, g, groups[g].numbers);
    }
}

template <int kGroups>
void zeroed(const uint8_t* block, Group* groups) {
    for (int g = 0; g < kGroups; ++g) {
        scale_all(groups[g], half_at(block));
        groups[g].zero = block[2];
        take_nibbles(block + 3 + g * kGroup / 2, groups[g].numbers);
    }
}

constexpr BlockType kTypes[] = {
    {2, Q4_0, 32, 18, 8, q4_0},     {3, Q4_1, 32, 20, 0, q4_1},     {6, Q5_0, 32, 22, 16, q5_0},
    {7, Q5_1, 32, 24, 0, q5_1},     {8, Q8_0, 32, 34, 128, q8_0},   {12, Q4_1, 256, 144, 0, q4_k},
    {13, Q5_1, 256, 176, 0, q5_k},  {14, Q6, 256, 210, 32, q6_k},   {39, MXFP4, 32, 17, 12, mxfp4},
    {10, Q2_K, 256, 84, 0, q2_k},   {11, Q3_K, 256, 110, 4, q3_k},
    {20, IQ4, 32, 18, 128, iq4_nl}, {23, IQ4, 256, 136, 128, iq4_xs},
    {34, TERNARY, 256, 54, 1, tq1_0}, {35, TERNARY, 256, 66, 1, tq2_0},
    {kZeroedBy32, Q4_Z32, 32, 19, 0, zeroed<1>},
    {kZeroedBy64, Q4_Z64, 64, 35, 0, zeroed<2>},
};

}  // namespace

const BlockType* block_type(int32_t type) {
    for (const BlockType& each : kTypes)
        if (each.type == type) return &each;
    return nullptr;
}

float widen_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t rest = half & 0x7fff;
    uint32_t bits = rest << 13;
    if (rest >= 0x7c00) {
        bits |= 0x7f800000;
    } else if (rest >= 0x400) {
        bits += 112u << 23;
    } else {
        const float tiny = static_cast<float>(rest) * 0x1p-24f;
        std::memcpy(&bits, &tiny, sizeof bits);
    }
    bits |= sign;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

uint16_t narrow_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to more than 65504
    if (bits < 0x38800000) {                       // below 2^-14: a multiple of 2^-24
        float size;
        std::memcpy(&size, &bits, sizeof size);
        return sign | static_cast<uint16_t>(std::lrint(size * 0x1p24f));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | static_cast<uint16_t>((bits >> 13) - (112u << 10));
}

}  // namespace tandem
