// Products with group-quantized weights (quantized.h), by integer dot products.
//
// A group has 32 inputs. The inputs of a row are first quantized to int8, with one scale for each
// half of a group. Then, for each output:
//
// 1. The integer dot product of a half, which is exact, is multiplied by the inputs' scale.
// 2. The halves of a group are added, and the sum is multiplied by the scale of the weights.
// 3. The groups are added in fp32, in order.
//
// The bits of a row therefore depend on that row only, and are equal on all processors with fused
// multiply-add.

namespace tandem::TANDEM_ISA {

// Largest number of rows in a tile.
constexpr int kQuantizedRows = TANDEM_LANES == 16 ? 9 : TANDEM_LANES == 8 ? 3 : 2;
constexpr int kTileBytesAtOnce = 256 << 10;  // bytes of quantized inputs that fit in the L2 cache
constexpr int kStreamedRows = 3;  // largest number of rows for which the weights are streamed
constexpr int kBytesAhead = 1152;            // prefetch distance with AVX2

using QuantizedTiles = RowTiles<kQuantizedRows>;

// Adds the dot product of four inputs of a row and four weights of each output. AVX2 has no such
// instruction; see dot_half.
#if TANDEM_LANES == 8
#elif TANDEM_LANES == 16 && defined(TANDEM_VNNI)
inline __attribute__((always_inline)) Ints dot4(Ints sums, Ints weights, int32_t inputs) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(inputs));
}
#elif TANDEM_LANES == 16
inline __attribute__((always_inline)) Ints dot4(Ints sums, Ints weights, int32_t inputs) {
    const __m512i both = _mm512_set1_epi32(inputs);
    const __m512i even = _mm512_madd_epi16((__m512i)(weights & 0x00ff00ff),
                                           _mm512_srai_epi16(_mm512_slli_epi16(both, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)weights, 8),
                                          _mm512_srai_epi16(both, 8));
    return sums + (Ints)even + (Ints)odd;
}
#else
inline Ints dot4(Ints sums, Ints weights, int32_t inputs) {
    for (int i = 0; i < 4; ++i)
        sums += (weights >> 8 * i & 255) * static_cast<int8_t>(inputs >> 8 * i);
    return sums;
}
#endif

// The quantized inputs of a row for one unit of 64 inputs. In memory they are in the order
// [tile][unit][row of the tile].
struct InputUnit {
    int8_t numbers[kUnitInputs];
#if TANDEM_LANES == 8
    int32_t offsets[kUnitInputs / kHalf];  // for 8-bit weights; see dot_half
#endif
    float scales[kUnitInputs / kHalf];
    // For each scale of weights in the unit: the sum of the inputs that this scale concerns. Zero
    // points and minimums are applied with these sums, because sum(x (w - zero)) is
    // sum(x w) - zero sum(x). If the zero point is constant, the sums are already multiplied by
    // -zero; if the weights have zero points, by -1.
    float sums[kUnitInputs / kHalf];
};

inline size_t quantized_input_floats(size_t num_rows, int in) {
    return num_rows * num_units(in) * (sizeof(InputUnit) / sizeof(float));
}

inline int32_t sum_of(Ints numbers) {
#if TANDEM_LANES == 16
    return _mm512_reduce_add_epi32((__m512i)numbers);
#else
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += numbers[i];
    return sum;
#endif
}

inline int32_t largest_of(Ints numbers) {
#if TANDEM_LANES == 16
    return _mm512_reduce_max_epi32((__m512i)numbers);
#else
    int32_t most = numbers[0];
    for (int i = 1; i < kLanes; ++i) most = most > numbers[i] ? most : numbers[i];
    return most;
#endif
}

struct Rounded {
    float scale;  // NaN if an input is not finite
    float sum;    // sum of the numbers
};

// Quantizes half a group of inputs to -127 .. 127.
inline Rounded round_half(const float* x, int8_t* numbers) {
    Ints most_bits = {};  // As integers, the bits of NaN are larger than all others.
    for (int i = 0; i < kHalf; i += kLanes) {
        const Ints bits = (Ints)load(x + i) & 0x7fffffff;
        most_bits = most_bits > bits ? most_bits : bits;
    }
    const int32_t most = largest_of(most_bits);
    if (most < 0x00800000 || most >= 0x7f800000) {  // Denormal numbers become zeros.
        std::memset(numbers, 0, kHalf);
        return {most < 0x00800000 ? 0.0f : NAN, 0.0f};
    }
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    const float scale = largest / 127.0f;
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    Ints sums = {};
    for (int i = 0; i < kHalf; i += kLanes) {
        // Compilers cannot fuse a division with an addition.
        const Floats shifted = load(x + i) / all(scale) + to_integer;
        const Ints rounded = __builtin_convertvector(shifted - to_integer, Ints);
        sums += rounded;
        const Bytes bytes = __builtin_convertvector(rounded, Bytes);
        std::memcpy(numbers + i, &bytes, sizeof bytes);
    }
    return {scale, static_cast<float>(sum_of(sums))};
}

