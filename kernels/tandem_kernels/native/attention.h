// Causal grouped-query attention that reads the KV blocks in place.
//
// The work of a layer is divided into items. An item is a few rows of one sequence for one KV head.
// A row is a pair of a query and one of the heads that share the KV head. Keys are processed in
// tiles of 64 with online softmax (arXiv:2205.14135). The first key of a tile has a position that
// is a multiple of 64.
//
// If a row attends to no key of a tile, the tile changes no bit of the row's sums. So the result of
// a row does not depend on the other rows of the item, on chunk boundaries or on the block size.
//
// Keys are also divided into pieces of kPieceKeys, which begin at multiples of this number. A row has
// sums of its own for each piece, and the sums of its pieces are added in the order of the pieces.
// So its bits do not depend on whether one thread computes all of its pieces, one after the other, or
// several threads compute one each. The second is done if a step has so few items, or such long ones,
// that threads would wait for each other (forward.h).
//
// With a window, tiles before the window of the item's first row are skipped. With a KV budget
// (docs/kv_budgets.md), a row attends to the first and the last keys of its context, and the tiles
// between them are skipped.
//
// With sparse attention, an item has rows of one query, and reads only the keys that an indexer has
// chosen for it (indexer.h). They are numbered in the order of their positions, and tiles are formed
// of these numbers. If all keys are chosen, the result has the same bits as without an indexer.
//
// If a layer has a compressor (compressor.h), rows attend to entries beside the keys in the window.
// Both have one numbering: the entries that a row sees, or that were chosen for it, have the numbers
// from 0 on, and the key at position p has the number base + p. `base` is a multiple of kPieceKeys
// that is no less than the number of entries. So a tile or a piece never has keys of both kinds, and
// which keys of a kind are in one tile or piece does not depend on `base`.

#include "block_sums.h"

namespace tandem::TANDEM_ISA {

constexpr int kPieceKeys = 512;  // keys in a piece, a multiple of all sizes of tiles
constexpr int kKeys = 64;        // keys in a tile
constexpr int kKeysMax = 128;    // largest number of keys in a tile; attention_dot.h has 128
constexpr int kRowsMax = 192;    // largest number of rows in an item
constexpr int kPanels = kKeys / kPanel;

// The numbers of a row are followed by some unused ones. Otherwise the numbers that a product takes
// from several rows at a time would be in one bank of the L1 cache, and be read one by one.
constexpr int kGap = 4;
constexpr int kScoreRow = kKeys + kGap;  // size of a row of scores

// The words in which keys are transposed: 4 bytes with one fp32 number or two adjacent bf16 ones.
template <class T>
constexpr int kOfWord = sizeof(uint32_t) / sizeof(T);

inline Floats number_of(const uint32_t* words, int, float) {
    return load(reinterpret_cast<const float*>(words));
}

inline Floats number_of(const uint32_t* words, int i, Bf16) { return load_of_words(words, i); }

typedef uint32_t Eight __attribute__((vector_size(32)));

// Transposes keys [num_keys][dim] to [words of dim][64 keys] in blocks of 8 x 8. Also prefetches
// the values, each of which is `run` elements after its key.
template <class T>
inline void transpose(const T* const* rows, size_t run, int num_keys, int dim, uint32_t* to) {
    const int num_words = dim / kOfWord<T>;
    for (int key = 0; key < num_keys; key += 8) {
        for (int d = 0; d < num_words; d += 8) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const int line = d / 2 + i;
                __builtin_prefetch(rows[key + line % 8] + run + line / 8 * (64 / sizeof(T)), 0, 2);
            }
            Eight r[8], s[8];  // kept in registers if all loops are unrolled
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i)
                std::memcpy(&r[i], rows[key + i] + d * kOfWord<T>, sizeof r[i]);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i += 2) {
                s[i] = shuffled<0, 8, 1, 9, 4, 12, 5, 13>(r[i], r[i + 1]);
                s[i + 1] = shuffled<2, 10, 3, 11, 6, 14, 7, 15>(r[i], r[i + 1]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; i += 4) {
                r[i] = shuffled<0, 1, 8, 9, 4, 5, 12, 13>(s[i], s[i + 2]);
                r[i + 1] = shuffled<2, 3, 10, 11, 6, 7, 14, 15>(s[i], s[i + 2]);
                r[i + 2] = shuffled<0, 1, 8, 9, 4, 5, 12, 13>(s[i + 1], s[i + 3]);
                r[i + 3] = shuffled<2, 3, 10, 11, 6, 7, 14, 15>(s[i + 1], s[i + 3]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < 4; ++i) {
                const Eight a = shuffled<0, 1, 2, 3, 8, 9, 10, 11>(r[i], r[i + 4]);
                const Eight b = shuffled<4, 5, 6, 7, 12, 13, 14, 15>(r[i], r[i + 4]);
                std::memcpy(to + (d + i) * kKeys + key, &a, sizeof a);
                std::memcpy(to + (d + i + 4) * kKeys + key, &b, sizeof b);
            }
        }
    }
}

// sums[p][v][m] += numbers[m] * vector(p, v), for NP panels and MR rows. Besides the sums, only the
// smaller operand fits in registers.
template <int MR, int NP, class Number, class Vector>
inline __attribute__((always_inline)) void add_products(Floats (&sums)[NP][kVectors][MR],
                                                        Number number, Vector vector) {
    if constexpr (NP * kVectors <= MR) {
        Floats vectors[NP][kVectors];
#pragma GCC unroll 8
        for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) vectors[p][v] = vector(p, v);
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            const Floats each = all(number(m));
#pragma GCC unroll 8
            for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) sums[p][v][m] = fused(each, vectors[p][v], sums[p][v][m]);
        }
    } else {
        Floats numbers[MR];
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) numbers[m] = all(number(m));
#pragma GCC unroll 8
        for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                const Floats each = vector(p, v);
