// Products with fp8 weights (fp8.h). A thread expands a few panels at a time in memory, to fp32 or
// to pairs of bf16, and multiplies all rows by the expanded panels. A product with at most three
// rows expands weights to pairs in registers instead.

namespace tandem::TANDEM_ISA {

// Returns the scales of a panel's 16 outputs for `input`. The inputs that share these scales are
// called a run of inputs in this file.
inline const float* scales_at(const Matrix& matrix, int panel, int input) {
    const int num_blocks = (matrix.in + matrix.scale_inputs - 1) / matrix.scale_inputs;
    return matrix.scales +
           (static_cast<size_t>(panel) * num_blocks + input / matrix.scale_inputs) * kPanel;
}

inline Floats rounded_to_bf16(Floats x) {
    const Words bits = (Words)x;
    return (Floats)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

// Expands `num` panels, from `panel` on, to fp32.
inline void expand_to_floats(const Matrix& matrix, int panel, int num, float* to) {
    const auto* panels = static_cast<const Fp8*>(matrix.panels);
    const bool rounds = matrix.kind == F8_BF16;
    for (int block = 0; block < num_input_blocks(matrix.in); ++block) {
        const int first = first_input(matrix.in, block), end = first_input(matrix.in, block + 1);
        for (int p = panel; p < panel + num; ++p) {
            const Fp8* from = panels + (p - matrix.first_panel) * panel_numbers(matrix.in) +
                              first * kPanel;
            for (int k = first, end_run; k < end; k = end_run) {  // run of inputs that share scales
                end_run = std::min(end, k - k % matrix.scale_inputs + matrix.scale_inputs);
                Floats scales[kVectors];
                for (int v = 0; v < kVectors; ++v)
                    scales[v] = load(scales_at(matrix, p, k) + v * kLanes);
                for (int i = k; i < end_run; ++i, from += kPanel, to += kPanel)
                    for (int v = 0; v < kVectors; ++v) {
                        const Floats weights = load(from + v * kLanes) * scales[v];
                        store(to + v * kLanes, rounds ? rounded_to_bf16(weights) : weights);
                    }
            }
        }
    }
}

#ifdef TANDEM_PAIRS
// The scales of a panel's outputs, in the order in which the halves of its codes are expanded.
struct PairScales {
    __m512 some, others;

    // A float16 made from shifted e4m3 bits has 1/256 of the value.
    explicit PairScales(const float* from) {
        const Floats scales = load(from) * 256.0f;
        some = (__m512)shuffled<0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7>(scales, scales);
        others = (__m512)shuffled<8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15>(
            scales, scales);
    }
};

// Expands two inputs of a panel.
inline __attribute__((always_inline)) __m512bh to_pairs(const uint8_t* from,
                                                        const PairScales& scales) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m512i upper = _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);
    const __m512i halves = _mm512_and_si512(_mm512_srai_epi16(upper, 1),
                                            _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
    const __m512 one = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    const __m512 two = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    return _mm512_cvtne2ps_pbh(_mm512_mul_ps(two, scales.others), _mm512_mul_ps(one, scales.some));
}

inline void expand_to_pairs(const Matrix& matrix, int panel, Bf16* to) {
    const int in = whole_steps(matrix.in);
    const auto* from =
        static_cast<const uint8_t*>(matrix.panels) +
        (panel - matrix.first_panel) * panel_numbers(matrix.in);
    for (int first = 0; first < in; first += matrix.scale_inputs) {
        const int end = std::min(in, first + matrix.scale_inputs);
        const PairScales scales(scales_at(matrix, panel, first));
        for (int k = first; k < end; k += 2, from += 2 * kPanel, to += 2 * kPanel)
            _mm512_storeu_si512(to, (__m512i)to_pairs(from, scales));
    }
}
#endif

#if defined(TANDEM_PAIRS) && !defined(TANDEM_AMX)
// Products with at most three rows follow. If all outputs of a panel share a scale, which is
// common, a table has the bf16 value of each of the 128 unsigned codes times the scale. Weights are
// then looked up in the table.

constexpr int kCodes = 128;

// The tables of all runs of inputs, for two alternating panels such as gates and ups.
struct CodeTables {
    uint8_t* bytes;  // [2][runs][2][kCodes]: lower bytes, upper bytes
    float* scales;   // [2][runs]; NaN: there is no table yet
    int runs;

    CodeTables(const Matrix& matrix, float* buffer)
        : bytes(reinterpret_cast<uint8_t*>(buffer)),
          runs((matrix.in + matrix.scale_inputs - 1) / matrix.scale_inputs) {
        scales = buffer + static_cast<size_t>(runs) * kCodes;
        std::fill(scales, scales + 2 * runs, NAN);
    }