// Quantizes a row for weights of one format. `order` is the order of the inputs in the weights;
// null: the normal order.
template <class F>
void round_row(const float* x, const int32_t* order, int in, InputUnit* to, int rows_of_tile) {
    constexpr float kFactor = F::kHasMins ? 1.0f : F::kHasZeros ? -1.0f : -F::kZero;
    for (int unit = 0; unit < num_units(in); ++unit, to += rows_of_tile)
        for (int g = 0; g < 2; ++g) {
            Rounded halves[2] = {};
            const int at = unit * kUnitInputs + g * kGroup;
            int8_t* const numbers = to->numbers + g * kGroup;
            if (at < in) {
                const float* group = x + at;
                float ordered[kGroup];
                if (order != nullptr) {
                    for (int i = 0; i < kGroup; ++i) ordered[i] = x[order[at + i]];
                    group = ordered;
                }
                for (int h = 0; h < 2; ++h)
                    halves[h] = round_half(group + h * kHalf, numbers + h * kHalf);
            } else {
                std::memset(numbers, 0, kGroup);
            }
            const auto [first, second] = halves;
#if TANDEM_LANES == 8
            to->offsets[2 * g] = F::kZero * static_cast<int32_t>(first.sum);
            to->offsets[2 * g + 1] = F::kZero * static_cast<int32_t>(second.sum);
#endif
            to->scales[2 * g] = first.scale;
            to->scales[2 * g + 1] = second.scale;
            if (F::kNumScales == 4) {
                to->sums[2 * g] = kFactor * (first.scale * first.sum);
                to->sums[2 * g + 1] = kFactor * (second.scale * second.sum);
                continue;
            }
            // Compilers differ in which product they fuse with the sum, so this FMA is explicit.
            const float sum = std::fma(first.scale, first.sum, second.scale * second.sum);
            if (F::kNumScales == 2)
                to->sums[g] = kFactor * sum;
            else  // Multiplication by -1 is exact in any order.
                to->sums[0] = g == 0 ? kFactor * sum : to->sums[0] + kFactor * sum;
        }
}

// Quantizes the rows of a product. All threads call this function, and must wait for each other
// afterwards.
inline void round_inputs(const Matrix& matrix, const Inputs& inputs, const Team& team) {
    const QuantizedTiles tiles{inputs.num_rows};
    const int first = static_cast<int64_t>(inputs.num_rows) * team.thread / team.threads;
    const int end = static_cast<int64_t>(inputs.num_rows) * (team.thread + 1) / team.threads;
    InputUnit* units = reinterpret_cast<InputUnit*>(inputs.rounded);
    by_format(matrix.kind, [&](auto format) {
        for (int row = first; row < end; ++row) {
            const int tile = tiles.of(row), of_tile = tiles.first_row(tile);
            round_row<decltype(format)>(
                inputs.buffer + static_cast<size_t>(row) * inputs.in, matrix.order, inputs.in,
                units + static_cast<size_t>(of_tile) * num_units(inputs.in) + row - of_tile,
                tiles.first_row(tile + 1) - of_tile);
        }
    });
}

// Converts codes to numbers of a table.
inline __attribute__((always_inline)) Ints numbers_of_codes(Ints codes,
                                                            const uint8_t (&table)[16]) {
#if TANDEM_LANES == 16
    const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), (__m512i)codes);
#elif TANDEM_LANES == 8
    const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), (__m256i)codes);
#else
    uint8_t bytes[sizeof(Ints)];
    std::memcpy(bytes, &codes, sizeof bytes);
    for (uint8_t& byte : bytes) byte = table[byte];
    std::memcpy(&codes, bytes, sizeof bytes);
    return codes;
#endif
}

