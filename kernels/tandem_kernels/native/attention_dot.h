// Causal attention over bf16 KV for processors that multiply pairs of bf16 numbers (AMX,
// AVX512_BF16). Queries and softmax weights are rounded to bf16; all sums are fp32. int8 KV is
// exact in bf16: the scale of a key is applied to its score, and the scale of a value to its
// weight.
//
// The work is divided into items as in attention.h, with more rows per item: the keys and values of
// a tile of 128 tokens are packed once for the products of all rows.
//
// The bits of a row depend on that row only. Every row processes the keys in steps of 32 from
// position 0 on, and a hidden key has a weight of exactly 0. A row may take more steps because
// other rows of the item need them. All its weights are then 0, and adding zeros changes no sum.
// (The instructions treat denormal numbers as zeros, whatever MXCSR says, but no sum is denormal.)

namespace tandem::TANDEM_ISA {

constexpr int kDotKeys = 128;    // keys in a tile
static_assert(kDotKeys <= kKeysMax);
constexpr int kDotRowsMax = 384; // rows in a work item
constexpr int kDotRows = 32;     // rows whose scores are computed together
constexpr int kStep = kStepInputs;

// An item has at least this number of rows, if its span has as many. With fewer rows, reading keys
// and values would take most of the time. With AMX the products are so fast that packing would take
// most of the time, so an item has more rows.
#ifdef TANDEM_AMX
constexpr int kDotRowsMin = 64, kDotFewRows = 32;
#else
constexpr int kDotRowsMin = 32, kDotFewRows = 12;
#endif

// The right operand of a product, [depth][columns], in panels of 16 columns. A panel is [depth / 2]
// [16] words. A word has the numbers of two consecutive rows in one column.
struct Panels {
    uint32_t* words;
    int depth;

    uint32_t* of(int panel) const {
        return words + static_cast<size_t>(panel) * depth / 2 * kPanel;
    }
    Panels from_panel(int panel) const { return {of(panel), depth}; }
    Panels from_depth(int k) const { return {words + k / 2 * kPanel, depth}; }
};

// The left operand or the result of a product, in row-major order.
template <class T>
struct Plane {
    T* numbers;
    size_t stride;