#pragma GCC unroll 16
                for (int m = 0; m < MR; ++m)
                    sums[p][v][m] = fused(numbers[m], each, sums[p][v][m]);
            }
    }
}

// Computes scores[m][NP panels] = q[m][dim] . keys[dim][64] for MR rows. Rows of q are `stride`
// numbers apart.
template <class T, int MR, int NP>
inline void score(const float* q, size_t stride, const uint32_t* keys, int dim, float* scores) {
    Floats sums[NP][kVectors][MR] = {};
    for (int word = 0; word < dim / kOfWord<T>; ++word, keys += kKeys)
#pragma GCC unroll 2
        for (int i = 0; i < kOfWord<T>; ++i)
            add_products<MR, NP>(
                sums, [&](int m) { return q[m * stride + word * kOfWord<T> + i]; },
                [&](int p, int v) {
                    return number_of(keys + p * kPanel + v * kLanes, i, T{});
                });
#pragma GCC unroll 8
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m)
                store(scores + m * kScoreRow + p * kPanel + v * kLanes, sums[p][v][m]);
}

template <class T, int MR>
inline void score_rows(const float* q, size_t stride, const uint32_t* keys, int dim, int num_keys,
                       float* scores) {
    // NP must divide the number of panels in a tile, which 3 does not.
    constexpr int most = panels_at_once(MR), NP = most == 3 ? 2 : most;
    for (int key = 0; key < num_keys; key += NP * kPanel)
        score<T, MR, NP>(q, stride, keys + key, dim, scores + key);
}

// A tile of keys and values.
template <class T>
struct Tile {
    const uint32_t* keys;   // transposed
    const T* const* rows;   // address of each key
    const T* const* ahead;  // addresses of the next tile's keys, to prefetch
    const float* widened;   // all values in fp32, if many rows use them; else null
    size_t run;             // distance from a key to its value, in elements
    int dim;
    float cap;  // soft cap of scores; 0: none
    int first;  // position of the first key
};

// Converts values [num_keys][dim] to fp32, in the order of elements of lanes_again().
template <class T>
inline void widen_values(const Tile<T>& tile, int num_keys, float* to) {
    constexpr int kLine = 64 / sizeof(T);
    for (int key = 0; key < num_keys; ++key, to += tile.dim) {
        for (int first = 0; first < tile.dim; first += kLine)
            __builtin_prefetch(tile.ahead[key] + first, 0, 2);
        for (int first = 0; first < tile.dim; first += kPanel)
            for (int v = 0; v < kVectors; ++v)
                store(to + first + v * kLanes,
                      lanes_again(tile.rows[key] + tile.run + first, v));
    }
}

// Computes out[m] = out[m] * factors[m] + weights[m][num_keys] . values[num_keys] for MR rows and
// NP panels of a head, from panel `first` on. `value_of(key)` returns the address of a value. The
// elements of a panel of `out` are in the order of lanes_again().
template <int MR, int NP, class ValueOf>
inline void gather(const float* weights, ValueOf value_of, int num_keys, int dim, int first,
                   const float* factors, float* out) {
    Floats sums[NP][kVectors][MR];
#pragma GCC unroll 8
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m)
                sums[p][v][m] =
                    load(out + m * dim + first + p * kPanel + v * kLanes) * factors[m];
    for (int key = 0; key < num_keys; ++key) {
        const auto* value = value_of(key, first);
        add_products<MR, NP>(
            sums, [&](int m) { return weights[m * kScoreRow + key]; },
            [&](int p, int v) { return lanes_again(value + p * kPanel, v); });
    }
#pragma GCC unroll 8
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m)
                store(out + m * dim + first + p * kPanel + v * kLanes, sums[p][v][m]);
}

template <int MR, class ValueOf>
inline void gather_rows(const float* weights, ValueOf value_of, int num_keys, int dim,
                        const float* factors, float* out) {
    constexpr int NP = panels_at_once(MR);
    int first = 0;
    for (; first + NP * kPanel <= dim; first += NP * kPanel)
        gather<MR, NP>(weights, value_of, num_keys, dim, first, factors, out);
    for (; first < dim; first += kPanel)
        gather<MR, 1>(weights, value_of, num_keys, dim, first, factors, out);
}

// Puts a panel that is in the order of lanes_again() in the order of outputs.
inline void put_in_order(Floats (&)[kVectors], float) {}

inline void put_in_order([[maybe_unused]] Floats (&panel)[kVectors], Bf16) {
#if TANDEM_LANES < 16
    constexpr int kWords = kVectors / 2;
    Floats ordered[kVectors];
    for (int v = 0; v < kWords; ++v) {
        const Floats even = panel[v], odd = panel[v + kWords];
#if TANDEM_LANES == 8
        ordered[2 * v] = shuffled<0, 8, 1, 9, 2, 10, 3, 11>(even, odd);
        ordered[2 * v + 1] = shuffled<4, 12, 5, 13, 6, 14, 7, 15>(even, odd);
#else
        ordered[2 * v] = shuffled<0, 4, 1, 5>(even, odd);
        ordered[2 * v + 1] = shuffled<2, 6, 3, 7>(even, odd);
#endif
    }
    std::memcpy(panel, ordered, sizeof panel);
#endif
}

