// Products y = x W^T of rows in tiles (inputs.h) with a packed matrix.
//
// Every output is summed over its inputs in one order. The inputs are divided into blocks
// (decoder.h), and a block into runs of kChain = 64 inputs. The products of a run are added one
// after another to one sum, and then the sums of the runs are added. Runs are short, because
// rounding errors grow with their length. The order does not depend on the other rows of a tile.

namespace tandem::TANDEM_ISA {

constexpr int kTilesAtOnce = 60 / kTileRows;  // tiles whose inputs fit in the L2 cache
constexpr int kSums = TANDEM_SUMS;            // vectors of sums that fit in registers
constexpr int kLine = 64;                     // bytes in a cache line
constexpr int kChain = 64;                    // number of products added to one sum

enum class Into { kSet, kAdd };

// Computes the sums of a run of `num` inputs, for NV vectors of outputs in adjacent panels and MR
// rows. Adds them to `to` [NV][MR] if `adds` is true, and otherwise stores them there. `x` and `w`
// point to the run's first input; panels are `panel_stride` weights apart. Also prefetches from
// `ahead` on, `step` bytes for every two inputs. Returns the address after the prefetched bytes.
//
// This must not be inlined. GCC would keep the sums of earlier runs in registers, too, and would
// then read and write half of this run's sums in memory for every four inputs.
template <class W, int MR, int NV>
__attribute__((noinline)) const char* multiply_chain(const float* x, const W* w, int num,
                                                     size_t panel_stride, const char* ahead,
                                                     int step, bool adds, Floats* to) {
    Floats sums[NV][MR];
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v)
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) sums[v][m] = Floats{};
    const auto weights = [&](int v, int k) __attribute__((always_inline)) {
        return lanes(w + v / kVectors * panel_stride + k * kPanel, v % kVectors);
    };
    const auto add = [&](int k) __attribute__((always_inline)) {
        if constexpr (NV <= MR) {
            Floats b[NV];
#pragma GCC unroll 16
            for (int v = 0; v < NV; ++v) b[v] = weights(v, k);
            // One input is broadcast at a time; more would not fit in registers.
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m) {
                const Floats input = all(x[k * MR + m]);
#pragma GCC unroll 16
                for (int v = 0; v < NV; ++v) sums[v][m] = fused(input, b[v], sums[v][m]);
            }
        } else {
            Floats input[MR];
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m) input[m] = all(x[k * MR + m]);
#pragma GCC unroll 16
            for (int v = 0; v < NV; ++v) {
                const Floats b = weights(v, k);
#pragma GCC unroll 16
                for (int m = 0; m < MR; ++m) sums[v][m] = fused(input[m], b, sums[v][m]);
            }
        }
    };
    int k = 0;
    for (; k + 4 <= num; k += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            if (i % 2 == 0) {
                __builtin_prefetch(ahead, 0, 2);
                for (int more = kLine; more < step; more += kLine)
                    __builtin_prefetch(ahead + more, 0, 2);
                ahead += step;
            }
            add(k + i);
        }
    }
    for (; k < num; ++k) add(k);
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v)
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            Floats& sum = to[v * MR + m];
            sum = adds ? sum + sums[v][m] : sums[v][m];
        }
    return ahead;
}

// Computes the sums of `num` inputs, one run of kChain inputs after the other.
template <class W, int MR, int NV>
inline __attribute__((always_inline)) void multiply(const float* x, const W* w, int num,
                                                    const char* ahead, int step,
                                                    Floats (&sums)[NV][MR]) {
    const size_t panel_stride = static_cast<size_t>(num) * kPanel;
    for (int first = 0; first < num; first += kChain)
        ahead = multiply_chain<W, MR, NV>(x + first * MR, w + first * kPanel,
                                          num - first < kChain ? num - first : kChain, panel_stride,
                                          ahead, step, first > 0, &sums[0][0]);
}

struct Output {
    float* rows;  // [rows, stride]
    size_t stride;
    Into into;
};

// Writes one vector of sums, or only its first `num` elements.
inline __attribute__((always_inline)) void put_vector(const Matrix& matrix, int output,
                                                      bool first_inputs, bool adds, float* to,
                                                      Floats sums, int num = kLanes) {
    const auto load_of = [num](const float* from) {
        return num == kLanes ? load(from) : load_some(from, num);
    };
    if (matrix.scales) sums = sums * load_of(matrix.scales + output);
    if (matrix.bias && first_inputs) sums = sums + load_of(matrix.bias + output);
    if (adds) sums = load_of(to) + sums;
    std::memcpy(to, &sums, num * sizeof(float));
}