    // Returns the table for a run of a panel with this scale.
    const uint8_t* of(int panel, int run, float scale) {
        const int at = panel % 2 * runs + run;
        uint8_t* const table = bytes + static_cast<size_t>(at) * 2 * kCodes;
        if (scales[at] == scale) return table;
        for (int code = 0; code < kCodes; code += kLanes) {
            const __m128i first =
                _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const __m128i codes = _mm_add_epi8(first, _mm_set1_epi8(static_cast<char>(code)));
            const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 7);
            const Floats numbers = (Floats)_mm512_cvtph_ps(halves) * 256.0f;
            const __m256i words = (__m256i)_mm512_cvtneps_pbh((__m512)(numbers * all(scale)));
            const auto put = [&](__m256i from, uint8_t* to) {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + code), _mm256_cvtepi16_epi8(from));
            };
            put(words, table);
            put(_mm256_srli_epi16(words, 8), table + kCodes);
        }
        scales[at] = scale;
        return table;
    }
};

// Adds the products of one run of `num` inputs with weights from tables, for NP adjacent panels.
template <int MR, int NP>
__attribute__((noinline, target("avx512vbmi"))) void add_looked_up(const Bf16* x,
                                                                   const uint8_t* from,
                                                                   size_t panel_bytes, int num,
                                                                   const uint8_t* const* tables,
                                                                   Floats (*sums)[MR]) {
    __m512i parts[NP][4];
    __m512 kept[NP][MR];
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) parts[p][i] = _mm512_loadu_si512(tables[p] + i * 64);
#pragma GCC unroll 4
        for (int m = 0; m < MR; ++m) kept[p][m] = (__m512)sums[p][m];
    }
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    for (int k = 0; k < num; k += kStepInputs, x += MR * kStepInputs)
        for (int i = 0; i < kStepInputs; i += 4, from += 4 * kPanel)
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) {
                __builtin_prefetch(from + (p + NP) * panel_bytes, 0, 2);
                const __m512i codes =
                    _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + p * panel_bytes));
                const __m512i lower = _mm512_permutex2var_epi8(parts[p][0], codes, parts[p][1]);
                const __m512i size = _mm512_permutex2var_epi8(parts[p][2], codes, parts[p][3]);
                const __m512i upper = _mm512_ternarylogic_epi32(size, codes, sign, 0xf8);
                const __m512bh one = (__m512bh)_mm512_unpacklo_epi8(lower, upper);
                const __m512bh two = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
#pragma GCC unroll 4
                for (int m = 0; m < MR; ++m) {
                    const Bf16* const inputs = x + m * kStepInputs + i;
                    kept[p][m] = _mm512_dpbf16_ps(kept[p][m], all_pairs(inputs), one);
                    kept[p][m] = _mm512_dpbf16_ps(kept[p][m], all_pairs(inputs + 2), two);
                }
            }
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 4
        for (int m = 0; m < MR; ++m) sums[p][m] = (Floats)kept[p][m];
}

// Adds the products of `num` inputs to the sums of a panel whose outputs have different scales.
template <int MR>
__attribute__((noinline)) void add_scaled(const Bf16* x, const uint8_t* from, int num,
                                          const PairScales& scales, Floats (&sums)[MR]) {
    __m512 kept[MR];
    for (int m = 0; m < MR; ++m) kept[m] = (__m512)sums[m];
    for (int k = 0; k < num; k += kStepInputs, x += MR * kStepInputs)
        for (int i = 0; i < kStepInputs; i += 2, from += 2 * kPanel) {
            const __m512bh weights = to_pairs(from, scales);
#pragma GCC unroll 4
            for (int m = 0; m < MR; ++m)
                kept[m] = _mm512_dpbf16_ps(kept[m], all_pairs(x + m * kStepInputs + i), weights);
        }
    for (int m = 0; m < MR; ++m) sums[m] = (Floats)kept[m];
}

inline bool is_one_scale(const float* scales) {
    const __m512 first = _mm512_set1_ps(scales[0]);
    return _mm512_cmp_ps_mask((__m512)load(scales), first, _CMP_EQ_OQ) == 0xffff;
}

// Computes NP panels for MR rows. Sums have the same order as in multiply_stream().
template <int MR, int NP>
void multiply_fp8(const Matrix& matrix, const Bf16* x, int panel, CodeTables& tables,
                  Floats (&sums)[NP][MR]) {
    static const bool knows_tables = __builtin_cpu_supports("avx512vbmi");
    const int in = whole_steps(matrix.in);
    const size_t panel_bytes = panel_numbers(matrix.in);
    const auto* from =
        static_cast<const uint8_t*>(matrix.panels) + (panel - matrix.first_panel) * panel_bytes;
    for (auto& of_panel : sums)
        for (Floats& each : of_panel) each = Floats{};
    for (int first = 0, run = 0; first < in; first += matrix.scale_inputs, ++run) {
        const int num = std::min(in - first, static_cast<int>(matrix.scale_inputs));
        const Bf16* const inputs = x + static_cast<size_t>(first) * MR;
        const float* scales[NP];
        const uint8_t* found[NP];
        bool looks_up = knows_tables;
        for (int p = 0; p < NP; ++p) {
            scales[p] = scales_at(matrix, panel + p, first);
            looks_up = looks_up && is_one_scale(scales[p]);
        }
        if (looks_up) {
            for (int p = 0; p < NP; ++p) found[p] = tables.of(panel + p, run, scales[p][0]);
            add_looked_up<MR, NP>(inputs, from, panel_bytes, num, found, sums);
        } else {
            for (int p = 0; p < NP; ++p)
                add_scaled<MR>(inputs, from + p * panel_bytes, num, PairScales(scales[p]), sums[p]);
        }
        from += static_cast<size_t>(num) * kPanel;
    }
}