// The keys to which a row attends: keys 0 to `start` - 1 and keys `first` to `end` - 1. Without a
// KV budget, `start` is 0. With a KV budget it may be greater, but never exceeds `first`.
// `in(tile)` returns the same keys, numbered from the first key of a tile.
struct Seen {
    int start, first, end;

    Seen in(int tile) const { return {start - tile, first - tile, end - tile}; }
    bool any(int num_keys) const { return start > 0 || (end > 0 && first < num_keys); }

    // Calls hide(first, end) with the range of hidden keys between `start` and `first` in a tile.
    template <class Hide>
    void before(int num_keys, Hide hide) const {
        hide(std::max(start, 0), std::min(first, num_keys));
    }
};

// Returns the keys to which a query attends. `window` is that of the layer (decoder.h).
inline Seen keys_seen(const Span& span, int query, int window) {
    const int end = span.context_len - span.num_queries + query + 1;
    if (window < 0) return {0, (end - 1) / -window * -window, end};
    if (window > 0) return {0, end > window ? end - window : 0, end};
    const int first = span.num_last > 0 ? end - span.num_last : 0;
    return first > span.num_first ? Seen{span.num_first, first, end} : Seen{0, 0, end};
}

// Computes cap * tanh(score / cap) for whole panels, with tanh(x) = 1 - 2 / (exp(2 x) + 1).
inline void cap_scores(float* scores, int num_keys, float cap) {
    if (cap == 0.0f) return;
    for (int key = 0; key < num_keys; key += kLanes) {
        const Floats power = exp(load(scores + key) * (2.0f / cap));
        store(scores + key, cap - 2.0f * cap / (power + 1.0f));
    }
}

constexpr float kLog2E = 1.44269504088896341f;

// The running softmax of a row over some keys. The weight of a key is 2^(score * log2 e - base).
struct RowSums {
    float mass[kPanel] = {};  // partial sums of the weights, added up at the end
    float base = -INFINITY;

    // Returns whether the row attends to none of the keys.
    bool is_empty() const { return base == -INFINITY && mass[0] == 0.0f; }

    float total() const {
        Floats parts[kVectors];
        for (int v = 0; v < kVectors; ++v) parts[v] = load(mass + v * kLanes);
        return sum(parts);
    }
};

// Raises the bases of the sums of MR rows to their highest scores of a tile of `num_keys` keys. Row m
// attends to the keys in `seen[m]`. Writes the factors by which the rows' earlier sums must be
// multiplied.
template <int MR>
inline void raise_bases(float* scores, const Seen* seen, int num_keys, RowSums* sums,
                        float (&factors)[MR]) {
    constexpr int kFactors = (MR + kLanes - 1) / kLanes * kLanes;
    float apart[kFactors] = {};  // exp2(0) is 1
    for (int m = 0; m < MR; ++m, scores += kScoreRow) {
        if (!seen[m].any(num_keys)) continue;
        seen[m].before(num_keys, [&](int key, int end) {
            for (; key < end; ++key) scores[key] = -INFINITY;
        });
        for (int key = seen[m].end; key < num_keys; ++key) scores[key] = -INFINITY;
        Floats high[kVectors];
        for (int v = 0; v < kVectors; ++v) high[v] = load(scores + v * kLanes);
        for (int at = kPanel; at < num_keys; at += kPanel)
            for (int v = 0; v < kVectors; ++v)
                high[v] = max(high[v], load(scores + at + v * kLanes));
        const float before = sums[m].base, in_tile = largest(high) * kLog2E;
        const bool is_higher = in_tile > before;
        sums[m].base = is_higher ? in_tile : before;
        apart[m] = is_higher ? before - in_tile : 0.0f;
    }
    for (int at = 0; at < kFactors; at += kLanes) store(apart + at, exp2(load(apart + at)));
    std::memcpy(factors, apart, sizeof factors);
}

// Replaces a row's scores by softmax weights, after raise_bases(), which has computed `factor`.
inline void weigh(float* scores, Seen seen, int num_keys, float factor, RowSums& sums) {
    if (!seen.any(num_keys)) {
        std::memset(scores, 0, num_keys * sizeof(float));
        return;
    }
    const float base = sums.base;
    Floats total[kVectors];
    for (int v = 0; v < kVectors; ++v) total[v] = load(sums.mass + v * kLanes) * factor;
    for (int at = 0; at < num_keys; at += kPanel)
        for (int v = 0; v < kVectors; ++v) {
            const Floats weight = exp2(fused(load(scores + at + v * kLanes), kLog2E, -base));
            store(scores + at + v * kLanes, weight);
            total[v] += weight;
        }
    for (int v = 0; v < kVectors; ++v) store(sums.mass + v * kLanes, total[v]);
}

// Returns the softmax weight of a head's attention sink, relative to the base of the row's sums.
inline float mass_of_sink(const Layer& layer, int head, float base) {
    if (layer.sinks == nullptr) return 0.0f;
    return std::exp2(fused(layer.sinks[head], kLog2E, -base));
}