// Writes the sums of a tile. This is the slow path, for tiles that reach beyond the last output and
// for matrices with scales or biases.
__attribute__((noinline)) inline void put_any(const Matrix& matrix, int first_output,
                                              bool first_inputs, bool adds, float* to,
                                              size_t stride, int vectors, int rows,
                                              const Floats* sums) {
    for (int v = 0; v < vectors; ++v) {
        const int output = first_output + v * kLanes;
        const int num = matrix.out - output < kLanes ? matrix.out - output : kLanes;
        for (int m = 0; m < rows && num > 0; ++m)
            put_vector(matrix, output, first_inputs, adds, to + m * stride + v * kLanes,
                       sums[v * rows + m], num);
    }
}

template <int MR, int NV>
inline __attribute__((always_inline)) void put(const Matrix& matrix, int first_output,
                                               bool first_inputs, const Output& out, int first_row,
                                               const Floats (&sums)[NV][MR]) {
    const bool adds = out.into == Into::kAdd || !first_inputs;
    float* to = out.rows + first_row * out.stride + first_output;
    if (first_output + NV * kLanes > matrix.out || matrix.scales || matrix.bias) {
        Floats kept[NV * MR];  // a copy in memory, so that `sums` itself can stay in registers
#pragma GCC unroll 16
        for (int v = 0; v < NV; ++v)
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m) kept[v * MR + m] = sums[v][m];
        put_any(matrix, first_output, first_inputs, adds, to, out.stride, NV, MR, kept);
    } else if (adds) {
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m, to += out.stride)
#pragma GCC unroll 16
            for (int v = 0; v < NV; ++v)
                store(to + v * kLanes, load(to + v * kLanes) + sums[v][m]);
    } else {
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m, to += out.stride)
#pragma GCC unroll 16
            for (int v = 0; v < NV; ++v) store(to + v * kLanes, sums[v][m]);
    }
}

// The data that all tiles of one block of inputs share.
template <class W>
struct Share {
    const Matrix& matrix;
    const Output& out;
    const W* weights;  // weights of the block's first stored panel
    int first_input, num_inputs;
};

// Each tile of rows prefetches a part of the next panel. `tile` is the index of a tile of `tiles`.
struct Turn {
    int tile, tiles;
};

template <class W, int MR, int NV>
void tile(const Share<W>& share, const float* x, int panel, int first_row, Turn turn) {
    const int panel_size = share.num_inputs * kPanel;
    const W* w = share.weights + static_cast<size_t>(panel - share.matrix.first_panel) * panel_size;
    const W* ahead = w;
    int step = 2 * kPanel * sizeof(W);
    if (turn.tiles > 1) {
        ahead += panel_size + static_cast<size_t>(panel_size) * turn.tile / turn.tiles;
        step /= turn.tiles;
    } else {  // With a single short tile, panels are too short for the hardware prefetcher.
        ahead += static_cast<size_t>(panel_size) * (NV / kVectors);
        step *= NV / kVectors;
    }
    Floats sums[NV][MR];
    multiply<W, MR, NV>(x, w, share.num_inputs, reinterpret_cast<const char*>(ahead), step, sums);
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v)
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) sums[v][m] = in_order<W>(sums[v][m]);
    put<MR, NV>(share.matrix, panel * kPanel, share.first_input == 0, share.out, first_row, sums);
}

// Returns the number of panels to compute at a time: enough to keep the multipliers busy, but few
// enough for the sums to fit in registers.
constexpr int panels_at_once(int rows) {
    const int most = kSums / (rows * kVectors);
    return most < 1 ? 1 : (most > 4 ? 4 : most);
}

template <class W, int MR>
void panels(const Share<W>& share, const float* x, int panel, int end_panel, int first_row,
            Turn turn) {
    constexpr int NP = panels_at_once(MR);
    for (; panel + NP <= end_panel; panel += NP)
        tile<W, MR, NP * kVectors>(share, x, panel, first_row, turn);
    for (; panel < end_panel; ++panel) tile<W, MR, kVectors>(share, x, panel, first_row, turn);
}

