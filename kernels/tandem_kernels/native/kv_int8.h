// Int8 KV: the arithmetic of kv_int8.py, to the bit.
//
// A part of the pool (a layer of a head in a block) is K [tokens][dim], V [tokens][dim], then the
// scales of K [tokens] and of V [tokens] in float16.

namespace tandem::TANDEM_ISA {

// Of numbers that are not negative; denormal ones, too.
inline Floats of_halves(const uint16_t* from) {
#if TANDEM_LANES == 16
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words);
    const Floats normal = (Floats)((words << 13) + (112u << 23));
    const Floats tiny = __builtin_convertvector((Ints)words, Floats) * 0x1p-24f;
    const Floats finite = words < 0x400u ? tiny : normal;
    return words < 0x7c00u ? finite : all(NAN);
#endif
}

// The next float16 that is not below x, of 0 to 65504.
inline uint16_t half_not_below(float x) {
    if (x < 0x1p-14f) return static_cast<uint16_t>(std::ceil(x * 0x1p24f));
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>(((bits + 0x1fff) >> 13) - (112u << 10));
}

// Stores a row of `dim` numbers, a multiple of 16, and answers its scale.
inline uint16_t quantize(const float* row, int dim, int8_t* to) {
    constexpr float kScaleMax = 65504.0f;
    Ints bits = {};  // of the largest absolute value: as integers, NaN is larger than all others
    for (int i = 0; i < dim; i += kLanes) {
        const Ints each = (Ints)load(row + i) & 0x7fffffff;
        bits = bits > each ? bits : each;
    }
    int32_t most = 0;
    for (int lane = 0; lane < kLanes; ++lane) most = most > bits[lane] ? most : bits[lane];
    if (most == 0 || most >= 0x7f800000) {
        std::memset(to, 0, dim);
        return most == 0 ? 0 : 0x7e00;
    }
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    const float wanted = largest / 127.0f;
    alignas(64) uint16_t scale[kLanes] = {half_not_below(wanted < kScaleMax ? wanted : kScaleMax)};
    const Floats divisor = all(of_halves(scale)[0]);
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    for (int i = 0; i < dim; i += kLanes) {
        // No compiler joins a division with an addition: both round, as torch's do.
        Floats x = load(row + i) / divisor;
        x = x > 127.0f ? all(127.0f) : x;
        x = x < -127.0f ? all(-127.0f) : x;
        const Ints numbers = __builtin_convertvector((x + to_integer) - to_integer, Ints);
        const Bytes bytes = __builtin_convertvector(numbers, Bytes);
        std::memcpy(to + i, &bytes, sizeof bytes);
    }
    return scale[0];
}

}  // namespace tandem::TANDEM_ISA
