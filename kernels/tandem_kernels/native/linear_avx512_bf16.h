// Products with bf16 weights in pairs, computed with AVX512_BF16. A tile of rows is multiplied by a
// few panels at a time, with all sums in registers. An output is summed over its inputs from first
// to last. Denormal bf16 numbers and denormal sums are treated as zeros.

namespace tandem::TANDEM_ISA {

constexpr int kPairSums = 24;  // number of the 32 vector registers that are used for sums
constexpr int kPairPanels = 4; // largest number of panels at a time
constexpr int kStreamRows = 3; // tiles with at most 3 rows read one panel at a time
constexpr int kInputsBytesAtOnce = 256 << 10;  // bytes of inputs that fit in the L2 cache

constexpr int pair_panels_at_once(int rows) {
    if (rows <= kStreamRows) return 2;
    const int most = kPairSums / rows / 2 * 2;  // even, because gates are computed with their ups
    return most < kPairPanels ? most : kPairPanels;
}

inline __attribute__((always_inline)) __m512bh all_pairs(const Bf16* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

// Computes NP panels for MR rows. If `ahead` is not null, also prefetches `step` bytes from `ahead`
// on for each pair of inputs. If it is null, prefetches the next NP panels, one cache line for each
// line that is read, because the hardware prefetcher cannot follow several panels at once.
template <int MR, int NP>
inline __attribute__((always_inline)) void multiply_pairs(const Bf16* x, const Bf16* w, int in,
                                                          const char* ahead, int step,
                                                          Floats (&sums)[NP][MR]) {
    const size_t panel = static_cast<size_t>(in) * kPanel;
    const Bf16* next = w + NP * panel;
#pragma GCC unroll 16
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) sums[p][m] = Floats{};
    for (int k = 0; k < in; k += kStepInputs, x += MR * kStepInputs)
        for (int i = 0; i < kStepInputs; i += 2, w += 2 * kPanel) {
            if (ahead != nullptr) {
                __builtin_prefetch(ahead, 0, 2);
                ahead += step;
            } else {
                for (int p = 0; p < NP; ++p, next += 2 * kPanel) __builtin_prefetch(next, 0, 2);
            }
            __m512bh weights[NP];
#pragma GCC unroll 16
            for (int p = 0; p < NP; ++p)
                weights[p] = (__m512bh)_mm512_loadu_si512(w + p * panel);
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m) {
                const __m512bh inputs = all_pairs(x + m * kStepInputs + i);
#pragma GCC unroll 16
                for (int p = 0; p < NP; ++p)
                    sums[p][m] = (Floats)_mm512_dpbf16_ps((__m512)sums[p][m], inputs, weights[p]);
            }
        }
}

// Computes one panel for MR rows. With few rows, reading weights takes most of the time, and the
// hardware prefetches a single panel better than software can. This function is not inlined,
// because a compiler would then interleave two panels.
template <int MR>
__attribute__((noinline)) void multiply_stream(const Bf16* x, const Bf16* w, int in,
                                               Floats (&sums)[MR]) {
#pragma GCC unroll 4
    for (int m = 0; m < MR; ++m) sums[m] = Floats{};
    for (int k = 0; k < in; k += kStepInputs, x += MR * kStepInputs)
        for (int i = 0; i < kStepInputs; i += 2, w += 2 * kPanel) {
            const __m512bh weights = (__m512bh)_mm512_loadu_si512(w);
#pragma GCC unroll 4
            for (int m = 0; m < MR; ++m)
                sums[m] = (Floats)_mm512_dpbf16_ps((__m512)sums[m],
                                                   all_pairs(x + m * kStepInputs + i), weights);
        }
}

template <int MR, int NP>
inline __attribute__((always_inline)) void put_pairs(const Matrix& matrix, int panel,
                                                     int first_row, const Output& out,
                                                     const Floats (&sums)[NP][MR]) {
    put<MR, NP>(matrix, panel * kPanel, true, out, first_row, sums);
}

template <int MR, int NP>
inline __attribute__((always_inline)) void put_pairs(const Matrix& matrix, int panel,
                                                     int first_row, const Inputs& gated,
                                                     const Floats (&sums)[NP][MR]) {
    if constexpr (NP > 1)
        for (int p = 0; p < NP; p += 2)
            put_gated(matrix, gated, panel + p, first_row, MR, sums[p], sums[p + 1]);
}

// Prefetches the memory for a tile's results while the tile is computed. With many rows, this
// memory is no longer in the caches.
inline void fetch_results(const Output& out, int panel, int num_panels, int first_row, int num_rows) {
    const float* to = out.rows + first_row * out.stride + panel * kPanel;
    for (int m = 0; m < num_rows; ++m, to += out.stride)
        for (int p = 0; p < num_panels; ++p) __builtin_prefetch(to + p * kPanel, 1, 3);
}