template <class W, int MR>
void any_rows(int num_rows, const Share<W>& share, const float* x, int first_panel, int end_panel,
              int first_row, Turn turn) {
    if constexpr (MR > 0) {
        if (num_rows == MR)
            panels<W, MR>(share, x + static_cast<size_t>(share.first_input) * MR, first_panel,
                          end_panel, first_row, turn);
        else
            any_rows<W, MR - 1>(num_rows, share, x, first_panel, end_panel, first_row, turn);
    }
}

// Computes the outputs of the panels from first_panel on, for all rows.
template <class W>
void linear_of(const Matrix& matrix, const float* x, int num_rows, int first_panel, int end_panel,
               const Output& out) {
    const Tiles tiles{num_rows};
    for (int block = 0; block < tiles.num(); block += kTilesAtOnce) {
        const int end = block + kTilesAtOnce < tiles.num() ? block + kTilesAtOnce : tiles.num();
        const int at_once = end - block == 1 ? end_panel - first_panel : 1;
        for (int k = 0; k < num_input_blocks(matrix.in); ++k) {
            const int first = first_input(matrix.in, k);
            const W* weights = static_cast<const W*>(matrix.panels) +
                               static_cast<size_t>(first) * matrix.num_panels * kPanel;
            const Share<W> share{matrix, out, weights, first, first_input(matrix.in, k + 1) - first};
            for (int panel = first_panel; panel < end_panel; panel += at_once)
                for (int tile = block; tile < end; ++tile) {
                    const int row = tiles.first_row(tile);
                    any_rows<W, kTileRows>(tiles.first_row(tile + 1) - row, share,
                                           x + static_cast<size_t>(row) * matrix.in, panel,
                                           panel + at_once, row, {tile - block, end - block});
                }
        }
    }
}

#ifdef TANDEM_PAIRS
inline void linear_of_pairs(const Matrix& matrix, const Inputs& inputs, int first_panel,
                            int end_panel, const Output& out);
inline void gate_of_pairs(const Matrix& matrix, const Inputs& inputs, int first_panel,
                          int end_panel, const Inputs& gated);

// Computes activation(gate) * up for one tile, with the gates of a panel and the ups of the next
// panel. Writes the results as input of the next product.
inline void put_gated(const Matrix& matrix, const Inputs& gated, int panel, int first_row,
                      int num_rows, const Floats* gates, const Floats* ups) {
    const int at = panel / 2 * kPanel;
    const int num = gated.in - at < kPanel ? gated.in - at : kPanel;
    Floats gate_bias = {}, up_bias = {};
    if (matrix.bias != nullptr) {
        gate_bias = load(matrix.bias + panel * kPanel);
        up_bias = load(matrix.bias + (panel + 1) * kPanel);
    }
    const InputRow first = gated.row(first_row);
    const AddedGates added = gated.added;
    const auto put_all = [&](Gating gating) __attribute__((always_inline)) {
        for (int m = 0; m < num_rows; ++m) {
            Floats gate = gates[m] + gate_bias, up = ups[m] + up_bias;
            if (first_row + m < added.num_rows) {
                const float* const row = added.rows + (first_row + m) * added.stride + at;
                gate += load_some(row, num);
                up += load_some(row + gated.in, num);
            }
            first.below(m).put(at, gated_for_bf16(gate, up, gating), num);
        }
    };
    const Gating& wanted = matrix.gating;
    if (wanted.activation == SILU_GATE && wanted.alpha == 1.0f && wanted.limit == 1.0f)
        // the most common activation, without a branch per vector
        put_all({SILU_GATE, 1.0f, 1.0f, 0.0f});
    else
        put_all(wanted);
}

inline void gate_of_fp8(const Matrix& matrix, const Inputs& inputs, int first_panel, int end_panel,
                        const Inputs& gated, int thread);

// Computes activation(gate) * up for the panels of this thread. Panels of gates and ups alternate.
inline void gate(const Matrix& gate_up, const Inputs& inputs, const Inputs& gated,
                 const Team& team) {
    const int64_t num = gate_up.out / (2 * kPanel);
    const int first = 2 * static_cast<int>(num * team.thread / team.threads);
    const int end = 2 * static_cast<int>(num * (team.thread + 1) / team.threads);
    if (is_fp8(gate_up.kind)) return gate_of_fp8(gate_up, inputs, first, end, gated, team.thread);
    gate_of_pairs(gate_up, inputs, first, end, gated);
}
#endif

