// The instructions of AVX-512, AVX512_BF16, VNNI and VBMI that the CPU kernels use, written in C++,
// so that a processor that has only AVX2 can run these kernels. Each macro has the name of an
// intrinsic and its meaning in Intel's Intrinsics Guide, for the arguments with which the kernels
// call it. Approximations, such as rcp14, are exact here.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int16_t Shorts __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(64)));
typedef int8_t Bytes __attribute__((vector_size(64)));
typedef uint8_t Codes __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef uint16_t HalvesOfYmm __attribute__((vector_size(32)));
typedef uint8_t CodesOfYmm __attribute__((vector_size(32)));
typedef int8_t BytesOfXmm __attribute__((vector_size(16)));

template <class To, class From>
inline To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Returns the vector whose element i is of(i).
template <class V, class Of>
inline V each(Of of) {
    V v{};
    for (size_t i = 0; i < sizeof(V) / sizeof(v[0]); ++i) v[i] = of(i);
    return v;
}

// The products of bf16 numbers read and write denormal numbers as zeros.
inline float flushed(float x) {
    const uint32_t bits = as<uint32_t>(x);
    return (bits & 0x7f800000) == 0 ? as<float>(bits & 0x80000000) : x;
}

inline float wide(uint32_t bits) { return flushed(as<float>(bits << 16)); }

// Rounds to nearest, ties to even.
inline uint16_t narrow(float x) {
    const uint32_t bits = as<uint32_t>(flushed(x));
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float multiply_add(float a, float b, float sum) { return flushed(std::fma(a, b, sum)); }

// Adds the products of the lower and of the upper bf16 numbers of two words.
inline float dot(float sum, uint32_t a, uint32_t b) {
    const float upper = multiply_add(wide(a >> 16), wide(b >> 16), flushed(sum));
    return multiply_add(wide(a & 0xffff), wide(b & 0xffff), upper);
}

inline __m512 fused(const __m512& a, const __m512& b, const __m512& c) {
    return as<__m512>(each<Floats>([&](size_t i) { return std::fma(a[i], b[i], c[i]); }));
}

inline __m512 dot_pairs(const __m512& sums, const __m512bh& a, const __m512bh& b) {
    const Words x = as<Words>(a), y = as<Words>(b);
    return as<__m512>(each<Floats>([&](size_t i) { return dot(sums[i], x[i], y[i]); }));
}

inline __m256bh narrow_all(const __m512& v) {
    return as<__m256bh>(each<HalvesOfYmm>([&](size_t i) { return narrow(v[i]); }));
}

inline __m512bh narrow_both(const __m512& upper, const __m512& lower) {
    return as<__m512bh>(
        each<Halves>([&](size_t i) { return narrow(i < 16 ? lower[i] : upper[i - 16]); }));
}

inline __m512i load(const void* from) {
    __m512i v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline void put(void* to, const __m512i& v) { std::memcpy(to, &v, sizeof v); }

// Loads the elements of `bytes` bytes whose bit of the mask is set. The others are zero.
inline __m512i load_some(uint64_t mask, size_t bytes, const void* from) {
    uint8_t some[64] = {};
    for (size_t i = 0; i < 64 / bytes; ++i)
        if (mask >> i & 1)
            std::memcpy(some + i * bytes, static_cast<const uint8_t*>(from) + i * bytes, bytes);
    return load(some);
}

template <class V>
inline __m512i unpack(const __m512i& a, const __m512i& b, bool is_upper) {
    const V x = as<V>(a), y = as<V>(b);
    constexpr size_t of_lane = 16 / sizeof(x[0]);
    return as<__m512i>(each<V>([&](size_t i) {
        const size_t from = i / of_lane * of_lane + is_upper * of_lane / 2 + i % of_lane / 2;
        return i % 2 ? y[from] : x[from];
    }));
}

inline __m512i shuffle_lanes(const __m512i& a, const __m512i& b, int order) {
    return as<__m512i>(each<Longs>([&](size_t i) {
        const size_t lane = order >> i / 2 * 2 & 3;
        return (i < 4 ? a : b)[lane * 2 + i % 2];
    }));
}

inline __m512i shuffle_bytes(const __m512i& v, const __m512i& order) {
    const Codes from = as<Codes>(v), at = as<Codes>(order);
    return as<__m512i>(each<Codes>(
        [&](size_t i) { return at[i] & 0x80 ? uint8_t{0} : from[i / 16 * 16 + (at[i] & 15)]; }));
}

inline __m512i look_up(const __m512i& low, const __m512i& order, const __m512i& high) {
    const Codes x = as<Codes>(low), y = as<Codes>(high), at = as<Codes>(order);
    return as<__m512i>(
        each<Codes>([&](size_t i) { return at[i] & 64 ? y[at[i] & 63] : x[at[i] & 63]; }));
}

inline __m512i reorder_longs(const __m512i& order, const __m512i& v) {
    return as<__m512i>(each<Longs>([&](size_t i) { return v[order[i] & 7]; }));
}

inline __m512i add_pairs(const __m512i& a, const __m512i& b) {
    const Shorts x = as<Shorts>(a), y = as<Shorts>(b);
    return as<__m512i>(each<Ints>(
        [&](size_t i) { return x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1]; }));
}

inline __m512i dot_bytes(const __m512i& sums, const __m512i& a, const __m512i& b) {
    const Codes x = as<Codes>(a);
    const Bytes y = as<Bytes>(b);
    Ints v = as<Ints>(sums);
    for (int i = 0; i < 64; ++i) v[i / 4] += x[i] * y[i];
    return as<__m512i>(v);
}

inline __m512 of_halves(const __m256i& halves) {
    const __m256 parts[] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                            _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
    return as<__m512>(parts);
}

// x * 2^floor(exponent)
inline float scaled(float x, float exponent) {
    const float whole = std::floor(exponent);
    if (whole != whole) return whole;
    return std::ldexp(x, static_cast<int>(whole < -400 ? -400 : whole > 400 ? 400 : whole));
}

inline __m512 scaled_all(const __m512& v, const __m512& exponents) {
    return as<__m512>(each<Floats>([&](size_t i) { return scaled(v[i], exponents[i]); }));
}

// x - floor(x)
inline __m512 fractions(const __m512& v) {
    return as<__m512>(each<Floats>(
        [&](size_t i) { return std::isinf(v[i]) ? 0.0f : v[i] - std::floor(v[i]); }));
}

inline __m512 rounded(const __m512& v) {
    return as<__m512>(each<Floats>([&](size_t i) { return std::nearbyint(v[i]); }));
}

inline __m512 larger(const __m512& a, const __m512& b) {
    return as<__m512>(each<Floats>([&](size_t i) { return a[i] > b[i] ? a[i] : b[i]; }));
}

inline __m512 blend(uint32_t mask, const __m512& a, const __m512& b) {
    return as<__m512>(each<Floats>([&](size_t i) { return mask >> i & 1 ? b[i] : a[i]; }));
}

inline uint16_t compare(const __m512& a, const __m512& b, int how) {
    uint16_t mask = 0;
    for (int i = 0; i < 16; ++i) mask |= (how == _CMP_GT_OQ ? a[i] > b[i] : a[i] == b[i]) << i;
    return mask;
}

inline int32_t sum_of(const __m512i& v) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += as<Ints>(v)[i];
    return sum;
}

