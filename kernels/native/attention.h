// Causal attention straight over the blocks, grouped-query heads.
//
// A work item is a few rows (query, head of the KV head's group) of one span and one KV head. Keys
// come in tiles of 64, aligned to position 0; the softmax runs along (arXiv:2205.14135). A tile
// that a row does not see leaves its sums as they are, bit for bit, so a row does not know which
// others share its item, where its chunk began, or how the KV is cut into blocks.

namespace tandem::TANDEM_ISA {

constexpr int kKeys = 64;        // of a tile
constexpr int kRowsMax = 48;     // of an item
constexpr int kPanels = kKeys / kPanel;

typedef float Eight __attribute__((vector_size(32)));
typedef int32_t Order __attribute__((vector_size(32)));

inline Eight load_eight(const float* from) {
    Eight v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline Eight load_eight(const Bf16* from) {
    typedef uint16_t EightHalves __attribute__((vector_size(16)));
    typedef uint32_t EightWords __attribute__((vector_size(32)));
    EightHalves halves;
    std::memcpy(&halves, from, sizeof halves);
    const EightWords words = __builtin_convertvector(halves, EightWords) << 16;
    return (Eight)words;
}

// [64 keys][dim] to [dim][64 keys], eight by eight.
template <class T>
inline void transpose(const T* const* rows, int dim, float* to) {
    for (int key = 0; key < kKeys; key += 8) {
        for (int d = 0; d < dim; d += 8) {
            Eight r[8], s[8];
            for (int i = 0; i < 8; ++i) r[i] = load_eight(rows[key + i] + d);
            const Order low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
            for (int i = 0; i < 8; i += 2) {
                s[i] = __builtin_shuffle(r[i], r[i + 1], low);
                s[i + 1] = __builtin_shuffle(r[i], r[i + 1], high);
            }
            const Order pairs = {0, 1, 8, 9, 4, 5, 12, 13}, other = {2, 3, 10, 11, 6, 7, 14, 15};
            for (int i = 0; i < 8; i += 4) {
                r[i] = __builtin_shuffle(s[i], s[i + 2], pairs);
                r[i + 1] = __builtin_shuffle(s[i], s[i + 2], other);
                r[i + 2] = __builtin_shuffle(s[i + 1], s[i + 3], pairs);
                r[i + 3] = __builtin_shuffle(s[i + 1], s[i + 3], other);
            }
            const Order first = {0, 1, 2, 3, 8, 9, 10, 11}, second = {4, 5, 6, 7, 12, 13, 14, 15};
            for (int i = 0; i < 4; ++i) {
                const Eight a = __builtin_shuffle(r[i], r[i + 4], first);
                const Eight b = __builtin_shuffle(r[i], r[i + 4], second);
                std::memcpy(to + (d + i) * kKeys + key, &a, sizeof a);
                std::memcpy(to + (d + i + 4) * kKeys + key, &b, sizeof b);
            }
        }
    }
}

// scores[m][64] = q[m][dim] . keys[dim][64], for MR rows.
template <int MR, int NP>
inline void score(const float* q, const float* keys, int dim, float* scores) {
    for (int panel = 0; panel < kPanels; panel += NP) {
        Floats sums[NP][kVectors][MR] = {};
        for (int d = 0; d < dim; ++d) {
            Floats k[NP][kVectors];
#pragma GCC unroll 8
            for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v)
                    k[p][v] = load(keys + d * kKeys + (panel + p) * kPanel + v * kLanes);
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m) {
                const Floats input = all(q[m * dim + d]);
#pragma GCC unroll 8
                for (int p = 0; p < NP; ++p)
#pragma GCC unroll 8
                    for (int v = 0; v < kVectors; ++v) sums[p][v][m] += input * k[p][v];
            }
        }
        for (int p = 0; p < NP; ++p)
            for (int v = 0; v < kVectors; ++v)
                for (int m = 0; m < MR; ++m)
                    store(scores + m * kKeys + (panel + p) * kPanel + v * kLanes, sums[p][v][m]);
    }
}

// out[m][dim] = out[m][dim] * factors[m] + weights[m][64] . values[64][dim], for MR rows.
template <class T, int MR>
inline void gather(const float* weights, const T* const* values, int num_keys, int dim,
                   const float* factors, float* out) {
    for (int first = 0; first < dim; first += kPanel) {
        Floats sums[kVectors][MR];
        for (int v = 0; v < kVectors; ++v)
            for (int m = 0; m < MR; ++m)
                sums[v][m] = load(out + m * dim + first + v * kLanes) * factors[m];
        for (int key = 0; key < num_keys; ++key) {
            Floats value[kVectors];
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v)
                value[v] = load(values[key] + first + v * kLanes);
#pragma GCC unroll 16
            for (int m = 0; m < MR; ++m) {
                const Floats weight = all(weights[m * kKeys + key]);
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) sums[v][m] += weight * value[v];
            }
        }
        for (int v = 0; v < kVectors; ++v)
            for (int m = 0; m < MR; ++m) store(out + m * dim + first + v * kLanes, sums[v][m]);
    }
}