inline void linear_of_fp8(const Matrix& matrix, const Inputs& inputs, int panel, int end_panel,
                          const Output& out, int thread);

inline void linear_of_quantized(const Matrix& matrix, const Inputs& inputs, int first_panel,
                                int end_panel, const Output& out);
inline void round_inputs(const Matrix& matrix, const Inputs& inputs, const Team& team);

struct Range {
    int first, end;
};

// The range of panels that one thread computes.
inline Range share_of(const Matrix& matrix, const Team& team) {
    const int64_t num = (matrix.out + kPanel - 1) / kPanel;
    return {static_cast<int>(num * team.thread / team.threads),
            static_cast<int>(num * (team.thread + 1) / team.threads)};
}

// Computes MR rows of a product with fp32 weights, whose inputs are in the format `rows`.
template <int MR>
inline void plain_rows(const Matrix& matrix, const Inputs& inputs, int panel, int first_row,
                       const Output& out) {
    const float* const x = inputs.buffer + static_cast<size_t>(first_row) * inputs.in;
    Floats sums[kVectors][MR] = {};
    for (int block = 0; block < num_input_blocks(matrix.in); ++block) {
        const int first = first_input(matrix.in, block), end = first_input(matrix.in, block + 1);
        const float* weights = static_cast<const float*>(matrix.panels) +
                               static_cast<size_t>(first) * matrix.num_panels * kPanel +
                               static_cast<size_t>(panel - matrix.first_panel) * (end - first) * kPanel;
        for (int k = first; k < end; ++k, weights += kPanel)
            for (int v = 0; v < kVectors; ++v)
                for (int m = 0; m < MR; ++m)
                    sums[v][m] =
                        fused(load(weights + v * kLanes), x[m * inputs.in + k], sums[v][m]);
    }
    put<MR, kVectors>(matrix, panel * kPanel, true, out, first_row, sums);
}

// Computes a product with a few fp32 weights that follows products with quantized weights
// (Matrix::rest).
inline void linear_of_plain_rows(const Matrix& matrix, const Inputs& inputs, const Output& out,
                                 const Team& team) {
    const auto [first, end] = share_of(matrix, team);
    for (int panel = first; panel < end; ++panel) {
        int row = 0;
        for (; row + 4 <= inputs.num_rows; row += 4)
            plain_rows<4>(matrix, inputs, panel, row, out);
        for (; row < inputs.num_rows; ++row) plain_rows<1>(matrix, inputs, panel, row, out);
    }
}

// Computes this thread's panels of a product with quantized weights. The threads first quantize the
// inputs together, and wait for each other.
inline void linear_by_rounding(const Matrix& matrix, const Inputs& inputs, Output out,
                               const Team& team) {
    for (const Matrix* part = &matrix; part != nullptr; part = part->rest) {
        if (is_quantized(part->kind)) {
            if (part != &matrix) team.wait();
            round_inputs(*part, inputs, team);
            team.wait();
            const auto [first, end] = share_of(*part, team);
            linear_of_quantized(*part, inputs, first, end, out);
        } else {
            linear_of_plain_rows(*part, inputs, out, team);
        }
        out.rows += part->out;
    }
}

// Computes this thread's panels of a product. All threads of a step must call this function.
inline void linear(const Matrix& matrix, const Inputs& inputs, const Output& out,
                   const Team& team) {
    const float* x = inputs.buffer;
    const int num_rows = inputs.num_rows;
    if (is_quantized(matrix.kind))
        return linear_by_rounding(matrix, inputs, out, team);
    const auto [first, end] = share_of(matrix, team);
    if (is_fp8(matrix.kind)) return linear_of_fp8(matrix, inputs, first, end, out, team.thread);
#ifdef TANDEM_PAIRS
    if (matrix.kind == BF16_PAIRS) return linear_of_pairs(matrix, inputs, first, end, out);
#endif
    if (matrix.kind == BF16)
        linear_of<Bf16>(matrix, x, num_rows, first, end, out);
    else if (matrix.kind == I8)
        linear_of<int8_t>(matrix, x, num_rows, first, end, out);
    else
        linear_of<float>(matrix, x, num_rows, first, end, out);
}

}  // namespace tandem::TANDEM_ISA