    T* row(int i) const { return numbers + i * stride; }
    Plane from(int row) const { return {numbers + row * stride, stride}; }
    Plane beside(int column) const { return {numbers + column, stride}; }
    operator Plane<const T>() const { return {numbers, stride}; }
};

#ifdef TANDEM_AMX

// Computes result = left . right, or result += left . right if kAdds. The product has up to 16
// rows, or up to 32 if kTwo. `depth` is a multiple of 32, and the number of panels is even. With
// more than 16 rows, 32 rows are read and written, so the memory must have room for them.
template <bool kTwo, bool kAdds>
inline void multiply_some(Plane<const Bf16> left, Panels right, int depth, int num_panels,
                          Plane<float> result) {
    const size_t from = left.stride * sizeof(Bf16), to = result.stride * sizeof(float);
    constexpr int kWords = kPanel * kStep / 2;  // words in a tile
    for (int panel = 0; panel < num_panels; panel += 2) {
        float* first = result.row(0) + panel * kPanel;
        float* second = result.row(16) + panel * kPanel;
        if constexpr (kAdds) {
            load_tile<0>(first, to);
            load_tile<1>(first + kPanel, to);
            if constexpr (kTwo) {
                load_tile<2>(second, to);
                load_tile<3>(second + kPanel, to);
            }
        } else {
            zero_tile<0>();
            zero_tile<1>();
            if constexpr (kTwo) {
                zero_tile<2>();
                zero_tile<3>();
            }
        }
        const uint32_t* words = right.of(panel);
        const uint32_t* beside = right.of(panel + 1);
        for (int k = 0; k < depth; k += kStep, words += kWords, beside += kWords) {
            load_tile<4>(left.row(0) + k, from);
            load_tile<6>(words, 64);
            multiply_tiles<0, 4, 6>();
            load_tile<7>(beside, 64);
            multiply_tiles<1, 4, 7>();
            if constexpr (kTwo) {
                load_tile<5>(left.row(16) + k, from);
                multiply_tiles<2, 5, 6>();
                multiply_tiles<3, 5, 7>();
            }
        }
        store_tile<0>(first, to);
        store_tile<1>(first + kPanel, to);
        if constexpr (kTwo) {
            store_tile<2>(second, to);
            store_tile<3>(second + kPanel, to);
        }
    }
}

template <bool kAdds>
inline void multiply_rows(int num_rows, Plane<const Bf16> left, Panels right, int depth,
                          int num_panels, Plane<float> result) {
    if (num_rows > 16) {
        shape_tiles(16, 16);
        multiply_some<true, kAdds>(left, right, depth, num_panels, result);
    } else {
        shape_tiles(num_rows, num_rows);
        multiply_some<false, kAdds>(left, right, depth, num_panels, result);
    }
}

#else

// Computes result = left . right, or result += left . right if kAdds, for MR rows and NP panels. If
// this function were inlined into a large function, registers would not suffice, and the attention
// of a prompt would take 11% longer.
template <int MR, int NP, bool kAdds>
__attribute__((noinline)) void multiply_panels(Plane<const Bf16> left, Panels right, int depth, int panel,
                            Plane<float> result) {
    Floats sums[NP][MR];
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m)
            sums[p][m] = kAdds ? load(result.row(m) + (panel + p) * kPanel) : Floats{};
    const uint32_t* words = right.of(panel);
    const size_t apart = right.of(1) - right.of(0);
    for (int k = 0; k < depth; k += 2, words += kPanel) {
        __m512bh each[NP];
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) each[p] = (__m512bh)_mm512_loadu_si512(words + p * apart);
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
            int32_t two;
            std::memcpy(&two, left.row(m) + k, sizeof two);
            const __m512bh numbers = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p)
                sums[p][m] = _mm512_dpbf16_ps(sums[p][m], numbers, each[p]);
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) store(result.row(m) + (panel + p) * kPanel, sums[p][m]);
}

template <int MR, bool kAdds>
inline void multiply_some(int num_rows, Plane<const Bf16> left, Panels right, int depth,
                          int num_panels, Plane<float> result) {
    if constexpr (MR > 0) {
        if (num_rows < MR)
            return multiply_some<MR - 1, kAdds>(num_rows, left, right, depth, num_panels, result);
        int panel = 0;
        for (; panel + 4 <= num_panels; panel += 4)
            multiply_panels<MR, 4, kAdds>(left, right, depth, panel, result);
        for (; panel < num_panels; panel += 2)
            multiply_panels<MR, 2, kAdds>(left, right, depth, panel, result);
    }
}

template <bool kAdds>
inline void multiply_rows(int num_rows, Plane<const Bf16> left, Panels right, int depth,
                          int num_panels, Plane<float> result) {
    constexpr int kAtOnce = 6;
    for (int row = 0; row < num_rows; row += kAtOnce)
        multiply_some<kAtOnce, kAdds>(num_rows - row, left.from(row), right, depth, num_panels,
                                      result.from(row));
}

#endif

// Loads the first `num` of 32 numbers, and zeros in place of the others.
inline __m512i load_step(const Bf16* from, int num) {
    if (num >= kStep) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi32((1u << num / 2) - 1, from);
}

// Loads the first `num` of 64 numbers, and zeros in place of the others.
inline __m512i load_words(const int8_t* from, int num) {
    if (num >= 64) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi8((1ull << num) - 1, from);
}

// Converts words with an 8-bit integer times a power of two to bf16. Each word of the result has
// the numbers of one word of `low` and one of `high`.
inline __m512i pair(__m512i low, __m512i high) {
    const __m512i of_low = (__m512i)_mm512_cvtepi32_ps(low);
    const __m512i of_high = (__m512i)_mm512_cvtepi32_ps(high);
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(of_low, 16), of_high, upper, 0xf8);
}

// Converts words of four int8 numbers to two words of two bf16 numbers each. The results are
// multiplied by kByteToWord = 2^24, because each byte is shifted to the upper end of its word,
// where it keeps its sign.
constexpr float kByteToWord = 0x1p24f;

