// Quantization of 4-bit rows and of the keys of an int4 pool, bit-identical to kv_int4.py and
// kv_int4_keys.py.

namespace tandem::TANDEM_ISA {

constexpr int kHeadMax = 512;  // maximum numbers in a row

struct Int4Pair {  // two numbers from -8 to 7, each stored plus 8; or the lower 2 bits of 4 numbers
    uint8_t bits;
};

// Returns the scale with which the element with the largest absolute value becomes -8. `most` has
// the bits of this absolute value.
inline uint16_t scale_of_4_bits(const float* row, int dim, int32_t most) {
    Ints lowest = {};  // nonzero where a number is -largest
    for (int i = 0; i < dim; i += kLanes) lowest |= (Ints)load(row + i) == (most | INT32_MIN);
    bool is_negative = false;
    for (int lane = 0; lane < kLanes; ++lane) is_negative |= lowest[lane] != 0;
    return scale_of_steps(most, 8.0f) | (is_negative ? 0 : 0x8000);
}

inline void store_pairs(const uint8_t* numbers, int dim, Int4Pair* to) {
    for (int i = 0; i < dim / 2; ++i)
        to[i].bits = static_cast<uint8_t>(numbers[i] | numbers[i + dim / 2] << 4);
}

// Stores zeros, for a row of zeros or a row with infinities or NaN. Returns the row's scale: 0 for
// zeros, otherwise NaN.
inline uint16_t store_zeros(int32_t most, int dim, Int4Pair* to) {
    constexpr int kZeros = 0x88;
    std::memset(to, kZeros, static_cast<unsigned>(dim) / 2);
    return most == 0 ? 0 : kHalfNan;
}

// Quantizes a row of `dim` numbers (a multiple of 16) and returns the row's scale.
inline uint16_t quantize(const float* row, int dim, Int4Pair* to) {
    const int32_t most = largest_bits(row, dim);
    if (most == 0 || most >= kInfinityBits) return store_zeros(most, dim, to);
    const uint16_t scale = scale_of_4_bits(row, dim, most);
    const Floats divisor = all_of_half(scale);
    uint8_t numbers[kHeadMax];
    for (int i = 0; i < dim; i += kLanes) {
        const Ints each = rounded(load(row + i), divisor, all(-8.0f), all(7.0f)) + 8;
        const Bytes bytes = __builtin_convertvector(each, Bytes);
        std::memcpy(numbers + i, &bytes, sizeof bytes);
    }
    store_pairs(numbers, dim, to);
    return scale;
}

// The static channel order and scales of a KV head's keys.
struct KeyChannels {
    const int32_t* order;
    const float* scales;

    // The factor by which number `i` is multiplied in dequantization, besides the token's scale.
    float multiplier(int i, int dim) const { return i < dim / 4 ? scales[i] * 0.25f : scales[i]; }
};

// Quantizes a key and returns the token's scale.
inline uint16_t quantize_key(const float* row, int dim, const KeyChannels& channels,
                             Int4Pair* to) {
    alignas(64) float scaled[kHeadMax];
    for (int i = 0; i < dim; ++i) scaled[i] = row[channels.order[i]];
    for (int i = 0; i < dim; i += kLanes)
        store(scaled + i, load(scaled + i) / load(channels.scales + i));
    const int quarter = dim / 4, sixteenth = dim / 16;
    Int4Pair* const lower = to + dim / 2;
    const int32_t most = largest_bits(scaled, dim);
    if (most == 0 || most >= kInfinityBits) {
        std::memset(lower, 0, static_cast<unsigned>(sixteenth));
        return store_zeros(most, dim, to);
    }
    const uint16_t scale = scale_of_4_bits(scaled, dim, most);
    const Floats divisor = all_of_half(scale);
    uint8_t numbers[kHeadMax];
    Ints channel;
    for (int lane = 0; lane < kLanes; ++lane) channel[lane] = lane;
    for (int i = 0; i < dim; i += kLanes, channel += kLanes) {
        const Floats steps = channel < quarter ? all(4.0f) : all(1.0f);
        const Ints each = rounded(load(scaled + i) * steps, divisor, steps * -8.0f,
                                  steps * 8.0f - 1.0f) + __builtin_convertvector(steps * 8.0f, Ints);
        const Bytes bytes = __builtin_convertvector(each, Bytes);
        std::memcpy(numbers + i, &bytes, sizeof bytes);
    }
    for (int i = 0; i < sixteenth; ++i) {
        int bits = 0;
        for (int part = 0; part < 4; ++part)
            bits |= (numbers[i + part * sixteenth] & 3) << 2 * part;
        lower[i].bits = static_cast<uint8_t>(bits);
    }
    for (int i = 0; i < quarter; ++i) numbers[i] >>= 2;
    store_pairs(numbers, dim, to);
    return scale;
}

template <class Several>
inline void unpack_some(const Int4Pair* from, int half, int8_t* to) {
    Several pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    const Several low = (pairs & 15) - 8, high = (pairs >> 4) - 8;
    std::memcpy(to, &low, sizeof low);
    std::memcpy(to + half, &high, sizeof high);
}

// Unpacks the `dim` numbers of a row to int8.
inline void unpack(const Int4Pair* from, int dim, int8_t* to) {
    typedef uint8_t Some __attribute__((vector_size(8)));
    typedef uint8_t More __attribute__((vector_size(32)));
    const int half = dim / 2;
    int i = 0;
    for (; i + 32 <= half; i += 32) unpack_some<More>(from + i, half, to + i);
    for (; i < half; i += 8) unpack_some<Some>(from + i, half, to + i);
}

// Combines the upper 4 bits and the lower 2 bits of numbers to 6-bit numbers, for four words.
template <class Word>
inline void add_lower(const Int4Pair* lower, int8_t* to) {
    typedef Word Four __attribute__((vector_size(4 * sizeof(Word))));
    constexpr Word kLower = static_cast<Word>(0x0303030303030303);
    constexpr Word kUpper = static_cast<Word>(0x3f3f3f3f3f3f3f3f);
    Word bits;
    std::memcpy(&bits, lower, sizeof bits);
    Four numbers;
    std::memcpy(&numbers, to, sizeof numbers);
    const Four added = (Four{bits, bits, bits, bits} >> Four{0, 2, 4, 6}) & kLower;
    numbers = ((numbers & kUpper) << 2) | added;
    std::memcpy(to, &numbers, sizeof numbers);
}

// Unpacks the numbers of a key to int8.
inline void unpack_key(const Int4Pair* from, int dim, int8_t* to) {
    unpack(from, dim, to);
    const Int4Pair* const lower = from + dim / 2;
    if (dim == 64) return add_lower<uint32_t>(lower, to);
    if (dim == 128) return add_lower<uint64_t>(lower, to);
    const int sixteenth = dim / 16;
    for (int i = 0; i < dim / 4; ++i)
        to[i] = static_cast<int8_t>(
            to[i] * 4 + (lower[i % sixteenth].bits >> 2 * (i / sixteenth) & 3));
}

}  // namespace tandem::TANDEM_ISA
