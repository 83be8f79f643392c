// Vectors of the instruction set that this is compiled for. The including file says how wide
// (TANDEM_LANES floats) and in which namespace (TANDEM_ISA).

namespace tandem::TANDEM_ISA {

constexpr int kLanes = TANDEM_LANES;
constexpr int kPanel = 16;                  // outputs side by side
constexpr int kVectors = kPanel / kLanes;   // that a panel is

typedef float Floats __attribute__((vector_size(TANDEM_LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(TANDEM_LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(TANDEM_LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(TANDEM_LANES * 2)));
typedef int8_t Bytes __attribute__((vector_size(TANDEM_LANES)));

struct Bf16 {
    uint16_t bits;
};

inline Floats load(const float* from) {
    Floats v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// GCC 12 widens in two halves what is one instruction.
inline Floats load(const Bf16* from) {
#if TANDEM_LANES == 16
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#elif TANDEM_LANES == 8
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    return (Floats)words;
#endif
}

inline Floats load(const int8_t* from) {
#if TANDEM_LANES == 16
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif TANDEM_LANES == 8
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

inline float widen(float x) { return x; }

inline float widen(Bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void narrow(float x, float& to) { to = x; }

inline void narrow(float x, Bf16& to) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to.bits = std::isnan(x) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// Less zero, which compilers drop; plus zero they keep, for it would make -0 positive.
inline Floats all(float x) { return x - Floats{}; }

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// exp to 2 ulp; exactly 1 at 0 and exactly 0 below -87. Cephes' polynomial.
inline Floats exp(Floats x) {
    const Ints below = x < -87.0f;
    x = max(x, all(-87.0f));
    x = x < 88.0f ? x : all(88.0f);
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    const Floats shifted = x * 1.44269504088896341f + to_integer;
    const Floats n = shifted - to_integer;
    Floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    const Floats scaled = p * (Floats)exponent;
    return below ? Floats{} : scaled;
}

// Sums of 16 partial sums, always in one order, whatever the width.
inline float sum(const Floats (&parts)[kVectors]) {
    float lanes[kPanel];
    std::memcpy(lanes, parts, sizeof lanes);
    for (int width = kPanel / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

inline float largest(const Floats (&parts)[kVectors]) {
    float lanes[kPanel];
    std::memcpy(lanes, parts, sizeof lanes);
    for (int width = kPanel / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i)
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

}  // namespace tandem::TANDEM_ISA
