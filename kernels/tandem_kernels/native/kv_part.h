// A *part* of the pool is the KV of one layer and one head in one block.
//
//     K [tokens][key_row] | V [tokens][value_row] | scales of K [tokens] and of V [tokens]
//
// Unquantized pools have no scales. Pools of latent attention have no V, because a token's latent
// is both key and value. In a quantized pool of latent attention, the rotated keys take the place
// of V, and a token has one scale:
//
//     latents [tokens][rank] of int8 | rotated keys [tokens][rope], unquantized | scales [tokens]
//
// The C++ type of a part's elements determines the format of the rows. Attention first unpacks rows
// with less than a byte per number to int8, and dequantizes rows of Int8Latent.

namespace tandem::TANDEM_ISA {

struct Int8Int4 {  // int8 keys, 4-bit values
    int8_t byte;
};

struct Int4 {  // keys of 4 and 6 bits with static channel scales, 4-bit values
    Int4Pair byte;
};

template <class R>
struct Int8Latent {  // an int8 latent, and a rotated key of type R
    int8_t byte;
};

template <class T>
constexpr bool kIsLatent = false;

template <class R>
constexpr bool kIsLatent<Int8Latent<R>> = true;

template <class T>
constexpr bool kIsPacked = std::is_same_v<T, Int8Int4> || std::is_same_v<T, Int4>;

template <class T>
constexpr bool kHasScales =
    std::is_same_v<T, int8_t> || std::is_same_v<T, Fp8> || kIsPacked<T>;

// The type to which attention converts rows of the format T before it uses them.
template <class T>
struct ReadAs {
    typedef std::conditional_t<kIsPacked<T>, int8_t, T> Row;
};

template <class R>
struct ReadAs<Int8Latent<R>> {
    typedef R Row;
};

template <class T>
using RowOf = typename ReadAs<T>::Row;

// The size of a token's K in elements. Below: the size of the token's V or rotated key.
template <class T>
inline size_t key_row(const Layer& layer) {
    const int dim = layer.head_dim;
    if constexpr (kIsLatent<T>) return layer.latent->kv_rank;
    return std::is_same_v<T, Int4> ? dim / 2 + dim / 16 : dim;
}

template <class T>
inline size_t value_row(const Layer& layer) {
    if constexpr (kIsLatent<T>) return (layer.head_dim - key_row<T>(layer)) * sizeof(RowOf<T>);
    return kIsPacked<T> ? layer.head_dim / 2 : layer.head_dim;
}

// Returns the order and scales of the key channels in an int4 pool; empty for other pools.
inline KeyChannels key_channels(const KvGroup& group, const Layer& layer, int head) {
    if (group.key_order == nullptr) return {nullptr, nullptr};
    const size_t first =
        (static_cast<size_t>(layer.place) * layer.num_kv_heads + head) * layer.head_dim;
    return {group.key_order + first, group.key_scales + first};
}

// The place in the pool where the K and V of one token and one head are stored.
template <class T>
struct Place {
    T *key, *value;   // in a pool of int8 latents, `value` is the rotated key
    uint16_t* scale;  // scale of the key; the scale of the value is block_size elements further
    KeyChannels channels;
    // static scales of K and V in an fp8 pool; 0: each row has its own scale
    uint16_t fixed_scales[2] = {0, 0};

    Place(const Layer& layer, const Step& step, int row, int head) {
        const KvGroup& group = step.group_of(layer);
        const size_t block = group.slots[row] / step.block_size;
        const size_t token = group.slots[row] % step.block_size;
        const size_t of_key = key_row<T>(layer), of_value = value_row<T>(layer);
        char* part = static_cast<char*>(group.kv) + block * group.block_bytes +
                     head * group.head_bytes + layer.place * group.layer_bytes;
        T* const values = reinterpret_cast<T*>(part) + step.block_size * of_key;
        key = reinterpret_cast<T*>(part) + token * of_key;
        value = values + token * of_value;
        scale = reinterpret_cast<uint16_t*>(values + step.block_size * of_value) + token;
        channels = key_channels(group, layer, head);
        if (group.fixed_scales != nullptr)
            std::copy_n(group.fixed_scales + 2 * layer.place, 2, fixed_scales);
    }

