// Products with bf16 weights in pairs, computed with AMX. Two tiles of rows are multiplied by two
// panels at a time, or one tile of rows by up to four panels. In both cases an output is summed
// over its inputs from first to last. So the bits of an output do not depend on other rows.

namespace tandem::TANDEM_ISA {

constexpr int kRowBytes = 64;                           // bytes in a row of a tile
constexpr int kTile = kPanel * kStepInputs;             // weights of a panel in one step
// Bytes of inputs that fit in the L2 cache together with two panels.
constexpr int kInputsBytesAtOnce = 1536 << 10;
// Number of steps of 32 inputs for which the weights of two panels fit in the L1 cache.
constexpr int kStepsAtOnce = 20;
// Weights that are read once are prefetched this number of tiles ahead.
constexpr int kTilesAhead = 2;
constexpr int kTilesAtOnceMost = 64;
// Number of panels computed for the full tiles of rows, before the AMX tiles are configured again
// for the last rows.
constexpr int kPanelsOfShape = 8;

// What to prefetch during a product: `lines` cache lines from `from` on in each step, a part of the
// next panels. If `from` is null, the weights of the same panels are prefetched kTilesAhead ahead.
struct Ahead {
    const char* from;
    int lines;
};

constexpr Ahead kOwn = {nullptr, 0};

struct TileOfRows {
    const Bf16* x;
    int first_row, num_rows;
};

// Adds the products of `num_steps` steps of 32 inputs to the sums, for NT tiles of rows and NP
// panels, which are `panel` weights apart. The AMX tiles must be configured.
template <int NT, int NP>
inline __attribute__((always_inline)) void multiply_steps(const Bf16* x, const Bf16* more_x,
                                                          int rows, int more_rows, const Bf16* w,
                                                          size_t panel, int num_steps,
                                                          Ahead ahead) {
    for (int step = 0; step < num_steps; ++step) {
        if (ahead.from != nullptr) {
            for (int i = 0; i < ahead.lines; ++i, ahead.from += kRowBytes)
                __builtin_prefetch(ahead.from, 0, 2);
        } else {
            for (int p = 0; p < NP; ++p)
                for (int i = 0; i < kTile; i += kStepInputs)
                    __builtin_prefetch(w + p * panel + kTilesAhead * kTile + i, 0, 3);
        }
        load_tile<6>(w, kRowBytes);
        if constexpr (NT == 1)
            load_tile<4>(x, kRowBytes);
        else
            load_tile_once<4>(x, kRowBytes);
        multiply_tiles<0, 4, 6>();
        if constexpr (NP > 1) {
            load_tile<7>(w + panel, kRowBytes);
            multiply_tiles<1, 4, 7>();
        }
        if constexpr (NT == 2) {
            load_tile_once<5>(more_x, kRowBytes);
            multiply_tiles<2, 5, 6>();
            if constexpr (NP > 1) multiply_tiles<3, 5, 7>();
            more_x += more_rows * kStepInputs;
        } else {
            if constexpr (NP > 2) {
                load_tile<6>(w + 2 * panel, kRowBytes);
                multiply_tiles<2, 4, 6>();
            }
            if constexpr (NP > 3) {
                load_tile<7>(w + 3 * panel, kRowBytes);
                multiply_tiles<3, 4, 7>();
            }
        }
        x += rows * kStepInputs;
        w += kTile;
    }
}

// Loads the initial sums and stores the results of a product whose output is rows of floats.
struct IntoRows {
    static constexpr bool kOddPanels = true;
    const Matrix& matrix;
    const Output& out;

    template <int kSumsTile>
    void begin(int panel, int first_row) const {
        if (out.into == Into::kAdd && is_direct(panel))
            load_tile<kSumsTile>(at(panel, first_row), out.stride * sizeof(float));
        else
            zero_tile<kSumsTile>();
    }

    template <int kSumsTile, bool kBoth>
    void end(int panel, const TileOfRows& rows) const {
        end_one<kSumsTile>(panel, rows);
        if constexpr (kBoth) end_one<kSumsTile + 1>(panel + 1, rows);
    }

private:
    template <int kSumsTile>
    void end_one(int panel, const TileOfRows& rows) const {
        float* to = at(panel, rows.first_row);
        if (is_direct(panel)) return store_tile<kSumsTile>(to, out.stride * sizeof(float));
        Floats sums[kPairRows];
        store_tile<kSumsTile>(sums, kRowBytes);
        put_any(matrix, panel * kPanel, true, out.into == Into::kAdd, to, out.stride, 1,
                rows.num_rows, sums);
    }

    bool is_direct(int panel) const {
        return (panel + 1) * kPanel <= matrix.out && matrix.bias == nullptr;
    }