template <class T, int MR>
void attend_rows(int num_rows, const float* q, const Tile<T>& tile, const Seen* seen, float* scores,
                 RowSums* sums, float* out, const BlockShares* shares) {
    if constexpr (MR > 0) {
        if (num_rows != MR)
            return attend_rows<T, MR - 1>(num_rows, q, tile, seen, scores, sums, out, shares);
        const int most = seen[MR - 1].end < kKeys ? seen[MR - 1].end : kKeys;
        const int num_keys = (most + kPanel - 1) / kPanel * kPanel;
        score_rows<T, MR>(q, tile.dim + kGap, tile.keys, tile.dim, num_keys, scores);
        float factors[MR];
        for (int m = 0; m < MR; ++m) cap_scores(scores + m * kScoreRow, num_keys, tile.cap);
        // All bases are raised first, because a row's weights wait for its highest score.
        raise_bases<MR>(scores, seen, num_keys, sums, factors);
        for (int m = 0; m < MR; ++m)
            weigh(scores + m * kScoreRow, seen[m], num_keys, factors[m], sums[m]);
        for (int m = 0; shares != nullptr && m < MR; ++m) {
            shares[m].scale(factors[m], tile.first);
            for (int key = 0; key < num_keys; key += kPanel)
                shares[m].add(scores + m * kScoreRow + key, tile.first + key,
                              tile.first + seen[m].end);
        }
        if (tile.widened != nullptr)
            gather_rows<MR>(
                scores, [&](int key, int first) { return tile.widened + key * tile.dim + first; },
                most, tile.dim, factors, out);
        else
            gather_rows<MR>(
                scores,
                [&](int key, int first) {
                    __builtin_prefetch(tile.ahead[key] + first, 0, 2);
                    return tile.rows[key] + tile.run + first;
                },
                most, tile.dim, factors, out);
    }
}

// The keys that an indexer has chosen for a query.
struct KeyChoice {
    // Numbers of the chosen blocks of `size` keys, in ascending order. null: no keys are chosen, and
    // the query attends to all.
    const int32_t* blocks;
    int num, size;

    // Returns the position of chosen key i.
    int position(int i) const { return size == 1 ? blocks[i] : blocks[i / size] * size + i % size; }

    // Returns the number of chosen keys for a query that sees the keys before position `end`.
    int num_keys(int end) const {
        return (num - 1) * size + std::min(size, end - blocks[num - 1] * size);
    }
};

// What a work item computes: the output of its rows; the sums of its rows for one piece; or the
// output from the sums that other items have computed for all pieces.
enum class Task { kAll, kPiece, kMerge };

struct Item {
    // Rows of the span. Row r is query r / group and head r % group.
    int span, kv_head, first_row, num_rows;
    int window;                              // window of the layer (decoder.h)
    int group;                               // number of heads that share a KV head
    KeyChoice choice;                        // if keys are chosen, all rows have the same query
    Task task = Task::kAll;
    // In a layer with a compressor: its rate, and the number of the key at position 0.
    int rate = 0, base = 0;
    int piece = 0;       // kPiece: the number of the piece
    int num_pieces = 0;  // kMerge: how many pieces there are sums of
    // kPiece and kMerge: the sums of the piece, or of all these pieces. A row has `row_floats`
    // numbers: its output, and then its RowSums.
    float* sums = nullptr;
    size_t row_floats = 0;

    // Returns the keys that the item may read: all, or those of its piece.
    int begin() const { return task == Task::kPiece ? piece * kPieceKeys : 0; }
    int end(int num_keys) const {
        return task == Task::kPiece ? std::min(num_keys, begin() + kPieceKeys) : num_keys;
    }
};

constexpr size_t kSumsFloats = (sizeof(RowSums) / sizeof(float) + kPanel - 1) / kPanel * kPanel;

// The sums of an item's rows: `out` [rows][dim] and `rows` [rows].
struct ItemSums {
    float* out;
    size_t dim;
    RowSums* rows;

    void clear(int num_rows) const {
        std::memset(out, 0, num_rows * dim * sizeof(float));
        std::fill(rows, rows + num_rows, RowSums{});
    }

    // Adds the sums of the next piece to those of row `i`. Returns the factors on both; one is 1.
    std::pair<float, float> add(int i, const float* out_of_piece, const RowSums& piece) const {
        RowSums& row = rows[i];
        float* const to = out + i * dim;
        if (piece.is_empty()) return {1.0f, 1.0f};
        if (row.is_empty()) {
            std::memcpy(to, out_of_piece, dim * sizeof(float));
            row = piece;
            return {1.0f, 1.0f};
        }
        const bool is_higher = piece.base > row.base;
        const float apart = is_higher ? row.base - piece.base : piece.base - row.base;
        const float factor = exp2(all(apart))[0];
        // Only the sum with the lower base has a factor, so there is one way to fuse the operations.
        const auto add_all = [factor](const float* lower, const float* higher, float* to, size_t num) {
            for (size_t at = 0; at < num; at += kLanes)
                store(to + at, fused(load(lower + at), factor, load(higher + at)));
        };
        const auto add_both = [&](const float* of_piece, float* of_row, size_t num) {
            if (is_higher)
                add_all(of_row, of_piece, of_row, num);
            else
                add_all(of_piece, of_row, of_row, num);
        };
        add_both(out_of_piece, to, dim);
        add_both(piece.mass, row.mass, kPanel);
        if (!is_higher) return {1.0f, factor};
        row.base = piece.base;
        return {factor, 1.0f};
    }

    // Adds a piece to the sums of all rows. The item's keys from position `end` on are not in it.
    void add(const ItemSums& piece, int num_rows, BlockShares* shares, int end) const {
        for (int i = 0; i < num_rows; ++i) {
            const auto [before, of_piece] = add(i, piece.out + i * dim, piece.rows[i]);
            if (shares != nullptr) shares[i].end_piece(before, of_piece, end);
        }
    }