// Loads the scales of some outputs.
template <class F>
inline __attribute__((always_inline)) Floats scales_of(const char* from, int v) {
    if constexpr (F::kHasPowers) return load(reinterpret_cast<const Bf16*>(from) + v * kLanes);
    return of_signed_halves(reinterpret_cast<const uint16_t*>(from) + v * kLanes);
}

// Loads the stored numbers of 4 inputs, those of vector `at` of a group, for some outputs.
template <class F>
inline __attribute__((always_inline)) Ints numbers_of(const char* unit, int group, int at, int v) {
    const auto load_ints = [v](const char* from) __attribute__((always_inline)) {
        Ints ints;
        std::memcpy(&ints, from + v * sizeof ints, sizeof ints);
        return ints;
    };
    const char* low = unit + group * F::kLowBytes;
    if constexpr (F::kBits == 8) return load_ints(low + at * kVectorBytes);
    constexpr int kLow = F::kLowBits;
    Ints numbers = load_ints(low + at % kLow * kVectorBytes);
    if (at >= kLow) numbers = (Ints)((Words)numbers >> at / kLow * kLow);
    numbers &= static_cast<int32_t>(0x01010101u * ((1 << kLow) - 1));
    if constexpr (F::kHasPowers) return numbers_of_codes(numbers, kMxNumbers);
    if constexpr (F::kHasCodes) return numbers_of_codes(numbers, kIqNumbers);
    const char* high = unit + F::kHigh + group * F::kHighBytes;
    if constexpr (F::kHighBits == 1) {
        const Words bits = (Words)load_ints(high);
        numbers |= (Ints)(at < kLow ? bits << (kLow - at) : bits >> (at - kLow)) &
                   (0x01010101 << kLow);
    }
    if constexpr (F::kHighBits == 2) {
        const Words bits = (Words)load_ints(high + at / 4 * kVectorBytes);
        const int shift = 4 - at % 4 * 2;
        numbers |= (Ints)(shift > 0 ? bits << shift : bits >> -shift) & 0x30303030;
    }
    return numbers;
}

inline int32_t load_int(const void* from) {
    int32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
}

// Computes the dot products of half a group for MR rows and NV vectors of outputs of a panel, from
// vector v on.
template <class F, int MR, int NV>
inline __attribute__((always_inline)) void dot_half(const InputUnit* x, const char* unit, int half,
                                                    int v, Ints (&sums)[NV][MR]) {
#if TANDEM_LANES == 8
    // AVX2 adds two products of bytes in 16 bits, where at most 32,767 fits. With weights of up to
    // 5 bits, 8 products fit (31 * 127 * 8 = 31,496), and with 6 bits 4 products. With 8 bits, two
    // products fit only if the zero point 128 is subtracted before (128 * 127 * 2 = 32,512). The
    // instruction needs unsigned weights, so the sign of a weight is moved to the input. `offsets`
    // corrects for the subtraction.
    constexpr int kAtOnce = F::kIsWide ? 1 : F::kBits == 6 ? 2 : 4;
    __m256i words[NV][MR];
#endif
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n)
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            sums[n][m] = Ints{};
#if TANDEM_LANES == 8
            if constexpr (F::kIsWide) sums[n][m] += x[m].offsets[half];
#endif
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const int at = half * kHalf + 4 * i;
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) {
            const Ints weights = numbers_of<F>(unit, half / 2, half % 2 * 4 + i, v + n);
#if TANDEM_LANES == 8
            __m256i sizes = (__m256i)weights, signs = sizes;
            if constexpr (F::kIsWide) {
                signs = _mm256_xor_si256(sizes, _mm256_set1_epi8(-128));
                sizes = _mm256_abs_epi8(signs);
            }
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m) {
                __m256i four = _mm256_set1_epi32(load_int(x[m].numbers + at));
                if constexpr (F::kIsWide) four = _mm256_sign_epi8(four, signs);
                const __m256i two = _mm256_maddubs_epi16(sizes, four);
                words[n][m] = i % kAtOnce ? _mm256_add_epi16(words[n][m], two) : two;
                if (i % kAtOnce == kAtOnce - 1)
                    sums[n][m] += (Ints)_mm256_madd_epi16(words[n][m], _mm256_set1_epi16(1));
            }
#else
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m)
                sums[n][m] = dot4(sums[n][m], weights, load_int(x[m].numbers + at));
#endif
        }
    }
}