inline void widen_words(__m512i words, __m512i& first_two, __m512i& last_two) {
    const auto top = [&](int byte) {
        const int from = static_cast<int>(0x808080u | static_cast<unsigned>(byte) << 24);
        const __m512i of_lane = _mm512_set_epi32(
            from + (12 << 24), from + (8 << 24), from + (4 << 24), from, from + (12 << 24),
            from + (8 << 24), from + (4 << 24), from, from + (12 << 24), from + (8 << 24),
            from + (4 << 24), from, from + (12 << 24), from + (8 << 24), from + (4 << 24), from);
        return _mm512_shuffle_epi8(words, of_lane);
    };
    first_two = pair(top(0), top(1));
    last_two = pair(top(2), top(3));
}

template <class T>
inline void prefetch(const T* row, int dim) {
    constexpr int kLine = 64 / sizeof(T);
    for (int d = 0; d < dim; d += kLine) __builtin_prefetch(row + d, 0, 2);
}

// A tile of keys and values.
template <class T>
struct DotTile {
    const T* const* rows;   // address of each key
    const T* const* ahead;  // addresses of the next tile's keys, to prefetch
    size_t run;             // distance from a key to its value, in elements
    int first, num_keys;    // position of the first key, and number of keys in the context
    const float *key_scales, *value_scales;  // for int8 KV
    float cap;                               // soft cap of scores; 0: no cap
};