inline int32_t largest_of(const __m512i& v) {
    int32_t most = as<Ints>(v)[0];
    for (int i = 1; i < 16; ++i) most = std::max<int32_t>(most, as<Ints>(v)[i]);
    return most;
}

template <class V>
inline __m512i all(int number) {
    return as<__m512i>(each<V>([&](size_t) { return static_cast<decltype(V{}[0] + 0)>(number); }));
}

inline __m256i mask_halves(uint16_t mask, const __m256i& v) {
    const HalvesOfYmm from = as<HalvesOfYmm>(v);
    return as<__m256i>(
        each<HalvesOfYmm>([&](size_t i) { return mask >> i & 1 ? from[i] : uint16_t{0}; }));
}

inline __m128i lower_bytes(const __m256i& v) {
    const HalvesOfYmm from = as<HalvesOfYmm>(v);
    return as<__m128i>(each<BytesOfXmm>([&](size_t i) { return static_cast<int8_t>(from[i]); }));
}

inline __m512i widened_bytes(const __m128i& v) {
    const BytesOfXmm from = as<BytesOfXmm>(v);
    return as<__m512i>(each<Ints>([&](size_t i) { return int32_t{from[i]}; }));
}

inline __m512i widened_halves(const __m256i& v) {
    const HalvesOfYmm from = as<HalvesOfYmm>(v);
    return as<__m512i>(each<Words>([&](size_t i) { return uint32_t{from[i]}; }));
}

inline __m512i widened_codes(const __m256i& v) {
    const CodesOfYmm from = as<CodesOfYmm>(v);
    return as<__m512i>(each<Halves>([&](size_t i) { return uint16_t{from[i]}; }));
}

inline __m512i four_times(const __m128i& v) {
    const __m128i parts[] = {v, v, v, v};
    return as<__m512i>(parts);
}

}  // namespace emulated

#define _mm512_loadu_si512(from) emulated::load(from)
#define _mm512_storeu_si512(to, v) emulated::put(to, v)
#define _mm512_maskz_loadu_epi32(mask, from) emulated::load_some(mask, 4, from)
#define _mm512_maskz_loadu_epi8(mask, from) emulated::load_some(mask, 1, from)
#define _mm512_setzero_si512() (__m512i{})
#define _mm512_set1_epi8(n) emulated::all<emulated::Bytes>(n)
#define _mm512_set1_epi16(n) emulated::all<emulated::Shorts>(n)
#define _mm512_set1_epi32(n) emulated::all<emulated::Ints>(n)
#define _mm512_set1_ps(x) emulated::as<__m512>(emulated::Floats{} + (x))
#define _mm512_setr_epi64(...) (__m512i{__VA_ARGS__})
#define _mm512_set_epi32(p, o, n, m, l, k, j, i, h, g, f, e, d, c, b, a) \
    emulated::as<__m512i>(emulated::Ints{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p})