// Computes the dot products over the inputs that share a scale of the weights, without this scale,
// for MR rows and NV vectors of outputs.
template <class F, int MR, int NV>
inline __attribute__((always_inline)) void dot_part(const InputUnit* x, const char* unit, int part,
                                                    int v, Floats (&scaled)[NV][MR]) {
    constexpr int kHalves = 4 / F::kNumScales;
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n)
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m)
            scaled[n][m] = F::kHasMins || F::kHasZeros ? Floats{} : Floats{} + x[m].sums[part];
#pragma GCC unroll 4
    for (int half = kHalves * part; half < kHalves * (part + 1); ++half) {
        Ints ints[NV][MR];
        dot_half<F, MR, NV>(x, unit, half, v, ints);
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n)
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m)
                scaled[n][m] =
                    fused(to_floats(ints[n][m]), all(x[m].scales[half]), scaled[n][m]);
    }
}

// Multiplies the results of `dot_part` by the scale of the weights and adds them to `sums`.
template <class F, int MR, int NV>
inline __attribute__((always_inline)) void add_part(const InputUnit* x, const char* unit, int part,
                                                    int v, Floats (&scaled)[NV][MR],
                                                    Floats (&sums)[kVectors][MR]) {
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) {
        const auto of_outputs = [&](const char* from) __attribute__((always_inline)) {
            return scales_of<F>(from + part * kScaleBytes, v + n);
        };
        // Zero points are applied in a separate addition at the end.
        if constexpr (F::kHasZeros) {
            const Floats zeros = of_outputs(unit + F::kZeros);
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m)
                scaled[n][m] = fused(zeros, all(x[m].sums[part]), scaled[n][m]);
        }
        const Floats scales = of_outputs(unit + F::kScales);
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m)
            sums[v + n][m] = fused(scaled[n][m], scales, sums[v + n][m]);
        if constexpr (F::kHasMins) {
            const Floats mins = of_outputs(unit + F::kMins);
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m)
                sums[v + n][m] = fused(mins, all(x[m].sums[part]), sums[v + n][m]);
        }
    }
}

// Adds the products of one unit of inputs, for MR rows and NV vectors of outputs of a panel.
template <class F, int MR, int NV>
inline __attribute__((always_inline)) void multiply_unit(const InputUnit* x, const char* unit, int v,
                                                         Floats (&sums)[kVectors][MR]) {
    // With few rows, weights are streamed line by line: first all numbers, then their scales.
    constexpr bool kStreams = TANDEM_LANES == 16 && MR <= kStreamedRows;
    constexpr int kAtOnce = kStreams ? F::kNumScales : 1;
#pragma GCC unroll 4
    for (int part = 0; part < F::kNumScales; part += kAtOnce) {
        Floats scaled[kAtOnce][NV][MR];
#pragma GCC unroll 4
        for (int i = 0; i < kAtOnce; ++i) dot_part<F, MR, NV>(x, unit, part + i, v, scaled[i]);
        if constexpr (kStreams) asm volatile("" : : : "memory");
#pragma GCC unroll 4
        for (int i = 0; i < kAtOnce; ++i) add_part<F, MR, NV>(x, unit, part + i, v, scaled[i], sums);
    }
}

// Computes a panel for MR rows.
template <class F, int MR>
inline __attribute__((always_inline)) void multiply_units(const InputUnit* x, const char* unit,
                                                          int units,
                                                          Floats (&sums)[kVectors][MR]) {
    for (int u = 0; u < units; ++u, x += MR, unit += F::kUnitBytes) {
        // With few rows, each weight is read only once. Software prefetches the cache lines,
        // because the hardware prefetcher is too slow if a line takes many instructions.
        if constexpr (TANDEM_LANES == 8 && MR <= kStreamedRows)
            for (int line = 0; line < F::kUnitBytes; line += kLine)
                __builtin_prefetch(unit + kBytesAhead + line, 0, 3);
        // Two vectors of outputs at a time are computed for a single row, so that cache lines are
        // read in order, and for 8-bit weights, so that a broadcast input is used twice. In other
        // cases registers would not suffice.
        constexpr int kAtOnce =
            TANDEM_LANES == 8 && (MR == 1 || F::kIsWide) ? kVectors : 1;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v += kAtOnce) {
            multiply_unit<F, MR, kAtOnce>(x, unit, v, sums);
            if constexpr (kVectors > 1) asm volatile("" : : : "memory");
        }
    }
}