    // Prefetches this place, because the tokens of a decode step are stored in different blocks.
    void fetch(const Layer& layer) const {
        constexpr size_t kLine = 64 / sizeof(T);
        for (size_t i = 0; i < key_row<T>(layer); i += kLine) __builtin_prefetch(key + i, 1, 2);
        for (size_t i = 0; i < value_row<T>(layer); i += kLine) __builtin_prefetch(value + i, 1, 2);
        if constexpr (kHasScales<T> || kIsLatent<T>) __builtin_prefetch(scale, 1, 2);
    }
};

// Stores a rotated key and a value of `dim` numbers each.
template <class T>
inline void store_rows(const Step& step, const float* key, const float* value, int dim,
                       const Place<T>& to) {
    if constexpr (kIsLatent<T>) {
        return;  // latent.h stores these rows.
    } else if constexpr (!kHasScales<T>) {
        for (int i = 0; i < dim; i += kLanes) {
            store_some(to.key + i, load(key + i), kLanes);
            store_some(to.value + i, load(value + i), kLanes);
        }
    } else if constexpr (std::is_same_v<T, Fp8>) {
        *to.scale = quantize(key, dim, to.key, to.fixed_scales[0]);
        to.scale[step.block_size] = quantize(value, dim, to.value, to.fixed_scales[1]);
    } else {
        if constexpr (std::is_same_v<T, Int4>)
            *to.scale = quantize_key(key, dim, to.channels, reinterpret_cast<Int4Pair*>(to.key));
        else
            *to.scale = quantize(key, dim, reinterpret_cast<RowOf<T>*>(to.key));
        typedef std::conditional_t<kIsPacked<T>, Int4Pair, T> OfValue;
        to.scale[step.block_size] = quantize(value, dim, reinterpret_cast<OfValue*>(to.value));
    }
}

// Unpacks the numbers of a key and of its value.
template <class T>
inline void unpack_rows(const T* key, const T* value, int dim, int8_t* to_key, int8_t* to_value) {
    if constexpr (std::is_same_v<T, Int4>)
        unpack_key(reinterpret_cast<const Int4Pair*>(key), dim, to_key);
    else
        // copies of a fixed size, so that no function is called
        for (int i = 0; i < dim; i += 16) std::memcpy(to_key + i, key + i, 16);
    unpack(reinterpret_cast<const Int4Pair*>(value), dim, to_value);
}

// Stores a latent of `rank` numbers and its rotated key; both sizes are multiples of 16.
template <class R>
inline void store_latent(const float* token, int rank, int rope, const Place<Int8Latent<R>>& to) {
    *to.scale = quantize(token, rank, reinterpret_cast<int8_t*>(to.key));
    for (int i = 0; i < rope; i += kLanes)
        store_some(reinterpret_cast<R*>(to.value) + i, load(token + rank + i), kLanes);
}

// Dequantizes a latent and its rotated key.
template <class R>
inline void widen_latent(const Int8Latent<R>* latent, const Int8Latent<R>* rotated, uint16_t scale,
                         int rank, int rope, R* to) {
    const Floats factor = all_of_half(scale);
    const int8_t* const numbers = reinterpret_cast<const int8_t*>(latent);
    for (int i = 0; i < rank; i += kLanes)
        store_some(to + i, load(numbers + i) * factor, kLanes);
    std::memcpy(to + rank, rotated, rope * sizeof(R));
}

// The rows of one kind of entries that a sequence has in the pool (compressor.h). An entry is in the
// block of the last token of its run. A block has room for at least one entry.
template <class T>
struct EntryRows {
    char* first = nullptr;  // address of the first row of block 0
    const int32_t* table = nullptr;
    int64_t block_bytes = 0;
    int block_size = 0, rate = 0, dim = 0;

    EntryRows() = default;

    EntryRows(const Step& step, const Compressor& compressor, const Span& span, int kind) {
        const KvGroup& group = step.groups[compressor.entry_group];
        first = static_cast<char*>(group.kv) + group.parts[compressor.entry_part + kind];
        table = group.block_tables + span.first_table_entry;
        block_bytes = group.block_bytes;
        block_size = step.block_size;
        rate = compressor.rate;
        dim = compressor.dims[kind];
    }

    T* row(int number) const {
        const int64_t last = static_cast<int64_t>(number + 1) * rate - 1;
        char* const block = first + table[last / block_size] * block_bytes;
        return reinterpret_cast<T*>(block) + last % block_size / rate * dim;
    }
};

// Calls `work` with a value of the pool's row type.
template <class Work>
inline void by_kv_kind(const Step& step, Work work) {
    switch (step.kv_kind) {
        case BF16: return work(Bf16{});
        case I8: return work(int8_t{});
        case I8_I4: return work(Int8Int4{});
        case I4: return work(Int4{});
        case F8: return work(Fp8{});
        case I8_F32: return work(Int8Latent<float>{});
        case I8_BF16: return work(Int8Latent<Bf16>{});
        default: return work(float{});
    }
}

}  // namespace tandem::TANDEM_ISA