    // Stores the sums for a later item with Task::kMerge.
    void keep(const Item& item) const {
        for (int i = 0; i < item.num_rows; ++i) {
            float* const to = item.sums + i * item.row_floats;
            std::memcpy(to, out + i * dim, dim * sizeof(float));
            *reinterpret_cast<RowSums*>(to + dim) = rows[i];
        }
    }

    // Adds up the sums that the items of all pieces have stored.
    void merge(const Item& item) const {
        const float* from = item.sums;
        for (int piece = 0; piece < item.num_pieces; ++piece)
            for (int i = 0; i < item.num_rows; ++i, from += item.row_floats)
                add(i, from, *reinterpret_cast<const RowSums*>(from + dim));
    }
};

// Returns the keys to which a query of an item attends.
inline Seen keys_seen(const Span& span, int query, const Item& item) {
    if (item.rate > 0) {
        const Seen seen = keys_seen(span, query, item.window);
        const int num = item.choice.blocks == nullptr ? seen.end / item.rate : item.choice.num;
        return {num, item.base + seen.first, item.base + seen.end};
    }
    if (item.choice.blocks == nullptr) return keys_seen(span, query, item.window);
    return {0, 0, item.choice.num_keys(keys_seen(span, query, 0).end)};
}

// Returns the keys to which at least one row of the item attends.
inline Seen keys_of(const Span& span, const Item& item) {
    const int last_query = (item.first_row + item.num_rows - 1) / item.group;
    Seen seen = keys_seen(span, item.first_row / item.group, item);
    const Seen last = keys_seen(span, last_query, item);
    seen.end = last.end;
    if (item.rate > 0) seen.start = last.start;
    return seen;
}

inline size_t attention_floats(int dim) {
    const size_t unpacked = 2 * static_cast<size_t>(kKeys) * dim / sizeof(float);
    return unpacked + 3 * static_cast<size_t>(kKeys) * dim +
           static_cast<size_t>(kRowsMax) * (3 * dim + kGap + 2 * kSumsFloats) +
           kTileRows * kScoreRow + dim;
}

// The keys and values of one KV head and one sequence.
template <class T>
struct HeadKv {
    const char* first;  // address of the keys in block 0
    const int32_t* table;
    int64_t block_bytes;
    int block_size, dim;
    size_t of_key, of_value;  // elements of a row of K and of V
    bool has_values;
    KeyChannels channels;
    KeyChoice choice;
    EntryRows<T> entries;  // without a compressor, the rate is 0
    int base;              // see Item
    // Keys `begin` to `start` - 1 and keys `first_key` to `num_keys` - 1 are read. If keys are
    // chosen, these are numbers of chosen keys, otherwise positions.
    int begin, start, first_key, num_keys;

    HeadKv(const Step& step, const Layer& layer, const Item& item)
        : HeadKv(step, layer, step.group_of(layer), item) {}

    HeadKv(const Step& step, const Layer& layer, const KvGroup& group, const Item& item)
        : first(static_cast<const char*>(group.kv) + item.kv_head * group.head_bytes +
                layer.place * group.layer_bytes),
          table(group.block_tables + step.spans[item.span].first_table_entry),
          block_bytes(group.block_bytes),
          block_size(step.block_size),
          dim(layer.head_dim),
          of_key(key_row<T>(layer)),
          of_value(value_row<T>(layer)),
          has_values(layer.latent == nullptr && layer.shared_kv == nullptr),
          channels(key_channels(group, layer, item.kv_head)),
          choice(item.choice),
          base(item.base),
          begin(item.begin()),
          start(keys_of(step.spans[item.span], item).start),
          first_key(keys_of(step.spans[item.span], item).first),
          num_keys(item.end(keys_of(step.spans[item.span], item).end)) {
        if (item.rate > 0) entries = {step, *layer.compressor, step.spans[item.span], 0};
    }

    // Returns the distance from the keys of a block to the values, in elements. It is 0 if values
    // are the keys, or with latent attention a part of them.
    size_t run() const { return has_values ? block_size * of_key : 0; }

    // Converts a query to the form in which it is multiplied by the stored keys. In an int4 pool,
    // the key channels have another order and static scales.
    void put_query(const float* from, float* to) const {
        if constexpr (!std::is_same_v<T, Int4>) {
            std::memcpy(to, from, dim * sizeof(float));
            return;
        }
        for (int i = 0; i < dim; ++i) to[i] = from[channels.order[i]] * channels.multiplier(i, dim);
    }

    // Returns `key` if that key is read, otherwise the next key that is read.
    int next_key(int key) const { return key < start || key >= first_key ? key : first_key; }

    // Returns the first tile that has keys to read.
    int first_tile(int most) const { return next_key(begin) / most * most; }
    int tile_after(int tile, int most) const { return next_key(tile + most) / most * most; }

    // Returns whether a tile is the last one of its piece, if the tile `after` is read next.
    bool ends_piece(int tile, int after) const {
        return after >= num_keys || after / kPieceKeys != tile / kPieceKeys;
    }

    const T* part(int key) const {
        return reinterpret_cast<const T*>(first + table[key / block_size] * block_bytes);
    }

    // Calls work(i, part, offset, here) for each run of keys of a tile that are read and are in one
    // block. The first key of the run is key i of the tile and key `offset` of the block, `part` is
    // the address of the block's KV, and `here` is the number of keys. Returns which keys of the
    // tile are read.
    template <class Work>
    Seen by_blocks(int tile, int most, Work work) const {
        const auto of_tile = [&](int key) { return std::clamp(key - tile, 0, most); };
        const Seen read{of_tile(start), of_tile(first_key), of_tile(num_keys)};
        const auto go = [&](int i, int end) {
            for (int here; i < end; i += here) {
                const int offset = (tile + i) % block_size;
                here = std::min(block_size - offset, end - i);
                work(i, part(tile + i), offset, here);
            }
        };
        go(0, read.start);
        go(read.first, read.end);
        return read;
    }