    float* at(int panel, int row) const { return out.rows + row * out.stride + panel * kPanel; }
};

struct IntoGated {
    static constexpr bool kOddPanels = false;
    const Matrix& matrix;
    const Inputs& gated;

    template <int kSumsTile>
    void begin(int, int) const {
        zero_tile<kSumsTile>();
    }

    template <int kSumsTile, bool kBoth>
    void end(int panel, const TileOfRows& rows) const {
        static_assert(kBoth, "a gate has its up beside it");
        Floats gates[kPairRows], ups[kPairRows];
        store_tile<kSumsTile>(gates, kRowBytes);
        store_tile<kSumsTile + 1>(ups, kRowBytes);
        put_gated(matrix, gated, panel, rows.first_row, rows.num_rows, gates, ups);
    }
};

// A range of the steps of a product. After all ranges but the last, the sums of two tiles of rows
// and two panels are kept in a buffer.
struct Steps {
    int first, end, of;
    float* sums;  // buffer that keeps the sums from one range to the next

    bool begins() const { return first == 0; }
    bool ends() const { return end == of; }
};

// Loads the sums of a tile of rows and NP panels into the AMX tiles from kSumsTile on: the initial
// sums before the first step, otherwise the sums of the previous range of steps. end() below stores
// the sums again.
template <int kSumsTile, int NP, class To>
inline void begin(const To& to, const Steps& steps, int panel, const TileOfRows& rows) {
    if (steps.begins()) {
        to.template begin<kSumsTile>(panel, rows.first_row);
        if constexpr (NP > 1) to.template begin<kSumsTile + 1>(panel + 1, rows.first_row);
    } else {
        load_tile<kSumsTile>(steps.sums + kSumsTile * kPanel * kPairRows, kRowBytes);
        if constexpr (NP > 1)
            load_tile<kSumsTile + 1>(steps.sums + (kSumsTile + 1) * kPanel * kPairRows, kRowBytes);
    }
}

template <int kSumsTile, int NP, class To>
inline void end(const To& to, const Steps& steps, int panel, const TileOfRows& rows) {
    if (steps.ends()) {
        to.template end<kSumsTile, (NP > 1)>(panel, rows);
    } else {
        store_tile<kSumsTile>(steps.sums + kSumsTile * kPanel * kPairRows, kRowBytes);
        if constexpr (NP > 1)
            store_tile<kSumsTile + 1>(steps.sums + (kSumsTile + 1) * kPanel * kPairRows, kRowBytes);
    }
}

template <int NT, int NP, class To>
void tiles_of(const Matrix& matrix, const To& to, const Steps& steps, int panel,
              const TileOfRows& tile, const TileOfRows& more, Ahead ahead) {
    const size_t panel_size = static_cast<size_t>(steps.of) * kTile;
    const Bf16* w = static_cast<const Bf16*>(matrix.panels) +
                    (panel - matrix.first_panel) * panel_size +
                    static_cast<size_t>(steps.first) * kTile;
    begin<0, NP>(to, steps, panel, tile);
    if constexpr (NT == 2) begin<2, NP>(to, steps, panel, more);
    if constexpr (NT == 1 && NP > 2) begin<2, NP>(to, steps, panel + 2, tile);
    const int before = steps.first * kStepInputs;
    multiply_steps<NT, NP>(tile.x + before * tile.num_rows, more.x + before * more.num_rows,
                           tile.num_rows, more.num_rows, w, panel_size, steps.end - steps.first,
                           ahead);
    end<0, NP>(to, steps, panel, tile);
    if constexpr (NT == 2) end<2, NP>(to, steps, panel, more);
    if constexpr (NT == 1 && NP > 2) end<2, NP>(to, steps, panel + 2, tile);
}

// Computes a range of panels of a product for all rows.
template <class To>
class ProductOfPairs {
public:
    ProductOfPairs(const Matrix& matrix, const Inputs& inputs, const To& to)
        : matrix_(matrix), to_(to), x_(reinterpret_cast<const Bf16*>(inputs.buffer)),
          tiles_{inputs.num_rows}, in_(whole_steps(matrix.in)) {}

    void panels(int first_panel, int end_panel) const {
        const int most = kInputsBytesAtOnce / static_cast<int>(sizeof(Bf16)) / in_ / kPairRows;
        const int at_once = std::clamp(most / 2 * 2, 2, kTilesAtOnceMost);
        for (int first = 0; first < tiles_.num(); first += at_once) {
            const int end = first + at_once < tiles_.num() ? first + at_once : tiles_.num();
            if (end - first == 1)
                one_tile(first, first_panel, end_panel);
            else
                many_tiles(first, end, first_panel, end_panel);
        }
    }

private:
    TileOfRows tile(int index) const {
        const int first = tiles_.first_row(index);
        return {x_ + static_cast<size_t>(first) * in_, first, tiles_.first_row(index + 1) - first};
    }