// Weighs a row's scores, of which it sees the first `num_visible`. Answers what its sums so far are
// to be multiplied with.
inline float weigh(float* scores, int num_visible, float& highest, float& mass) {
    for (int key = num_visible > 0 ? num_visible : 0; key < kKeys; ++key) scores[key] = -INFINITY;
    if (num_visible <= 0) {
        std::memset(scores, 0, kKeys * sizeof(float));
        return 1.0f;
    }
    Floats high[kVectors];
    for (int v = 0; v < kVectors; ++v) high[v] = load(scores + v * kLanes);
    for (int at = kPanel; at < kKeys; at += kPanel)
        for (int v = 0; v < kVectors; ++v) high[v] = max(high[v], load(scores + at + v * kLanes));
    const float before = highest, in_tile = largest(high);
    highest = before > in_tile ? before : in_tile;
    Floats total[kVectors] = {};
    for (int at = 0; at < kKeys; at += kPanel)
        for (int v = 0; v < kVectors; ++v) {
            const Floats weight = exp(load(scores + at + v * kLanes) - highest);
            store(scores + at + v * kLanes, weight);
            total[v] += weight;
        }
    const float factor = before == -INFINITY ? 0.0f : exp(all(before - highest))[0];
    mass = mass * factor + sum(total);
    return factor;
}

template <int MR>
inline void score_rows(const float* q, const float* keys, int dim, float* scores) {
    constexpr int NP = MR * kVectors >= 8 ? 1 : (MR * kVectors >= 4 ? 2 : 4);
    score<MR, NP>(q, keys, dim, scores);
}

template <class T, int MR>
void attend_rows(int num_rows, const float* q, const float* keys, const T* const* values, int dim,
                 int num_keys, const int* num_visible, float* scores, float* highest, float* mass,
                 float* out) {
    if constexpr (MR > 0) {
        if (num_rows != MR)
            return attend_rows<T, MR - 1>(num_rows, q, keys, values, dim, num_keys, num_visible,
                                          scores, highest, mass, out);
        score_rows<MR>(q, keys, dim, scores);
        float factors[MR];
        for (int m = 0; m < MR; ++m)
            factors[m] = weigh(scores + m * kKeys, num_visible[m], highest[m], mass[m]);
        gather<T, MR>(scores, values, num_keys, dim, factors, out);
    }
}

struct Item {
    int span, kv_head, first_row, num_rows;  // rows of the span: query * group + head of the group
};

inline size_t attention_floats(int dim) {
    return static_cast<size_t>(kKeys) * dim + 2 * static_cast<size_t>(kRowsMax) * dim +
           kRowsMax * (kKeys + 2) + dim;
}

// `queries` [rows, stride] are rotated and scaled; the result goes into rows in tiles.
template <class T>
void attend(const Model& model, const Step& step, int layer, const Item& item, const float* queries,
            size_t stride, float* attended, float* buffer) {
    const int dim = model.head_dim, group = model.num_heads / model.num_kv_heads;
    const Span& span = step.spans[item.span];
    const int32_t* table = step.block_tables + span.first_table_entry;
    float* keys = buffer;
    float* q = keys + static_cast<size_t>(kKeys) * dim;
    float* out = q + static_cast<size_t>(kRowsMax) * dim;
    float* scores = out + static_cast<size_t>(kRowsMax) * dim;
    float* highest = scores + kRowsMax * kKeys;
    float* mass = highest + kRowsMax;
    T* nothing = reinterpret_cast<T*>(mass + kRowsMax);  // a key after the last: zeros
    std::memset(static_cast<void*>(nothing), 0, dim * sizeof(T));
    const int before = span.context_len - span.num_queries;
    int sees[kRowsMax];
    for (int i = 0; i < item.num_rows; ++i) {
        const int query = (item.first_row + i) / group, head = (item.first_row + i) % group;
        const float* from = queries + (span.first_row + query) * stride +
                            static_cast<size_t>(item.kv_head * group + head) * dim;
        std::memcpy(q + i * dim, from, dim * sizeof(float));
        sees[i] = before + query + 1;
        highest[i] = -INFINITY;
        mass[i] = 0.0f;
    }
    std::memset(out, 0, static_cast<size_t>(item.num_rows) * dim * sizeof(float));
    const size_t run = static_cast<size_t>(step.block_size) * dim;  // K or V of one layer and head
    const T* kv = static_cast<const T*>(step.kv);
    const int last = sees[item.num_rows - 1];
    for (int first = 0; first < last; first += kKeys) {
        const T* key_rows[kKeys];
        const T* value_rows[kKeys];
        const int num_keys = last - first < kKeys ? last - first : kKeys;
        for (int i = 0; i < kKeys; ++i) {
            if (i >= num_keys) {
                key_rows[i] = value_rows[i] = nothing;
                continue;
            }
            const int place = first + i;
            const size_t block = table[place / step.block_size];
            const size_t head_run =
                ((block * model.num_kv_heads + item.kv_head) * model.num_layers + layer) * 2;
            key_rows[i] = kv + head_run * run + static_cast<size_t>(place % step.block_size) * dim;
            value_rows[i] = key_rows[i] + run;
        }
        transpose(key_rows, dim, keys);
        for (int row = 0; row < item.num_rows; row += kTileRows) {
            const int num = item.num_rows - row < kTileRows ? item.num_rows - row : kTileRows;
            if (sees[row + num - 1] <= first) continue;
            int visible[kTileRows];
            for (int i = 0; i < num; ++i) visible[i] = sees[row + i] - first;
            attend_rows<T, kTileRows>(num, q + row * dim, keys, value_rows, dim, num_keys, visible,
                                      scores, highest + row, mass + row, out + row * dim);
        }
    }
    for (int i = 0; i < item.num_rows; ++i) {
        const int query = (item.first_row + i) / group, head = (item.first_row + i) % group;
        const TiledRow to = tiled_row(attended, span.first_row + query, step.num_rows,
                                      model.num_heads * dim);
        const size_t column = static_cast<size_t>(item.kv_head * group + head) * dim;
        const float scale = 1.0f / mass[i];
        for (int d = 0; d < dim; ++d) to.first[(column + d) * to.stride] = out[i * dim + d] * scale;
    }
}

}  // namespace tandem::TANDEM_ISA