    // Writes the addresses of the `most` keys of a tile to `rows`. Keys that are not read get an
    // address too: `nothing` if they are after the last key that is read, and otherwise the address
    // of some key that is read.
    void tile(int first, int most, const T* nothing, const T** rows) const {
        if (entries.rate > 0) {
            for (int i = 0; i < most; ++i) {
                const int key = first + i, position = key - base;
                if (key < start)
                    rows[i] = entries.row(choice.blocks == nullptr ? key : choice.blocks[key]);
                else if (key >= first_key && key < num_keys)
                    rows[i] = part(position) + position % block_size * of_key;
                else
                    rows[i] = nothing;
            }
            return;
        }
        if (choice.blocks != nullptr) {
            const int num = std::clamp(num_keys - first, 0, most);
            for (int i = 0; i < num; ++i) {
                const int key = choice.position(first + i);
                rows[i] = part(key) + key % block_size * of_key;
            }
            std::fill(rows + num, rows + most, nothing);
            return;
        }
        const Seen read = by_blocks(first, most, [&](int i, const T* part, int offset, int here) {
            for (int j = 0; j < here; ++j) rows[i + j] = part + (offset + j) * of_key;
        });
        std::fill(rows + read.end, rows + most, nothing);
        std::fill(rows + read.start, rows + read.first, rows[read.start > 0 ? 0 : read.first]);
    }

    // Writes the scales of a tile's keys and values in a quantized pool. Keys that are not read get
    // the scale 0.
    void scales(int first, int most, float* of_keys, float* of_values) const {
        uint16_t halves[2][kKeysMax] = {};
        const size_t after_runs = run() + block_size * of_value;
        by_blocks(first, most, [&](int i, const T* part, int offset, int here) {
            const uint16_t* from = reinterpret_cast<const uint16_t*>(part + after_runs) + offset;
            for (int of_value = 0; of_value < 2; ++of_value, from += block_size) {
                if (here == kPanel)  // the usual case: a copy of a fixed size needs no function call
                    std::memcpy(halves[of_value] + i, from, kPanel * sizeof *from);
                else
                    std::memcpy(halves[of_value] + i, from, here * sizeof *from);
            }
        });
        for (int i = 0; i < most; i += kLanes) {
            store(of_keys + i, of_halves(halves[0] + i));
            store(of_values + i, of_halves(halves[1] + i));
        }
    }

    // Unpacks the keys and values of a tile from a pool with less than a byte per number, [most]
    // [dim] each. If the pool has int8 latents, dequantizes them, and writes zeros for keys that
    // are not read. Also prefetches the KV of the next tile, the one with key `then_first` of
    // `then`.
    void unpack(int first, int most, const HeadKv& then, int then_first, RowOf<T>* keys,
                RowOf<T>* values) const {
        const size_t bytes = block_size * (of_key + of_value + 2 * sizeof(uint16_t));
        int ahead = then.next_key(then_first);
        const Seen read = by_blocks(first, most, [&](int i, const T* part, int offset, int here) {
            if (ahead < then.num_keys) {
                const char* const lines = reinterpret_cast<const char*>(then.part(ahead));
                for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(lines + at, 0, 2);
                ahead = then.next_key(ahead + block_size);
            }
            const T* const others = part + block_size * of_key;
            [[maybe_unused]] const uint16_t* const scales =
                reinterpret_cast<const uint16_t*>(others + block_size * of_value) + offset;
            for (int j = 0; j < here; ++j) {
                const size_t to = static_cast<size_t>(i + j) * dim;
                const T* const key = part + (offset + j) * of_key;
                const T* const other = others + (offset + j) * of_value;
                if constexpr (kIsLatent<T>)
                    widen_latent(key, other, scales[j], of_key, dim - of_key, keys + to);
                else
                    unpack_rows(key, other, dim, keys + to, values + to);
            }
        });
        if constexpr (kIsLatent<T>) {
            std::memset(keys + static_cast<size_t>(read.start) * dim, 0,
                        sizeof *keys * dim * (read.first - read.start));
            std::memset(keys + static_cast<size_t>(read.end) * dim, 0,
                        sizeof *keys * dim * (most - read.end));
        }
    }
};

// Dequantizes a tile of keys and values to fp32, [64][dim] each. A value is `run` elements after
// its key.
template <class Kept>
inline void widen_tile(const HeadKv<Kept>& kv, int first, const RowOf<Kept>* const* rows,
                       size_t run, const RowOf<Kept>* const* ahead, float* keys, float* values) {
    float of_keys[kKeys], of_values[kKeys];
    kv.scales(first, kKeys, of_keys, of_values);
    const int dim = kv.dim, num = kv.num_keys - first < kKeys ? kv.num_keys - first : kKeys;
    for (int key = 0; key < num; ++key, keys += dim, values += dim) {
        const RowOf<Kept>*of_key = rows[key], *of_value = of_key + run;
        for (int d = 0; d < dim; d += 64) {
            __builtin_prefetch(ahead[key] + d, 0, 2);
            __builtin_prefetch(ahead[key] + run + d, 0, 2);
        }
        for (int d = 0; d < dim; d += kLanes) {
            store(keys + d, load(of_key + d) * of_keys[key]);
            store(values + d, load(of_value + d) * of_values[key]);
        }
    }
    std::memset(keys, 0, static_cast<size_t>(kKeys - num) * dim * sizeof(float));
}