template <class F, int MR>
__attribute__((noinline)) void panels_of_units(const Matrix& matrix, const InputUnit* x, int panel,
                                               int end_panel, int first_row, const Output& out) {
    const int units = num_units(matrix.in);
    const size_t panel_bytes = static_cast<size_t>(units) * F::kUnitBytes;
    for (; panel < end_panel; ++panel) {
        Floats sums[kVectors][MR] = {};
        const char* weights = static_cast<const char*>(matrix.panels) +
                              (panel - matrix.first_panel) * panel_bytes;
        multiply_units<F, MR>(x, weights, units, sums);
        put<MR, kVectors>(matrix, panel * kPanel, true, out, first_row, sums);
    }
}

template <class F, int MR>
void rows_of_units(int num_rows, const Matrix& matrix, const InputUnit* x, int panel, int end_panel,
                   int first_row, const Output& out) {
    if constexpr (MR > 0) {
        if (num_rows == MR)
            panels_of_units<F, MR>(matrix, x, panel, end_panel, first_row, out);
        else
            rows_of_units<F, MR - 1>(num_rows, matrix, x, panel, end_panel, first_row, out);
    }
}

template <class F>
void linear_of_units(const Matrix& matrix, const Inputs& inputs, int first_panel, int end_panel,
                     const Output& out) {
    const InputUnit* x = reinterpret_cast<const InputUnit*>(inputs.rounded);
    const QuantizedTiles tiles{inputs.num_rows};
    const int units = num_units(matrix.in);
    const size_t panel_bytes = static_cast<size_t>(units) * F::kUnitBytes;
    const int most = kTileBytesAtOnce / static_cast<int>(sizeof(InputUnit)) / units / kQuantizedRows;
    const int tiles_at_once = most < 1 ? 1 : most;
    for (int block = 0; block < tiles.num(); block += tiles_at_once) {
        const int end = block + tiles_at_once < tiles.num() ? block + tiles_at_once : tiles.num();
        const int at_once = end - block == 1 ? end_panel - first_panel : 1;
        for (int panel = first_panel; panel < end_panel; panel += at_once)
            for (int tile = block; tile < end; ++tile) {
                const int row = tiles.first_row(tile), num = tiles.first_row(tile + 1) - row;
                if (end - block > 1) {  // Each tile prefetches a part of the next panel.
                    const char* next = static_cast<const char*>(matrix.panels) +
                                       (panel + 1 - matrix.first_panel) * panel_bytes;
                    const size_t end_line = panel_bytes * (tile + 1 - block) / (end - block);
                    for (size_t at = panel_bytes * (tile - block) / (end - block); at < end_line;
                         at += kLine)
                        __builtin_prefetch(next + at, 0, 2);
                }
                rows_of_units<F, kQuantizedRows>(num, matrix, x + static_cast<size_t>(row) * units,
                                                 panel, panel + at_once, row, out);
            }
    }
}

inline void linear_of_quantized(const Matrix& matrix, const Inputs& inputs, int first_panel,
                                int end_panel, const Output& out) {
    by_format(matrix.kind, [&](auto format) {
        linear_of_units<decltype(format)>(matrix, inputs, first_panel, end_panel, out);
    });
}

// Dequantizes a row of weights, such as a token's embedding.
inline void widen_row(const char* panels, int32_t kind, int in, int row, float* to) {
    by_format(kind, [&](auto format) {
        using F = decltype(format);
        const char* unit = panels + static_cast<size_t>(row / kPanel) * num_units(in) * F::kUnitBytes;
        const int v = row % kPanel / kLanes, lane = row % kPanel % kLanes;
        for (int at = 0; at < in; at += 4) {
            const int group = at / kGroup % 2, vector = at % kGroup / 4;
            const char* here = unit + at / kUnitInputs * F::kUnitBytes;
            const auto of_output = [&](int first, int index) {
                const char* from = here + first + index * kScaleBytes;
                return scales_of<F>(from, v)[lane];
            };
            const int32_t four = numbers_of<F>(here, group, vector, v)[lane];
            const int part = at % kUnitInputs / F::kScaleInputs;
            const float scale = of_output(F::kScales, part);
            const float min = F::kHasMins ? of_output(F::kMins, part) : 0.0f;
            const float zero = F::kHasZeros ? of_output(F::kZeros, part) : F::kZero;
            for (int i = 0; i < 4; ++i)
                to[at + i] = fused(scale, static_cast<float>(four >> 8 * i & 255) - zero, min);
        }
    });
}

}  // namespace tandem::TANDEM_ISA