inline void fetch_results(const Inputs&, int, int, int, int) {}

template <int MR, int NP, class To>
void tile_of_pairs(const Matrix& matrix, const Bf16* x, int panel, int first_row, Turn turn,
                   const To& to) {
    const int in = whole_steps(matrix.in);
    const size_t panel_size = static_cast<size_t>(in) * kPanel;
    const Bf16* w =
        static_cast<const Bf16*>(matrix.panels) + (panel - matrix.first_panel) * panel_size;
    Floats sums[NP][MR];
    if constexpr (MR <= kStreamRows) {
        for (int p = 0; p < NP; ++p) multiply_stream<MR>(x, w + p * panel_size, in, sums[p]);
    } else {
        const Bf16* ahead = nullptr;
        if (turn.tiles > 1) {
            ahead = w + NP * panel_size + NP * panel_size * turn.tile / turn.tiles;
            fetch_results(to, panel, NP, first_row, MR);
        }
        multiply_pairs<MR, NP>(x, w, in, reinterpret_cast<const char*>(ahead),
                               NP * 2 * kPanel * sizeof(Bf16) / turn.tiles, sums);
    }
    put_pairs<MR, NP>(matrix, panel, first_row, to, sums);
}

template <int MR, class To>
void rows_of_pairs(int num_rows, const Matrix& matrix, const Bf16* x, int panel, int end_panel,
                   int first_row, Turn turn, const To& to) {
    if constexpr (MR > 0) {
        if (num_rows != MR)
            return rows_of_pairs<MR - 1>(num_rows, matrix, x, panel, end_panel, first_row, turn,
                                         to);
        constexpr int NP = pair_panels_at_once(MR);
        for (; panel + NP <= end_panel; panel += NP)
            tile_of_pairs<MR, NP>(matrix, x, panel, first_row, turn, to);
        for (; panel + 2 <= end_panel; panel += 2)
            tile_of_pairs<MR, 2>(matrix, x, panel, first_row, turn, to);
        if (panel < end_panel) tile_of_pairs<MR, 1>(matrix, x, panel, first_row, turn, to);
    }
}

template <class To>
void product_of_pairs(const Matrix& matrix, const Inputs& inputs, int first_panel,
                      int end_panel, const To& to) {
    const Bf16* x = reinterpret_cast<const Bf16*>(inputs.buffer);
    const PairTiles tiles{inputs.num_rows};
    const int in = whole_steps(matrix.in);
    const int most = kInputsBytesAtOnce / static_cast<int>(sizeof(Bf16)) / in / kTileRows;
    const int tiles_at_once = most < 1 ? 1 : most;
    for (int block = 0; block < tiles.num(); block += tiles_at_once) {
        const int end = block + tiles_at_once < tiles.num() ? block + tiles_at_once : tiles.num();
        const int at_once = end - block == 1 ? end_panel - first_panel
                                             : pair_panels_at_once(kTileRows);
        for (int panel = first_panel; panel < end_panel; panel += at_once)
            for (int tile = block; tile < end; ++tile) {
                const int row = tiles.first_row(tile);
                const int last = panel + at_once < end_panel ? panel + at_once : end_panel;
                rows_of_pairs<kTileRows>(tiles.first_row(tile + 1) - row, matrix,
                                         x + static_cast<size_t>(row) * in, panel, last, row,
                                         {tile - block, end - block}, to);
            }
    }
}

inline void linear_of_pairs(const Matrix& matrix, const Inputs& inputs, int first_panel,
                            int end_panel, const Output& out) {
    product_of_pairs(matrix, inputs, first_panel, end_panel, out);
}

inline void gate_of_pairs(const Matrix& matrix, const Inputs& inputs, int first_panel,
                          int end_panel, const Inputs& gated) {
    product_of_pairs(matrix, inputs, first_panel, end_panel, gated);
}

// Computes a product with operands in the L1 cache `times` times, to measure the rate (limits.h).
// Returns the number of operations.
inline double busy_pairs(int times) {
    constexpr int kIn = 256, kPanels = pair_panels_at_once(kTileRows);
    alignas(64) static const Bf16 zeros[kIn * (kTileRows + kPanels * kPanel)] = {};
    Floats total = {};
    for (int i = 0; i < times; ++i) {
        Floats sums[kPanels][kTileRows];
        multiply_pairs<kTileRows, kPanels>(zeros, zeros + kIn * kTileRows, kIn,
                                           reinterpret_cast<const char*>(zeros), 0, sums);
        for (auto& panel : sums)
            for (Floats& each : panel) total += each;
    }
    volatile float kept = total[0];
    (void)kept;
    return 2.0 * times * kIn * kPanel * kPanels * kTileRows;
}

}  // namespace tandem::TANDEM_ISA