// The addresses of the keys of the current tile and of the next tile, as elements of type T. If the
// pool has less than a byte per number, each tile is unpacked into `unpacked` first: [2][most][dim]
// for keys and values, or [most][dim] for latents.
template <class T, class Kept, int kMost>
class TilesOf {
public:
    TilesOf(const HeadKv<Kept>& kv, const HeadKv<Kept>& next, const void* nothing, T* unpacked)
        : kv_(kv), next_(next), nothing_(static_cast<const T*>(nothing)), unpacked_(unpacked) {
        if constexpr (kIsUnpacked)
            for (int i = 0; i < kMost; ++i)
                rows_[0][i] = rows_[1][i] = unpacked + static_cast<size_t>(i) * kv.dim;
        else
            kv.tile(kv.first_tile(kMost), kMost, nothing_, rows_[0]);
    }

    // Distance from a key to its value, in elements.
    size_t run() const {
        return kIsPacked<Kept> ? static_cast<size_t>(kMost) * kv_.dim : kv_.run();
    }

    // Moves on to the tile that begins with key `first`.
    void go_to(int first) {
        const int after = kv_.tile_after(first, kMost);
        const bool is_last = after >= kv_.num_keys;
        const HeadKv<Kept>& then = is_last ? next_ : kv_;
        const int then_first = is_last ? next_.first_tile(kMost) : after;
        if constexpr (kIsUnpacked) {
            kv_.unpack(first, kMost, then, then_first, unpacked_, unpacked_ + run());
        } else {
            now_ ^= 1;
            then.tile(then_first, kMost, nothing_, rows_[now_ ^ 1]);
        }
    }

    const T* const* rows() const { return rows_[now_]; }
    const T* const* ahead() const { return rows_[now_ ^ 1]; }

private:
    static constexpr bool kIsUnpacked = kIsPacked<Kept> || kIsLatent<Kept>;

    const HeadKv<Kept>&kv_, &next_;
    const T* nothing_;
    T* unpacked_;
    const T* rows_[2][kMost];
    int now_ = 1;
};

// Computes an item. `queries` [rows, stride] are rotated and multiplied by the scale. The result is
// written in the format that the next product reads. Kept is the type of the pool's rows, and T the
// type with which this function computes. If they differ, each tile is converted first. The first
// keys of the item `next` are prefetched, because the hardware cannot predict scattered blocks.
template <class T, class Kept = T>
void attend(const Model& model, const Step& step, int layer, const Item& item, const Item& next,
            const float* queries, size_t stride, const Inputs& attended, const BlockSums& sums,
            float* buffer) {
    const Layer& of_layer = model.layers[layer];
    const int dim = of_layer.head_dim, value_dim = of_layer.value_dim, group = item.group;
    const Span& span = step.spans[item.span];
    const bool has_shares = sums.any(item.span);
    BlockShares shares[kRowsMax];
    uint32_t* keys = reinterpret_cast<uint32_t*>(buffer);
    float* values = buffer + static_cast<size_t>(kKeys) * dim;
    float* q = values + static_cast<size_t>(kKeys) * dim;
    float* scores = q + static_cast<size_t>(kRowsMax) * (dim + kGap);
    float* outs[2] = {scores + kTileRows * kScoreRow};
    outs[1] = outs[0] + static_cast<size_t>(kRowsMax) * dim;
    float* row_sums = outs[1] + static_cast<size_t>(kRowsMax) * dim;
    // zeros, read in place of a key and a value
    float* nothing = row_sums + 2 * kRowsMax * kSumsFloats;
    float* wide = nothing + dim;  // keys converted to fp32, or dequantized latents
    const ItemSums total{outs[0], static_cast<size_t>(dim), reinterpret_cast<RowSums*>(row_sums)};
    const ItemSums piece{outs[1], total.dim, total.rows + kRowsMax};
    total.clear(item.num_rows);
    if (item.task == Task::kMerge) {
        total.merge(item);
    } else {
        std::memset(nothing, 0, dim * sizeof(float));
        const HeadKv<Kept> kv(step, of_layer, item), next_kv(step, of_layer, next);
        Seen sees[kRowsMax];
        for (int i = 0; i < item.num_rows; ++i) {
            const int query = (item.first_row + i) / group, head = (item.first_row + i) % group;
            const float* from = queries + (span.first_row + query) * stride +
                                static_cast<size_t>(item.kv_head * group + head) * dim;
            kv.put_query(from, q + i * (dim + kGap));
            sees[i] = keys_seen(span, query, item);
            if (has_shares) shares[i] = sums.shares(item.span, query, item.kv_head * group + head);
        }
        RowOf<Kept>* const unpacked = reinterpret_cast<RowOf<Kept>*>(
            kIsLatent<Kept> ? wide : wide + static_cast<size_t>(kKeys) * dim);
        TilesOf<RowOf<Kept>, Kept, kKeys> tiles(kv, next_kv, nothing, unpacked);
        [[maybe_unused]] const T* widened[kKeys];
        if constexpr (!std::is_same_v<T, RowOf<Kept>>)
            for (int key = 0; key < kKeys; ++key)
                widened[key] = wide + static_cast<size_t>(key) * dim;
        bool begins = true;
        for (int first = kv.first_tile(kKeys), after; first < kv.num_keys; first = after) {
            after = kv.tile_after(first, kKeys);
            if (begins) {
                piece.clear(item.num_rows);
                for (int i = 0; has_shares && i < item.num_rows; ++i)
                    shares[i].begin_piece(first / kPieceKeys * kPieceKeys);
            }
            begins = kv.ends_piece(first, after);
            tiles.go_to(first);
            const int num = kv.num_keys - first < kKeys ? kv.num_keys - first : kKeys;
            const int num_turned = (num + kPanel - 1) / kPanel * kPanel;
            Tile<T> tile{keys, nullptr, nullptr, nullptr, tiles.run(), dim, model.attention_cap,
                         first};
            if constexpr (std::is_same_v<T, RowOf<Kept>>) {
                transpose(tiles.rows(), tiles.run(), num_turned, dim, keys);
                tile.rows = tiles.rows();
                tile.ahead = tiles.ahead();
                if (item.num_rows > kTileRows) {
                    widen_values(tile, num, values);
                    tile.widened = values;
                }
            } else {
                widen_tile(kv, first, tiles.rows(), tiles.run(), tiles.ahead(), wide, values);
                transpose(widened, 0, num_turned, dim, keys);
                tile.widened = values;
            }
            for (int row = 0; row < item.num_rows; row += kTileRows) {
                const int num_rows =
                    item.num_rows - row < kTileRows ? item.num_rows - row : kTileRows;
                const Seen &one = sees[row], &last = sees[row + num_rows - 1];
                if (last.end <= first || (one.first >= first + kKeys && last.start <= first))
                    continue;
                Seen seen[kTileRows];
                for (int i = 0; i < num_rows; ++i) seen[i] = sees[row + i].in(first);
                attend_rows<T, kTileRows>(num_rows, q + row * (dim + kGap), tile, seen, scores,
                                          piece.rows + row, piece.out + row * dim,
                                          has_shares ? shares + row : nullptr);
            }
            if (begins)
                total.add(piece, item.num_rows, has_shares ? shares : nullptr, first + num);
        }
    }
    if (item.task == Task::kPiece) return total.keep(item);
    for (int i = 0; i < item.num_rows; ++i) {
        const int query = (item.first_row + i) / group, head = (item.first_row + i) % group;
        const InputRow to = attended.row(span.first_row + query);
        const int of_item = item.kv_head * group + head, column = of_item * value_dim;
        const RowSums& of_row = total.rows[i];
        const float scale = 1.0f / (of_row.total() + mass_of_sink(of_layer, of_item, of_row.base));
        if (has_shares) shares[i].scale(scale, span.context_len);
        for (int d = 0; d < value_dim; d += kPanel) {
            Floats panel[kVectors];
            for (int v = 0; v < kVectors; ++v)
                panel[v] = load(total.out + i * dim + d + v * kLanes) * scale;
            put_in_order(panel, T{});
            for (int v = 0; v < kVectors; ++v) to.put(column + d + v * kLanes, panel[v]);
        }
    }
}

}  // namespace tandem::TANDEM_ISA

