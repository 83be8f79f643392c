// Vector types and functions for one instruction set. The file that includes this header defines
// the width of a vector (TANDEM_LANES floats) and the namespace (TANDEM_ISA).

namespace tandem::TANDEM_ISA {

constexpr int kLanes = TANDEM_LANES;
constexpr int kPanel = 16;                  // outputs in a panel
constexpr int kVectors = kPanel / kLanes;   // vectors in a panel

typedef float Floats __attribute__((vector_size(TANDEM_LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(TANDEM_LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(TANDEM_LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(TANDEM_LANES * 2)));
typedef int8_t Bytes __attribute__((vector_size(TANDEM_LANES)));

struct Bf16 {
    uint16_t bits;
};

// Returns the elements of two vectors that the numbers I choose. Those of `b` are numbered after those
// of `a`.
template <int... I, class V>
inline __attribute__((always_inline)) V shuffled(V a, V b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, decltype(a < b){I...});
#endif
}

inline Floats load(const float* from) {
    Floats v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// This is an intrinsic, because GCC 12 would otherwise convert the two halves separately.
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

inline Floats to_floats(Ints numbers) { return __builtin_convertvector(numbers, Floats); }

inline Floats of_signed_halves(const uint16_t* from) {
#if TANDEM_LANES == 16
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif TANDEM_LANES == 8
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words), size = words & 0x7fff;
    const Floats tiny = __builtin_convertvector((Ints)size, Floats) * 0x1p-24f;
    const Words normal = (size << 13) + (size < 0x7c00u ? 112u << 23 : 224u << 23);
    return (Floats)((size < 0x400u ? (Words)tiny : normal) | (words & 0x8000) << 16);
#endif
}

struct Fp8 {  // an e4m3 number
    uint8_t bits;
};

// A float16 made from the shifted bits has 1/256 of the value.
inline Floats load(const Fp8* from) {
    typedef uint8_t Some __attribute__((vector_size(TANDEM_LANES)));
    Some bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const Halves wide = __builtin_convertvector(bytes, Halves);
    const Halves halves = (wide & 0x7f) << 7 | (wide & 0x80) << 8;
    uint16_t bits[kLanes];
    std::memcpy(bits, &halves, sizeof bits);
    return of_signed_halves(bits) * 256.0f;
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

#if TANDEM_LANES == 8
// The constant is read from memory by inline asm. A compiler would keep it in a register, and a
// product needs all registers for its sums.
alignas(32) constexpr uint32_t kUpper[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                            0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
#endif

// Converts the lower or the upper bf16 of each word to fp32.
inline __attribute__((always_inline)) Floats of_words(Words words, int i) {
    if (i == 0) return (Floats)(words << 16);
#if TANDEM_LANES == 8
    asm("vpand %1, %0, %0" : "+x"(words) : "m"(kUpper));
    return (Floats)words;
#else
    return (Floats)(words & 0xffff0000u);
#endif
}

// Converts words from memory as of_words() does. The words are loaded in each call, because keeping
// them would need another register.
inline __attribute__((always_inline)) Floats load_of_words(const void* from, int i) {
    Words words;
#if TANDEM_LANES == 8
    if (i == 1) {
        typedef uint8_t Memory[sizeof words];
        asm("vmovdqu %1, %0" : "=x"(words) : "m"(*static_cast<const Memory*>(from)));
        return of_words(words, i);
    }
#endif
    std::memcpy(&words, from, sizeof words);
    return of_words(words, i);
}

// Loads vector v of a panel, with its outputs in order. In bf16 panels, outputs n and n + 8 share a
// word (decoder.h), so a vector consists of the lower or of the upper halves of words.
inline Floats lanes(const float* panel, int v) { return load(panel + v * kLanes); }

inline Floats lanes(const int8_t* panel, int v) { return load(panel + v * kLanes); }

inline Floats lanes(const Bf16* panel, int v) {
#if TANDEM_LANES == 16
    (void)v;
    return load(panel);
#else
    constexpr int kWords = kVectors / 2;
    Words words;
    std::memcpy(&words, panel + v % kWords * 2 * kLanes, sizeof words);
    return of_words(words, v / kWords);
#endif
}

// Loads vector v of a panel as lanes() does, but with fewer registers and possibly with the outputs
// in another order.
inline Floats lanes_again(const float* panel, int v) { return load(panel + v * kLanes); }

inline Floats lanes_again(const Bf16* panel, int v) {
#if TANDEM_LANES == 16
    (void)v;
    return load(panel);
#else
    constexpr int kWords = kVectors / 2;
    return load_of_words(panel + v % kWords * 2 * kLanes, v / kWords);
#endif
}

template <class W>
inline Floats in_order(Floats sums) {
    return sums;
}

#if TANDEM_LANES == 16
template <>
inline Floats in_order<Bf16>(Floats sums) {
    return shuffled<0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15>(sums, sums);
}
#endif

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

inline Floats load_some(const float* from, int num) {  // Loads `num` numbers, padded with zeros.
    Floats v = Floats{};
    std::memcpy(&v, from, num * sizeof(float));
    return v;
}

inline float widen(float x) { return x; }

inline float widen(Bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// Rounds floats to bf16: to nearest, ties to even; NaN stays NaN. If the processor has an
// instruction for this, denormal numbers become zeros.
inline Halves narrow(Floats v) {
#ifdef TANDEM_PAIRS
    return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
    const Words bits = (Words)v;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(v == v ? rounded : Words{} + 0x7fc0, Halves);
#endif
}

inline void store_some(float* to, Floats v, int num) { std::memcpy(to, &v, num * sizeof *to); }

inline void store_some(Bf16* to, Floats v, int num) {
    const Halves halves = narrow(v);
    std::memcpy(to, &halves, num * sizeof *to);
}

// Returns a vector in which all elements are x. The vector extension needs an operation of x and a
// vector: compilers remove the subtraction of zero, but not an addition, which would change -0.
inline Floats all(float x) { return x - Floats{}; }
inline Floats all(Floats x) { return x; }

#if TANDEM_LANES >= 8 || defined(TANDEM_NEON)
#define TANDEM_FUSES
#endif

// Returns a * b + c, rounded once. The arguments are vectors, or numbers that stand for vectors of
// equal elements. No compiler fuses other products with sums (-ffp-contract=off), so that all
// compilers compute the same bits. `plain` has no instruction for this, and rounds twice.
template <class A, class B, class C>
inline __attribute__((always_inline)) Floats fused(A a, B b, C c) {
#if TANDEM_LANES == 16
    return (Floats)_mm512_fmadd_ps((__m512)all(a), (__m512)all(b), (__m512)all(c));
#elif TANDEM_LANES == 8
    return (Floats)_mm256_fmadd_ps((__m256)all(a), (__m256)all(b), (__m256)all(c));
#elif defined(TANDEM_NEON)
    return (Floats)vfmaq_f32((float32x4_t)all(c), (float32x4_t)all(a), (float32x4_t)all(b));
#else
    return all(a) * all(b) + all(c);
#endif
}

inline __attribute__((always_inline)) float fused(float a, float b, float c) {
#ifdef TANDEM_FUSES
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// Returns the larger of two numbers, or b if one of them is NaN. GCC 12 often compiles the comparison
// to two instructions instead of this one.
inline Floats max(Floats a, Floats b) {
#if TANDEM_LANES == 8
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// Computes exp with an error of 2 ulp, with the polynomial of the Cephes library. The result is
// exactly 1 for x = 0, and exactly 0 for x below -87.
inline Floats exp(Floats x) {
    const Ints below = x < -87.0f;
    x = max(x, all(-87.0f));
    x = x < 88.0f ? x : all(88.0f);
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Floats shifted = fused(x, 1.44269504088896341f, to_integer);
    const Floats n = shifted - to_integer;
    Floats r = fused(n, -0.693359375f, x);
    r = fused(n, 2.12194440e-4f, r);
    Floats p = fused(r, 1.9875691500e-4f, 1.3981999507e-3f);
    p = fused(p, r, 8.3334519073e-3f);
    p = fused(p, r, 4.1665795894e-2f);
    p = fused(p, r, 1.6666665459e-1f);
    p = fused(p, r, 5.0000001201e-1f);
    p = fused(p, r * r, r + 1.0f);
    const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    const Floats scaled = p * (Floats)exponent;
    return below ? Floats{} : scaled;
}

// Computes 2^x with a relative error of 2e-7, for x below 127. The result is exactly 1 for x = 0,
// exactly 0 below -126.5, and NaN if x is NaN.
inline Floats exp2(Floats x) {
    x = max(all(-127.0f), x);  // an x that is NaN stays NaN
    // Adding this number rounds to an integer, and moves 127 more than this integer to the lowest
    // bits. Shifted, these bits are the power of two.
    const float to_exponent = 12582912.0f + 127.0f;
    const Floats shifted = x + to_exponent;
    const Floats r = x - (shifted - to_exponent);
    Floats p = fused(r, 1.3264727e-3f, 9.671513e-3f);
    p = fused(p, r, 5.5507336e-2f);
    p = fused(p, r, 2.4022242e-1f);
    p = fused(p, r, 6.93147e-1f);
    p = fused(p, r, 1.0f);
    return p * (Floats)((Words)shifted << 23);
}

typedef float Four __attribute__((vector_size(16)));

// Adds 16 partial sums in the same order for every vector width: i and i + 8, then i and i + 4,
// then i and i + 2, and so on.
inline float sum(const Floats (&parts)[kVectors]) {
    Four fours[4];
    std::memcpy(fours, parts, sizeof fours);
    Four four = (fours[0] + fours[2]) + (fours[1] + fours[3]);
    four += shuffled<2, 3, 0, 1>(four, four);
    return four[0] + four[1];
}

inline float largest(const Floats (&parts)[kVectors]) {
    const auto larger = [](Four a, Four b) { return a > b ? a : b; };
    Four fours[4];
    std::memcpy(fours, parts, sizeof fours);
    Four four = larger(larger(fours[0], fours[2]), larger(fours[1], fours[3]));
    four = larger(four, shuffled<2, 3, 0, 1>(four, four));
    return four[0] > four[1] ? four[0] : four[1];
}

}  // namespace tandem::TANDEM_ISA