// Transposes 16 rows of 16 words. `put` is called with each column's index and its words.
template <class Put>
inline void turn(__m512i (&r)[16], const Put& put) {
    __m512i s[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    // Now quarter c of r[4 q + j] has word 4 c + j of rows 4 q .. 4 q + 3.
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        s[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        s[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        s[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        s[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        put(j, _mm512_shuffle_i32x4(s[j], s[8 + j], 0x88));
        put(4 + j, _mm512_shuffle_i32x4(s[4 + j], s[12 + j], 0x88));
        put(8 + j, _mm512_shuffle_i32x4(s[j], s[8 + j], 0xdd));
        put(12 + j, _mm512_shuffle_i32x4(s[4 + j], s[12 + j], 0xdd));
    }
}

// Packs `num_keys` keys from `first` on as the right operand [dim][keys] of the product that
// computes scores. A panel has 16 keys, transposed in words. int8 keys are transposed four numbers
// at a time and then converted to bf16, because shuffles are slower than arithmetic. The packed
// numbers of int8 keys are multiplied by kByteToWord.
template <class T>
inline void pack_keys(const DotTile<T>& tile, int first, int num_keys, int dim, Panels to) {
    for (int key = first; key < first + num_keys; key += kPanel) {
        uint32_t* words = to.of(key / kPanel);
        const T* const* rows = tile.rows + key;
        for (int i = 0; i < kPanel; ++i) prefetch(tile.ahead[key + i], dim);
        __m512i r[16];
        if constexpr (std::is_same_v<T, int8_t>) {
            for (int d = 0; d < dim; d += 64) {
#pragma GCC unroll 16
                for (int i = 0; i < 16; ++i) r[i] = load_words(rows[i] + d, dim - d);
                const int end = whole_steps(dim - d) / 4;
                turn(r, [&](int column, __m512i four) {
                    if (column >= end) return;
                    __m512i first_two, last_two;
                    widen_words(four, first_two, last_two);
                    uint32_t* word = words + (d / 2 + 2 * column) * kPanel;
                    _mm512_storeu_si512(word, first_two);
                    _mm512_storeu_si512(word + kPanel, last_two);
                });
            }
        } else {
            for (int d = 0; d < dim; d += kStep) {
#pragma GCC unroll 16
                for (int i = 0; i < 16; ++i) r[i] = load_step(rows[i] + d, dim - d);
                turn(r, [&](int column, __m512i two) {
                    _mm512_storeu_si512(words + (d / 2 + column) * kPanel, two);
                });
            }
        }
    }
}

// Packs `num_keys` values from `first` on as the right operand [keys][dim] of the product that
// computes the output. A word has the numbers of two tokens, with zeros after the last token. The
// 16 columns of a bf16 panel are not consecutive, but in the order that the cheapest shuffle gives.
// in_order_of() restores the order.
template <class T>
inline void pack_values(const DotTile<T>& tile, int first, int num_keys, int dim, Panels to) {
    const T *const *rows = tile.rows, *const *ahead = tile.ahead;
    const size_t run = tile.run, beside = to.of(1) - to.of(0);
    const int end = tile.num_keys, padded = whole_steps(dim);
    uint32_t* line = to.of(0) + static_cast<size_t>(first) / 2 * kPanel;
    for (int key = first; key < first + num_keys; key += 2, line += kPanel) {
        const T *one = rows[key] + run, *other = rows[key + 1] + run;
        prefetch(ahead[key] + run, dim);
        prefetch(ahead[key + 1] + run, dim);
        uint32_t* words = line;
        if constexpr (std::is_same_v<T, int8_t>) {
            const auto wide = [&](const int8_t* row, int of_key, int d) {
                if (of_key >= end || d >= dim) return _mm512_setzero_si512();
                return _mm512_cvtepi8_epi32(
                    _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + d)));
            };
            for (int d = 0; d < padded; d += kPanel, words += beside)
                _mm512_storeu_si512(words, pair(wide(one, key, d), wide(other, key + 1, d)));
        } else {
            for (int d = 0; d < dim; d += kStep, words += 2 * beside) {
                const __m512i a = load_step(one + d, key < end ? dim - d : 0);
                const __m512i b = load_step(other + d, key + 1 < end ? dim - d : 0);
                _mm512_storeu_si512(words, _mm512_unpacklo_epi16(a, b));
                _mm512_storeu_si512(words + beside, _mm512_unpackhi_epi16(a, b));
            }
        }
    }
}

// Returns elements 16 i to 16 i + 15 of 32 elements of a head, for i = 0 or 1. The two panels have
// them in the order of pack_values().
template <class T>
inline Floats in_order_of(const float* panels, int i) {
    if constexpr (std::is_same_v<T, int8_t>) return load(panels + i * kPanel);
    const Floats low = load(panels), high = load(panels + kPanel);
    if (i == 0)
        return shuffled<0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23>(low, high);
    return shuffled<8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31>(low, high);
}

// Returns 2^x with an error of 1e-4, which is small compared with rounding to bf16. The result is
// exactly 0 for -infinity.
inline Floats rough_exp2(Floats x) {
    const Floats part = _mm512_reduce_ps(x, 9);  // x - floor(x)
    Floats p = fused(part, 0.0780245227f, 0.226067155f);
    p = fused(p, part, 0.695833541f);
    p = fused(p, part, 0.999925219f);
    return _mm512_scalef_ps(p, x);
}

// The base of a row's sums is raised only when a score exceeds it by more than kSlack, so sums are
// rarely rescaled.
constexpr float kSlack = 8.0f;

// Replaces a row's scores for `num_keys` keys by softmax weights, rounded to bf16. Keys to which
// the row does not attend get the weight 0. Adds the rounded weights to the row's mass.
template <class T>
inline void weigh(float* scores, Seen seen, int num_keys, Bf16* weights, RowSums& sums, float* out,
                  int dim, const DotTile<T>& tile, const BlockShares& shares) {
    if (!seen.any(num_keys)) {
        std::memset(weights, 0, num_keys * sizeof(Bf16));
        return;
    }
    if constexpr (std::is_same_v<T, int8_t>)
        for (int key = 0; key < num_keys; key += kPanel)
            store(scores + key, load(scores + key) * load(tile.key_scales + key));
    cap_scores(scores, num_keys, tile.cap);
    seen.before(num_keys, [&](int key, int end) {
        for (; key < end; ++key) scores[key] = -INFINITY;
    });
    if (seen.end < num_keys) {
        const int whole = seen.end / kPanel * kPanel;
        Floats last = load(scores + whole);
        last = _mm512_mask_blend_ps((1u << (seen.end - whole)) - 1, all(-INFINITY), last);
        store(scores + whole, last);
        for (int key = whole + kPanel; key < num_keys; key += kPanel)
            store(scores + key, all(-INFINITY));
    }
    Floats high = load(scores), other = load(scores + kPanel);
    for (int key = kStep; key < num_keys; key += kStep) {
        high = _mm512_max_ps(high, load(scores + key));
        other = _mm512_max_ps(other, load(scores + key + kPanel));
    }
    high = _mm512_max_ps(high, other) * kLog2E;
    if (_mm512_cmp_ps_mask(high, all(sums.base + kSlack), _CMP_GT_OQ)) {
        const Floats parts[kVectors] = {high};
        const float base = largest(parts);
        const Floats factor = rough_exp2(all(sums.base - base));
        for (int d = 0; d < dim; d += kPanel) store(out + d, load(out + d) * factor);
        store(sums.mass, load(sums.mass) * factor);
        if (shares.blocks != nullptr) shares.scale(factor[0], tile.first);
        sums.base = base;
    }
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    Floats mass = load(sums.mass);
    const float base = sums.base;
    for (int key = 0; key < num_keys; key += kStep) {
        const Floats low = rough_exp2(fused(load(scores + key), kLog2E, -base));
        const Floats high = rough_exp2(fused(load(scores + key + kPanel), kLog2E, -base));
        if (shares.blocks != nullptr) {
            shares.add((const float*)&low, tile.first + key, tile.first + seen.end);
            shares.add((const float*)&high, tile.first + key + kPanel, tile.first + seen.end);
        }
        if constexpr (std::is_same_v<T, int8_t>) {
            mass += low + high;
            _mm512_storeu_si512(
                weights + key, (__m512i)_mm512_cvtne2ps_pbh(
                                   high * load(tile.value_scales + key + kPanel),
                                   low * load(tile.value_scales + key)));
            continue;
        }
        const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
        _mm512_storeu_si512(weights + key, (__m512i)both);
        mass = _mm512_dpbf16_ps(mass, both, ones);
    }
    store(sums.mass, mass);
}

// A thread's buffer, divided into the arrays that an item needs.
struct DotBuffer {
    Panels keys, values;
    Plane<Bf16> queries, weights;  // A row's weights replace its scores.
    Plane<float> out, scores;  // `out` and `sums`: of a piece
    RowSums* sums;
    ItemSums total;
    Bf16* nothing;     // zeros, read in place of keys that are not read
    int8_t* unpacked;  // unpacked keys and values of a tile, or its latents in bf16
    size_t num_bytes;

    DotBuffer(void* buffer, int head_dim) {
        const int dim = whole_steps(head_dim);
        const uintptr_t begin = reinterpret_cast<uintptr_t>(buffer);
        uintptr_t at = begin;
        const auto take = [&](size_t bytes) {
            void* const taken = reinterpret_cast<void*>(at);
            at += (bytes + 63) / 64 * 64;
            return taken;
        };
        // One cache line more than a power of two, to avoid cache conflicts.
        const size_t of_scores = kDotKeys + kPanel;
        keys = {static_cast<uint32_t*>(take(sizeof(Bf16) * kDotKeys * dim)), dim};
        values = {static_cast<uint32_t*>(take(sizeof(Bf16) * kDotKeys * dim)), kDotKeys};
        queries = {static_cast<Bf16*>(take(sizeof(Bf16) * kDotRowsMax * dim)),
                   static_cast<size_t>(dim)};
        out = {static_cast<float*>(take(sizeof(float) * kDotRowsMax * dim)),
               static_cast<size_t>(dim)};
        scores = {static_cast<float*>(take(sizeof(float) * kDotRows * of_scores)), of_scores};
        weights = {reinterpret_cast<Bf16*>(scores.numbers), 2 * of_scores};
        sums = static_cast<RowSums*>(take(sizeof(RowSums) * kDotRowsMax));
        total = {static_cast<float*>(take(sizeof(float) * kDotRowsMax * dim)),
                 static_cast<size_t>(dim),
                 static_cast<RowSums*>(take(sizeof(RowSums) * kDotRowsMax))};
        nothing = static_cast<Bf16*>(take(sizeof(Bf16) * dim));
        unpacked = static_cast<int8_t*>(take(2 * kDotKeys * dim));
        num_bytes = at - begin;
    }
};

inline size_t attention_dot_floats(int dim) {
    return DotBuffer(nullptr, dim).num_bytes / sizeof(float);
}

// Returns the largest number of rows in an item. All rows of an item share the packed keys and
// values, so it should be large. It must be small enough to give each thread several items.
inline int dot_rows_of_item(const Model& model, const Step& step) {
    const int64_t all = static_cast<int64_t>(step.num_rows) * model.num_heads;
    const int64_t each = all / (8 * model.num_threads) / kDotRows * kDotRows;
    return each < kDotRowsMin ? kDotRowsMin : (each < kDotRowsMax ? each : kDotRowsMax);
}

// Up to kDotRows rows of a work item.
struct DotRows {
    const DotBuffer& at;
    const Seen* sees;  // the keys to which each row of the item attends
    const BlockShares* shares;  // for each row, where its weights are summed; null: not summed
    int dim;          // rounded up to whole steps
    int first_row, num_rows;

    // Returns the number of keys of the tile up to the last one to which a row attends, rounded up
    // to whole steps.
    template <class T>
    int num_keys(const DotTile<T>& tile) const {
        const int most = sees[first_row + num_rows - 1].end - tile.first;
        return most < kDotKeys ? whole_steps(most) : kDotKeys;
    }

    template <class T>
    bool any(const DotTile<T>& tile) const {
        return num_keys(tile) > 0 && (sees[first_row].first < tile.first + kDotKeys ||
                                      sees[first_row + num_rows - 1].start > tile.first);
    }

    void score(int first, int num_keys) const {
        multiply_rows<false>(num_rows, at.queries.from(first_row),
                             at.keys.from_panel(first / kPanel), dim, num_keys / kPanel,
                             at.scores.beside(first));
    }

    template <class T>
    void weigh(const DotTile<T>& tile, int num_keys) const {
        for (int i = 0, row = first_row; i < num_rows; ++i, ++row)
            tandem::TANDEM_ISA::weigh(at.scores.row(i), sees[row].in(tile.first), num_keys,
                                      at.weights.row(i), at.sums[row], at.out.row(row), dim, tile,
                                      shares == nullptr ? BlockShares{} : shares[row]);
    }

    void gather(int first, int num_keys) const {
        multiply_rows<true>(num_rows, at.weights.beside(first), at.values.from_depth(first),
                            num_keys, dim / kPanel, at.out.from(first_row));
    }
};

// Attends all rows of an item to one tile.
template <class T>
inline void attend_tile(const DotTile<T>& tile, int head_dim, const DotBuffer& at, const Seen* sees,
                        const BlockShares* shares, int num_rows) {
    const int dim = whole_steps(head_dim), num_keys = whole_steps(tile.num_keys);
    if (num_rows <= kDotFewRows) {
        // Products alternate with prefetches.
        const DotRows rows{at, sees, shares, dim, 0, num_rows};
        for (int key = 0; key < num_keys; key += kStep) {
            pack_keys(tile, key, kStep, head_dim, at.keys);
            rows.score(key, kStep);
        }
        rows.weigh(tile, num_keys);
        for (int key = 0; key < num_keys; key += kStep) {
            pack_values(tile, key, kStep, head_dim, at.values);
            rows.gather(key, kStep);
        }
        return;
    }
    pack_keys(tile, 0, num_keys, head_dim, at.keys);
    pack_values(tile, 0, num_keys, head_dim, at.values);
    for (int row = 0; row < num_rows; row += kDotRows) {
        const int rest = num_rows - row;
        const DotRows rows{at, sees, shares, dim, row, rest < kDotRows ? rest : kDotRows};
        if (!rows.any(tile)) continue;
        const int num_seen = rows.num_keys(tile);
        rows.score(0, num_seen);
        rows.weigh(tile, num_seen);
        rows.gather(0, num_seen);
    }
}

// Computes a work item, as attend() in attention.h does.
template <class T, class Kept>
inline void attend_dot(const Model& model, const Step& step, int layer, const Item& item,
                       const Item& next, const float* queries, size_t stride,
                       const Inputs& attended, const BlockSums& block_sums, float* buffer) {
    const Layer& of_layer = model.layers[layer];
    const int dim = of_layer.head_dim, value_dim = of_layer.value_dim, padded = whole_steps(dim);
    const int group = item.group;
    const Span& span = step.spans[item.span];
    const DotBuffer at(buffer, dim);
    const ItemSums piece{at.out.numbers, at.total.dim, at.sums};
    const bool has_shares = block_sums.any(item.span);
    BlockShares shares[kDotRowsMax];
    const auto head_of = [&](int i) { return item.kv_head * group + (item.first_row + i) % group; };
    at.total.clear(item.num_rows);
    if (item.task == Task::kMerge) {
        at.total.merge(item);
    } else {
        const HeadKv<Kept> kv(step, of_layer, item), next_kv(step, of_layer, next);
        std::memset(at.nothing, 0, padded * sizeof(Bf16));
        Seen sees[kDotRowsMax];
        for (int i = 0; i < item.num_rows; ++i) {
            const int query = (item.first_row + i) / group;
            const float* from = queries + (span.first_row + query) * stride + head_of(i) * dim;
            [[maybe_unused]] alignas(64) float as_keys[kHeadMax];
            if constexpr (std::is_same_v<Kept, Int4>) {
                kv.put_query(from, as_keys);
                from = as_keys;
            }
            Bf16* to = at.queries.row(i);
            std::memset(to + padded - kPanel, 0, kPanel * sizeof(Bf16));
            for (int d = 0; d < dim; d += kPanel)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d),
                                    (__m256i)_mm512_cvtneps_pbh(load(from + d)));
            sees[i] = keys_seen(span, query, item);
            if (has_shares) shares[i] = block_sums.shares(item.span, query, head_of(i));
        }
        [[maybe_unused]] alignas(64) float key_scales[kDotKeys], value_scales[kDotKeys];
        TilesOf<T, Kept, kDotKeys> tiles(kv, next_kv, at.nothing,
                                         reinterpret_cast<T*>(at.unpacked));
        bool begins = true;
        for (int first = kv.first_tile(kDotKeys), after; first < kv.num_keys; first = after) {
            after = kv.tile_after(first, kDotKeys);
            if (begins) {
                piece.clear(item.num_rows);
                for (int i = 0; has_shares && i < item.num_rows; ++i)
                    shares[i].begin_piece(first / kPieceKeys * kPieceKeys);
            }
            begins = kv.ends_piece(first, after);
            tiles.go_to(first);
            const int num = kv.num_keys - first < kDotKeys ? kv.num_keys - first : kDotKeys;
            if constexpr (std::is_same_v<T, int8_t>) {
                kv.scales(first, kDotKeys, key_scales, value_scales);
                for (int key = 0; key < kDotKeys; key += kPanel)
                    store(key_scales + key, load(key_scales + key) * (1.0f / kByteToWord));
            }
            const DotTile<T> tile{tiles.rows(), tiles.ahead(), tiles.run(),  first,
                                  num,          key_scales,    value_scales, model.attention_cap};
            attend_tile(tile, dim, at, sees, has_shares ? shares : nullptr, item.num_rows);
            if (begins)
                at.total.add(piece, item.num_rows, has_shares ? shares : nullptr, first + num);
        }
    }
    if (item.task == Task::kPiece) return at.total.keep(item);
    for (int i = 0; i < item.num_rows; ++i) {
        const RowSums& sums = at.total.rows[i];
        const float scale = 1.0f / (sums.total() + mass_of_sink(of_layer, head_of(i), sums.base));
        if (has_shares) shares[i].scale(scale, span.context_len);
        const InputRow to = attended.row(span.first_row + (item.first_row + i) / group);
        const float* const out = at.total.out + i * at.total.dim;
        for (int d = 0; d < value_dim; d += kPanel)
            to.put(head_of(i) * value_dim + d,
                   in_order_of<T>(out + d / kStep * kStep, d / kPanel % 2) * scale);
    }
}

}  // namespace tandem::TANDEM_ISA
