// Rows of 4 bits: the arithmetic of kv_int4.py, to the bit.

namespace tandem::TANDEM_ISA {

struct Int4Pair {  // two numbers plus 8
    uint8_t bits;
};

// Stores a row of `dim` numbers, a multiple of 16, and answers its scale.
inline uint16_t quantize(const float* row, int dim, Int4Pair* to) {
    constexpr int kHalfMax = 256, kZeros = 0x88;
    const int32_t most = largest_bits(row, dim);
    if (most == 0 || most >= kInfinityBits) {
        std::memset(to, kZeros, static_cast<unsigned>(dim) / 2);
        return most == 0 ? 0 : kHalfNan;
    }
    Ints lowest = {};  // of all lanes: whether there is -largest
    for (int i = 0; i < dim; i += kLanes) lowest |= (Ints)load(row + i) == (most | INT32_MIN);
    bool is_negative = false;
    for (int lane = 0; lane < kLanes; ++lane) is_negative |= lowest[lane] != 0;
    const uint16_t scale = scale_of_steps(most, 8.0f) | (is_negative ? 0 : 0x8000);
    const Floats divisor = all_of_half(scale);
    uint8_t numbers[2 * kHalfMax];
    for (int i = 0; i < dim; i += kLanes) {
        const Bytes each = __builtin_convertvector(
            rounded(load(row + i), divisor, -8.0f, 7.0f) + 8, Bytes);
        std::memcpy(numbers + i, &each, sizeof each);
    }
    for (int i = 0; i < dim / 2; ++i)
        to[i].bits = static_cast<uint8_t>(numbers[i] | numbers[i + dim / 2] << 4);
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

// The `dim` numbers of a row.
inline void unpack(const Int4Pair* from, int dim, int8_t* to) {
    typedef uint8_t Some __attribute__((vector_size(8)));
    typedef uint8_t More __attribute__((vector_size(32)));
    const int half = dim / 2;
    int i = 0;
    for (; i + 32 <= half; i += 32) unpack_some<More>(from + i, half, to + i);
    for (; i < half; i += 8) unpack_some<Some>(from + i, half, to + i);
}

}  // namespace tandem::TANDEM_ISA