#ifdef TANDEM_PAIRS
#include "attention_dot.h"
#endif

namespace tandem::TANDEM_ISA {

// Returns whether attention_dot.h computes the attention, which multiplies in bf16. It does so if
// the processor multiplies bf16 directly and the KV is bf16, or integers of a bf16 model.
inline bool is_dot([[maybe_unused]] const Model& model, [[maybe_unused]] const Step& step) {
#ifdef TANDEM_PAIRS
    const bool is_integers = step.kv_kind == I8 || step.kv_kind == I8_I4 || step.kv_kind == I4;
    const bool is_bf16 = step.kv_kind == BF16 || step.kv_kind == I8_BF16;
    return is_bf16 || (is_integers && model.computed_kind == BF16);
#else
    return false;
#endif
}

inline int rows_of_item(const Model& model, const Step& step) {
#ifdef TANDEM_PAIRS
    if (is_dot(model, step)) return dot_rows_of_item(model, step);
#endif
    (void)model;
    return kRowsMax;
}

// Returns the size of an indexer's queries, which have zeros after their elements.
inline int rounded_dim(const Indexer& indexer) {
    return (indexer.dim + kPanel - 1) / kPanel * kPanel;
}

// Returns the size of a thread's buffer, in floats. indexer.h uses the buffer, too.
inline size_t attention_floats(const Model& model, const Step& step) {
    int dim = 0;
    for (int index = 0; index < model.num_layers; ++index) {
        const Layer& layer = model.layers[index];
        dim = std::max(dim, layer.head_dim);
        if (layer.indexer != nullptr) dim = std::max(dim, rounded_dim(*layer.indexer));
    }
#ifdef TANDEM_PAIRS
    if (is_dot(model, step)) return attention_dot_floats(dim);
#endif
    return attention_floats(dim);
}

inline void attend_any(const Model& model, const Step& step, int layer, const Item& item,
                       const Item& next, const float* queries, size_t stride,
                       const Inputs& attended, const BlockSums& sums, float* buffer) {
    const auto with = [&](auto attend) {
        attend(model, step, layer, item, next, queries, stride, attended, sums, buffer);
    };
    by_kv_kind(step, [&](auto kept) {
        typedef decltype(kept) Kept;
#ifdef TANDEM_PAIRS
        if constexpr (!std::is_same_v<RowOf<Kept>, float> && !std::is_same_v<Kept, Fp8>) {
            if (is_dot(model, step)) return with(attend_dot<RowOf<Kept>, Kept>);
        }
        if constexpr (!std::is_same_v<RowOf<Kept>, Bf16>)
#endif
            with(attend<std::conditional_t<kHasScales<Kept>, float, RowOf<Kept>>, Kept>);
    });
}

}  // namespace tandem::TANDEM_ISA