#define _mm512_castsi512_si256(v) \
    (__m256i{emulated::as<__m512i>(v)[0], (v)[1], (v)[2], (v)[3]})
#define _mm512_extracti64x4_epi64(v, half) (__m256i{(v)[4], (v)[5], (v)[6], (v)[7]})
#define _mm512_broadcast_i32x4(v) emulated::four_times(v)
#define _mm512_and_si512(a, b) ((a) & (b))
#define _mm512_ternarylogic_epi32(a, b, c, table) ((a) | ((b) & (c)))  // table 0xf8
#define _mm512_slli_epi16(v, n) \
    emulated::as<__m512i>(emulated::Halves(emulated::as<emulated::Halves>(v) << (n)))
#define _mm512_srli_epi16(v, n) \
    emulated::as<__m512i>(emulated::Halves(emulated::as<emulated::Halves>(v) >> (n)))
#define _mm512_srai_epi16(v, n) \
    emulated::as<__m512i>(emulated::Shorts(emulated::as<emulated::Shorts>(v) >> (n)))
#define _mm512_slli_epi32(v, n) emulated::as<__m512i>(emulated::as<emulated::Words>(v) << (n))
#define _mm512_srli_epi32(v, n) emulated::as<__m512i>(emulated::as<emulated::Words>(v) >> (n))
#define _mm512_unpacklo_epi8(a, b) emulated::unpack<emulated::Bytes>(a, b, false)
#define _mm512_unpackhi_epi8(a, b) emulated::unpack<emulated::Bytes>(a, b, true)
#define _mm512_unpacklo_epi16(a, b) emulated::unpack<emulated::Shorts>(a, b, false)
#define _mm512_unpackhi_epi16(a, b) emulated::unpack<emulated::Shorts>(a, b, true)
#define _mm512_unpacklo_epi32(a, b) emulated::unpack<emulated::Ints>(a, b, false)
#define _mm512_unpackhi_epi32(a, b) emulated::unpack<emulated::Ints>(a, b, true)
#define _mm512_unpacklo_epi64(a, b) emulated::unpack<emulated::Longs>(a, b, false)
#define _mm512_unpackhi_epi64(a, b) emulated::unpack<emulated::Longs>(a, b, true)
#define _mm512_shuffle_i32x4(a, b, order) emulated::shuffle_lanes(a, b, order)
#define _mm512_shuffle_epi8(v, order) emulated::shuffle_bytes(v, order)
#define _mm512_permutex2var_epi8(low, order, high) emulated::look_up(low, order, high)
#define _mm512_permutexvar_epi64(order, v) emulated::reorder_longs(order, v)
#define _mm512_madd_epi16(a, b) emulated::add_pairs(a, b)
#define _mm512_dpbusd_epi32(sums, a, b) emulated::dot_bytes(sums, a, b)
#define _mm512_reduce_add_epi32(v) emulated::sum_of(v)
#define _mm512_reduce_max_epi32(v) emulated::largest_of(v)
#define _mm512_cvtepi8_epi32(v) emulated::widened_bytes(v)
#define _mm512_cvtepu16_epi32(v) emulated::widened_halves(v)
#define _mm512_cvtepu8_epi16(v) emulated::widened_codes(v)
#define _mm512_cvtepi32_ps(v) \
    emulated::as<__m512>(        \
        __builtin_convertvector(emulated::as<emulated::Ints>(v), emulated::Floats))
#define _mm512_cvtph_ps(v) emulated::of_halves(v)
#define _mm512_dpbf16_ps(sums, a, b) emulated::dot_pairs(sums, a, b)
#define _mm512_cvtneps_pbh(v) emulated::narrow_all(v)
#define _mm512_cvtne2ps_pbh(upper, lower) emulated::narrow_both(upper, lower)
#define _mm512_mul_ps(a, b) ((a) * (b))
#define _mm512_max_ps(a, b) emulated::larger(a, b)
#define _mm512_fmadd_ps(a, b, c) emulated::fused(a, b, c)
#define _mm512_mask_blend_ps(mask, a, b) emulated::blend(mask, a, b)
#define _mm512_cmp_ps_mask(a, b, how) emulated::compare(a, b, how)
#define _mm512_scalef_ps(v, exponents) emulated::scaled_all(v, exponents)
#define _mm512_reduce_ps(v, how) emulated::fractions(v)  // how 9
#define _mm512_roundscale_ps(v, how) emulated::rounded(v)
#define _mm512_rcp14_ps(v) (1.0f / (v))
#define _mm256_maskz_mov_epi16(mask, v) emulated::mask_halves(mask, v)
#define _mm256_cvtepi16_epi8(v) emulated::lower_bytes(v)