template <int MR, class To>
void few_rows_of_fp8(const Matrix& matrix, const Inputs& inputs, int panel, int end_panel,
                     const To& to, float* buffer) {
    if constexpr (MR > 0) {
        if (inputs.num_rows != MR)
            return few_rows_of_fp8<MR - 1>(matrix, inputs, panel, end_panel, to, buffer);
        const Bf16* const x = reinterpret_cast<const Bf16*>(inputs.buffer);
        CodeTables tables(matrix, buffer);
        Matrix scaled = matrix;
        scaled.scales = nullptr;
        for (; panel + 2 <= end_panel; panel += 2) {
            Floats sums[2][MR];
            multiply_fp8<MR, 2>(matrix, x, panel, tables, sums);
            put_pairs<MR, 2>(scaled, panel, 0, to, sums);
        }
        if (panel == end_panel) return;
        Floats sums[1][MR];
        multiply_fp8<MR, 1>(matrix, x, panel, tables, sums);
        put_pairs<MR, 1>(scaled, panel, 0, to, sums);
    }
}
#endif

#ifdef TANDEM_PAIRS
// Expands a range of panels at a time, and calls `work` with a matrix that has only these panels.
template <class Work>
void by_expanded_pairs(const Matrix& matrix, float* buffer, int panel, int end_panel, Work work) {
    auto* const pairs = reinterpret_cast<Bf16*>(buffer);
    const size_t size = panel_numbers(matrix.in);
    const int at_once = panels_expanded(matrix.in);
    Matrix expanded = matrix;
    expanded.kind = BF16_PAIRS;
    expanded.scales = nullptr;
    for (; panel < end_panel; panel += at_once) {
        const int end = std::min(end_panel, panel + at_once);
        for (int p = panel; p < end; ++p) expand_to_pairs(matrix, p, pairs + (p - panel) * size);
        expanded.panels = pairs;
        expanded.first_panel = panel;
        expanded.num_panels = end - panel;
        work(expanded, panel, end);
    }
}

inline void gate_of_fp8(const Matrix& matrix, const Inputs& inputs, int first_panel, int end_panel,
                        const Inputs& gated, int thread) {
    float* const buffer = inputs.rounded + thread * expanded_floats(matrix.in);
#ifndef TANDEM_AMX
    if (inputs.num_rows <= kStreamRows)
        return few_rows_of_fp8<kStreamRows>(matrix, inputs, first_panel, end_panel, gated, buffer);
#endif
    by_expanded_pairs(matrix, buffer, first_panel, end_panel,
                      [&](const Matrix& expanded, int panel, int end) {
                          gate_of_pairs(expanded, inputs, panel, end, gated);
                      });
}
#endif

inline void linear_of_fp8(const Matrix& matrix, const Inputs& inputs, int panel, int end_panel,
                          const Output& out, int thread) {
    float* const buffer = inputs.rounded + thread * expanded_floats(matrix.in);
#if defined(TANDEM_PAIRS) && !defined(TANDEM_AMX)
    if (matrix.kind == F8_PAIRS && inputs.num_rows <= kStreamRows)
        return few_rows_of_fp8<kStreamRows>(matrix, inputs, panel, end_panel, out, buffer);
#endif
#ifdef TANDEM_PAIRS
    if (matrix.kind == F8_PAIRS)
        return by_expanded_pairs(matrix, buffer, panel, end_panel,
                                 [&](const Matrix& expanded, int first, int end) {
                                     linear_of_pairs(expanded, inputs, first, end, out);
                                 });
#endif
    Matrix expanded = matrix;
    expanded.panels = buffer;
    expanded.kind = F32;
    expanded.scales = nullptr;
    expanded.first_panel = 0;
    const int at_once = panels_expanded(matrix.in);
    for (; panel < end_panel; panel += at_once) {
        const int num = std::min(at_once, end_panel - panel), first_output = panel * kPanel;
        expand_to_floats(matrix, panel, num, buffer);
        expanded.out = std::min(num * kPanel, matrix.out - first_output);
        expanded.num_panels = num;
        if (matrix.bias != nullptr) expanded.bias = matrix.bias + first_output;
        linear_of<float>(expanded, inputs.buffer, inputs.num_rows, 0, num,
                         {out.rows + first_output, out.stride, out.into});
    }
}

}  // namespace tandem::TANDEM_ISA
