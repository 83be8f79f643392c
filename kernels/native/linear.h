// Products y = x W^T of rows that lie in tiles with a packed matrix.
//
//     rows in tiles   as few tiles as can be, none of more than kTileRows rows, all of about one
//                     size; x[row][k] at (first row * in) + k * (rows of the tile) + (row - first)
//
// The inputs are summed in blocks of kInputs, each from the first to the last, and the blocks in
// order: the same for a row alone and in a tile.

namespace tandem::TANDEM_ISA {

constexpr int kTileRows = TANDEM_TILE_ROWS;
constexpr int kInputs = 1024;
constexpr int kTilesAtOnce = 60 / kTileRows;  // their inputs stay in the second-level cache

enum class Into { kSet, kAdd };

struct Tiles {
    int num_rows;
    int num() const { return (num_rows + kTileRows - 1) / kTileRows; }
    int first_row(int tile) const { return static_cast<int64_t>(tile) * num_rows / num(); }
    int of(int row) const { return ((static_cast<int64_t>(row) + 1) * num() - 1) / num_rows; }
};

// Where a row of a buffer in tiles begins, and how far apart its inputs are.
struct TiledRow {
    float* first;
    int stride;
};

inline TiledRow tiled_row(float* buffer, int row, int num_rows, int in) {
    const Tiles tiles{num_rows};
    const int tile = tiles.of(row), first = tiles.first_row(tile);
    return {buffer + static_cast<size_t>(first) * in + (row - first),
            tiles.first_row(tile + 1) - first};
}

// NP panels times MR rows: sums of `num` products each.
template <class W, int MR, int NP>
inline __attribute__((always_inline)) void multiply(
    const float* x, const W* w, size_t panel_stride, int num, Floats (&sums)[NP][kVectors][MR]) {
#pragma GCC unroll 8
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m) sums[p][v][m] = Floats{};
    for (int k = 0; k < num; ++k) {
        Floats b[NP][kVectors];
#pragma GCC unroll 8
        for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v)
                b[p][v] = load(w + p * panel_stride + k * kPanel + v * kLanes);
        // One input in all lanes at a time: more of them at once would not fit the registers.
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            const Floats input = all(x[k * MR + m]);
#pragma GCC unroll 8
            for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) sums[p][v][m] += input * b[p][v];
        }
    }
}

struct Output {
    float* rows;  // [rows, stride]
    size_t stride;
    Into into;
};

inline Floats load_some(const float* from, int num) {  // zeros after the last
    Floats v = Floats{};
    std::memcpy(&v, from, num * sizeof(float));
    return v;
}

template <int MR, int NP>
inline __attribute__((always_inline)) void put(
    const Matrix& matrix, int first_output, bool first_inputs, const Output& out, int first_row,
    Floats (&sums)[NP][kVectors][MR]) {
    const bool adds = out.into == Into::kAdd || !first_inputs;
#pragma GCC unroll 8
    for (int p = 0; p < NP; ++p) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            const int output = first_output + p * kPanel + v * kLanes;
            const int num = matrix.out - output < kLanes ? matrix.out - output : kLanes;
            if (num <= 0) continue;
            const bool whole = num == kLanes;
            Floats scale = all(1.0f), bias = Floats{};
            if (matrix.scales) scale = load_some(matrix.scales + output, num);
            if (matrix.bias && first_inputs) bias = load_some(matrix.bias + output, num);
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m) {
                float* at = out.rows + (first_row + m) * out.stride + output;
                Floats before = Floats{};
                if (adds) before = whole ? load(at) : load_some(at, num);
                const Floats result = before + (sums[p][v][m] * scale + bias);
                if (whole)
                    store(at, result);
                else
                    std::memcpy(at, &result, num * sizeof(float));
            }
        }
    }
}

template <class W, int MR, int NP>
void tile(const Matrix& matrix, const float* x, int panel, int first_input, const Output& out,
          int first_row) {
    const int num = matrix.in - first_input < kInputs ? matrix.in - first_input : kInputs;
    const size_t panel_stride = static_cast<size_t>(matrix.in) * kPanel;
    const W* w = static_cast<const W*>(matrix.panels) + panel * panel_stride +
                 static_cast<size_t>(first_input) * kPanel;
    Floats sums[NP][kVectors][MR];
    multiply<W, MR, NP>(x + static_cast<size_t>(first_input) * MR, w, panel_stride, num, sums);
    put<MR, NP>(matrix, panel * kPanel, first_input == 0, out, first_row, sums);
}

template <class W, int MR>
void panels(const Matrix& matrix, const float* x, int first_panel, int end_panel,
            int first_input, const Output& out, int first_row) {
    // Enough sums at once to keep the multipliers busy, and not more than there are registers.
    constexpr int kSums = 8 * 8 / kLanes;
    constexpr int NP = MR * kVectors >= kSums ? 1 : (kSums / (MR * kVectors) > 4 ? 4 : kSums / (MR * kVectors));
    int panel = first_panel;
    for (; panel + NP <= end_panel; panel += NP)
        tile<W, MR, NP>(matrix, x, panel, first_input, out, first_row);
    for (; panel < end_panel; ++panel)
        tile<W, MR, 1>(matrix, x, panel, first_input, out, first_row);
}

template <class W, int MR>
void any_rows(int num_rows, const Matrix& matrix, const float* x, int first_panel, int end_panel,
              int first_input, const Output& out, int first_row) {
    if constexpr (MR > 0) {
        if (num_rows == MR)
            panels<W, MR>(matrix, x, first_panel, end_panel, first_input, out, first_row);
        else
            any_rows<W, MR - 1>(num_rows, matrix, x, first_panel, end_panel, first_input, out,
                                first_row);
    }
}

// The outputs of panels first_panel.. of all rows.
template <class W>
void linear_of(const Matrix& matrix, const float* x, int num_rows, int first_panel, int end_panel,
               const Output& out) {
    const Tiles tiles{num_rows};
    const auto compute = [&](int tile, int panel, int panel_after, int first_input) {
        const int row = tiles.first_row(tile);
        any_rows<W, kTileRows>(tiles.first_row(tile + 1) - row, matrix,
                               x + static_cast<size_t>(row) * matrix.in, panel, panel_after,
                               first_input, out, row);
    };
    for (int block = 0; block < tiles.num(); block += kTilesAtOnce) {
        const int end = block + kTilesAtOnce < tiles.num() ? block + kTilesAtOnce : tiles.num();
        for (int k = 0; k < matrix.in; k += kInputs) {
            if (end - block == 1) {
                compute(block, first_panel, end_panel, k);  // several panels at once
                continue;
            }
            for (int panel = first_panel; panel < end_panel; ++panel)
                for (int tile = block; tile < end; ++tile) compute(tile, panel, panel + 1, k);
        }
    }
}

// This thread's share of a product.
inline void linear(const Matrix& matrix, const float* x, int num_rows, const Output& out,
                   int thread, int num_threads) {
    const int num_panels = (matrix.out + kPanel - 1) / kPanel;
    const int first = static_cast<int64_t>(num_panels) * thread / num_threads;
    const int end = static_cast<int64_t>(num_panels) * (thread + 1) / num_threads;
    if (matrix.kind == BF16)
        linear_of<Bf16>(matrix, x, num_rows, first, end, out);
    else if (matrix.kind == I8)
        linear_of<int8_t>(matrix, x, num_rows, first, end, out);
    else
        linear_of<float>(matrix, x, num_rows, first, end, out);
}

}  // namespace tandem::TANDEM_ISA