    const char* weights(int panel) const {
        return static_cast<const char*>(matrix_.panels) +
               static_cast<size_t>(panel - matrix_.first_panel) * in_ * kPanel * sizeof(Bf16);
    }

    void one_tile(int index, int panel, int end) const {
        const TileOfRows rows = tile(index);
        const Steps all{0, in_ / kStepInputs, in_ / kStepInputs, nullptr};
        shape_tiles(rows.num_rows, rows.num_rows);
        for (; panel + 4 <= end; panel += 4)
            tiles_of<1, 4>(matrix_, to_, all, panel, rows, {}, kOwn);
        for (; panel + 2 <= end; panel += 2)
            tiles_of<1, 2>(matrix_, to_, all, panel, rows, {}, kOwn);
        if constexpr (To::kOddPanels)
            if (panel < end) tiles_of<1, 1>(matrix_, to_, all, panel, rows, {}, kOwn);
    }

    // Computes first the pairs of full tiles of rows, then the last pair or the last single tile.
    void many_tiles(int first, int end, int panel, int end_panel) const {
        const bool all_full = (end - first) % 2 == 0 && tile(end - 1).num_rows == kPairRows;
        const int end_full = all_full ? end : first + (end - 1 - first) / 2 * 2;
        for (; panel < end_panel; panel += kPanelsOfShape) {
            const int end_shape =
                panel + kPanelsOfShape < end_panel ? panel + kPanelsOfShape : end_panel;
            if (end_full > first) pairs_of_tiles(first, end_full, panel, end_shape);
            if (end_full + 1 == end)
                one_tile(end_full, panel, end_shape);
            else if (end_full < end)
                pairs_of_tiles(end_full, end, panel, end_shape);
        }
    }

    void pairs_of_tiles(int first, int end, int panel, int end_panel) const {
        shape_tiles(tile(first).num_rows, tile(first + 1).num_rows);
        for (; panel + 2 <= end_panel; panel += 2) two_panels<2>(first, end, panel);
        if constexpr (To::kOddPanels)
            if (panel < end_panel) two_panels<1>(first, end, panel);
    }

    template <int NP>
    void two_panels(int first, int end, int panel) const {
        alignas(64) float sums[kTilesAtOnceMost * 2 * kPanel * kPairRows];
        const int turns = (end - first) / 2, num_steps = in_ / kStepInputs;
        const int num_blocks = (num_steps + kStepsAtOnce - 1) / kStepsAtOnce;
        const int lines = (2 * kPanel + turns - 1) / turns;
        const char* ahead = turns > 1 ? weights(panel + NP) : nullptr;
        for (int block = 0; block < num_blocks; ++block)
            for (int turn = 0; turn < turns; ++turn) {
                const Steps steps{num_steps * block / num_blocks,
                                  num_steps * (block + 1) / num_blocks, num_steps,
                                  sums + turn * 4 * kPanel * kPairRows};
                tiles_of<2, NP>(matrix_, to_, steps, panel, tile(first + 2 * turn),
                                tile(first + 2 * turn + 1), {ahead, lines});
                if (ahead != nullptr) ahead += (steps.end - steps.first) * lines * kRowBytes;
            }
    }

    const Matrix& matrix_;
    const To& to_;
    const Bf16* x_;
    PairTiles tiles_;
    int in_;
};

inline void linear_of_pairs(const Matrix& matrix, const Inputs& inputs, int first_panel,
                            int end_panel, const Output& out) {
    const IntoRows to{matrix, out};
    ProductOfPairs<IntoRows>(matrix, inputs, to).panels(first_panel, end_panel);
}

inline void gate_of_pairs(const Matrix& matrix, const Inputs& inputs, int first_panel,
                          int end_panel, const Inputs& gated) {
    const IntoGated to{matrix, gated};
    ProductOfPairs<IntoGated>(matrix, inputs, to).panels(first_panel, end_panel);
}

// Computes a product with operands in the L1 cache `times` times, to measure the rate (limits.h).
// Returns the number of operations.
inline double busy_pairs(int times) {
    constexpr int kSteps = 8;
    alignas(64) static const Bf16 ones[4 * kSteps * kTile] = {};
    const Bf16 *x = ones, *w = ones + 2 * kSteps * kTile;
    const TilesInUse tiles;
    shape_tiles(kPairRows, kPairRows);
    for (int i = 0; i < times; ++i)
        multiply_steps<2, 2>(x, x + kSteps * kTile, kPairRows, kPairRows, w,
                             kSteps * kTile, kSteps, {reinterpret_cast<const char*>(ones), 0});
    return 2.0 * times * kSteps * kStepInputs * 2 * kPairRows * 2 * kPanel;
}

}  // namespace tandem::TANDEM_ISA
