// Quantization of int8 KV, bit-identical to kv_int8.py.

namespace tandem::TANDEM_ISA {

// Converts float16 to fp32, including denormal numbers.
inline Floats of_halves(const uint16_t* from) {
#if TANDEM_LANES == 16
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words bits = __builtin_convertvector(halves, Words);
    const Words words = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
    const Floats normal = (Floats)((words << 13) + (112u << 23));
    const Floats tiny = __builtin_convertvector((Ints)words, Floats) * 0x1p-24f;
    const Floats finite = words < 0x400u ? tiny : normal;
    const Floats magnitude = words < 0x7c00u ? finite : all(NAN);
    return (Floats)((Words)magnitude | sign);
#endif
}

// Rounds x, which is from 0 to 65504, up to float16.
inline uint16_t half_not_below(float x) {
    if (x < 0x1p-14f) return static_cast<uint16_t>(std::ceil(x * 0x1p24f));
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>(((bits + 0x1fff) >> 13) - (112u << 10));
}

// Returns the bits of the largest |x| in a row of `dim` numbers (a multiple of 16). As integers,
// the bits of NaN are larger than all others.
inline int32_t largest_bits(const float* row, int dim) {
    Ints bits = {};
    for (int i = 0; i < dim; i += kLanes) {
        const Ints each = (Ints)load(row + i) & 0x7fffffff;
        bits = bits > each ? bits : each;
    }
    int32_t most = 0;
    for (int lane = 0; lane < kLanes; ++lane) most = most > bits[lane] ? most : bits[lane];
    return most;
}

// Divides, rounds to the nearest integer, and clamps to `lowest` .. `highest`.
inline Ints rounded(Floats x, Floats divisor, Floats lowest, Floats highest) {
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
      // Division and addition round separately, as in torch, because compilers cannot fuse them.
    x = x / divisor;
    x = x > highest ? highest : x;
    x = x < lowest ? lowest : x;
    return __builtin_convertvector((x + to_integer) - to_integer, Ints);
}

// Returns the scale largest / steps, rounded up to float16. `largest_bits` has the bits of the
// largest |x|, which must be finite.
inline uint16_t scale_of_steps(int32_t largest_bits, float steps) {
    constexpr float kScaleMax = 65504.0f;
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof largest);
    const float wanted = largest / steps;
    return half_not_below(wanted < kScaleMax ? wanted : kScaleMax);
}

inline Floats all_of_half(uint16_t half) {
    alignas(64) const uint16_t halves[kLanes] = {half};
    return all(of_halves(halves)[0]);
}

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr uint16_t kHalfNan = 0x7e00;

// Quantizes a row of `dim` numbers (a multiple of 16) and returns the row's scale.
inline uint16_t quantize(const float* row, int dim, int8_t* to) {
    const int32_t most = largest_bits(row, dim);
    if (most == 0 || most >= kInfinityBits) {
        std::memset(to, 0, static_cast<unsigned>(dim));
        return most == 0 ? 0 : kHalfNan;
    }
    const uint16_t scale = scale_of_steps(most, 127.0f);
    const Floats divisor = all_of_half(scale);
    for (int i = 0; i < dim; i += kLanes) {
        const Ints numbers = rounded(load(row + i), divisor, all(-127.0f), all(127.0f));
        const Bytes bytes = __builtin_convertvector(numbers, Bytes);
        std::memcpy(to + i, &bytes, sizeof bytes);
    }
    return scale;
}

}  // namespace tandem::TANDEM_ISA
