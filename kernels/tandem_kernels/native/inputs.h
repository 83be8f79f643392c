// The inputs of products. The rows are divided into tiles, and a product reads each weight once for
// all rows of a tile. There are three formats:
//
// - `fp32`: [tile][inputs][rows of the tile]. There are as few tiles of at most kTileRows rows as
//   possible, of about equal size.
// - `pairs`, in bf16, for weights in pairs of inputs (decoder.h): [tile][steps of 32 inputs]
//   [rows of the tile][32], with zeros after the last input. Tiles have at most kPairRows rows. The
//   macro TANDEM_PAIRS is defined if the processor has the instructions for this format.
// - `rows`, in fp32, for quantized weights: [rows][inputs]. The inputs are quantized to int8 when
//   all rows are complete (linear_quantized.h).

namespace tandem::TANDEM_ISA {

constexpr int kTileRows = TANDEM_TILE_ROWS;

template <int kMost>
struct RowTiles {
    int num_rows;
    int num() const { return (num_rows + kMost - 1) / kMost; }
    int first_row(int tile) const { return static_cast<int64_t>(tile) * num_rows / num(); }
    int of(int row) const { return ((static_cast<int64_t>(row) + 1) * num() - 1) / num_rows; }
};

using Tiles = RowTiles<kTileRows>;

#ifdef TANDEM_AMX
constexpr int kPairRows = 16;

// The tiles of the format `pairs`. Full tiles come first, because AMX tiles must be configured
// again for another number of rows.
struct PairTiles {
    int num_rows;
    int num() const { return (num_rows + kPairRows - 1) / kPairRows; }
    int first_row(int tile) const { return tile < num() ? tile * kPairRows : num_rows; }
    int of(int row) const { return row / kPairRows; }
};
#else
using PairTiles = Tiles;
#endif

template <class T>
struct Strided {  // a row: address of the first input or step of inputs, and stride to the next one
    T* first;
    size_t stride;
};

template <class Tiling, class T>
inline Strided<T> row_in_tiles(T* buffer, int row, int num_rows, int in, int side_by_side) {
    const Tiling tiles{num_rows};
    const int tile = tiles.of(row), first = tiles.first_row(tile);
    return {buffer + static_cast<size_t>(first) * in +
                static_cast<size_t>(row - first) * side_by_side,
            static_cast<size_t>(tiles.first_row(tile + 1) - first) * side_by_side};
}

inline int whole_steps(int in) { return (in + kStepInputs - 1) / kStepInputs * kStepInputs; }

// The destination of one row. A row is written from its first number to its last, kLanes numbers at
// a time; the last time there may be fewer.
struct InputRow {
    int in;
    Strided<float> numbers;
    size_t next_row;  // distance to the next row of the tile, in numbers
#ifdef TANDEM_PAIRS
    Strided<Bf16> steps;  // the destination in the format `pairs`; null: `pairs` is not used

    // Writes numbers in the format `pairs`. Denormal numbers become zeros, as products treat them
    // as zeros anyway.
    void put_pairs(int at, Floats run, int num) const {
        Bf16* to = steps.first + at / kStepInputs * steps.stride + at % kStepInputs;
        const auto mask = static_cast<__mmask16>((1 << num) - 1);
        const __m256i narrow = (__m256i)_mm512_cvtneps_pbh((__m512)run);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm256_maskz_mov_epi16(mask, narrow));
        if (at + num == in && at % kStepInputs == 0)
            _mm256_store_si256(reinterpret_cast<__m256i*>(to + kLanes), __m256i{});
    }
#endif

    // Returns the destination of the row that is `rows` rows further in the same tile.
    InputRow below(int rows) const {
        InputRow row = *this;
#ifdef TANDEM_PAIRS
        if (steps.first != nullptr) {
            row.steps.first += static_cast<size_t>(rows) * kStepInputs;
            return row;
        }
#endif
        row.numbers.first += rows * next_row;
        return row;
    }

    // Copies the row to `to`. Consecutive numbers are `stride` apart there.
    void copy_to(float* to, size_t stride) const {
#ifdef TANDEM_PAIRS
        if (steps.first != nullptr) {
            for (int at = 0; at < in; at += kLanes) {
                const Floats run = load(steps.first + at / kStepInputs * steps.stride +
                                        at % kStepInputs);
                const int num = in - at < kLanes ? in - at : kLanes;
                for (int i = 0; i < num; ++i) to[(at + i) * stride] = run[i];
            }
            return;
        }
#endif
        for (int at = 0; at < in; ++at) to[at * stride] = numbers.first[at * numbers.stride];
    }

    void put(int at, Floats run, int num = kLanes) const {
#ifdef TANDEM_PAIRS
        if (steps.first != nullptr) return put_pairs(at, run, num);
#endif
        float* to = numbers.first + at * numbers.stride;
        if (numbers.stride == 1) return store_some(to, run, num);
        for (int i = 0; i < num; ++i, to += numbers.stride) *to = run[i];
    }
};

// LoRA deltas to add to gates and ups before the activation: [rows, stride]. In a row, the deltas
// of all gates come before those of all ups. Only the first rows of a step have deltas.
struct AddedGates {
    const float* rows = nullptr;
    int num_rows = 0;
    size_t stride = 0;
};

// The input rows of a product with weights of `kind`.
struct Inputs {
    float* buffer;  // at least input_floats() floats
    int32_t kind;
    int num_rows, in;
    // Memory for the quantized inputs, if weights are quantized, or for each thread's expanded
    // panels, if weights are fp8.
    float* rounded;
    AddedGates added = {};  // LoRA deltas for gate_up products

    InputRow row(int row) const {
#ifdef TANDEM_PAIRS
        if (kind == BF16_PAIRS)
            return {in, {}, 0,
                    row_in_tiles<PairTiles>(reinterpret_cast<Bf16*>(buffer), row, num_rows,
                                            whole_steps(in), kStepInputs)};
#endif
        if (is_quantized(kind))
            return {in, {buffer + static_cast<size_t>(row) * in, 1}, static_cast<size_t>(in)};
        return {in, row_in_tiles<Tiles>(buffer, row, num_rows, in, 1), 1};
    }
};

inline size_t input_floats(size_t num_rows, int in) { return num_rows * whole_steps(in); }

inline Inputs inputs_of(const Matrix& matrix, float* buffer, int num_rows,
                        float* rounded = nullptr) {
    return {buffer, kind_of_inputs(matrix.kind), num_rows, matrix.in, rounded, {}};
}

}  // namespace tandem::TANDEM_ISA
