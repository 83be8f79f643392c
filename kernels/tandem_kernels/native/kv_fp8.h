// Quantization of fp8 KV, bit-identical to kv_fp8.py.

namespace tandem::TANDEM_ISA {

// Rounds numbers within -448 to 448 to the nearest e4m3.
inline Bytes e4m3_of(Floats x) {
    const Words size = (Words)x & 0x7fffffffu;
    const Words normal = (size + 0x7ffffu + (size >> 20 & 1u) - (120u << 23)) >> 20;
    const Words tiny = (Words)((Floats)size + 0x1p14f) - (141u << 23);  // multiples of 2^-9
    const Words number = size < (121u << 23) ? tiny : normal;
    return __builtin_convertvector(number | ((Words)x >> 24 & 0x80u), Bytes);
}

// Quantizes a row of `dim` numbers (a multiple of 16) and returns the row's scale. `fixed` is the
// static scale; 0: the row has its own scale.
inline uint16_t quantize(const float* row, int dim, Fp8* to, uint16_t fixed) {
    const int32_t most = largest_bits(row, dim);
    if (most >= kInfinityBits || (most == 0 && fixed == 0)) {
        std::memset(to, 0, static_cast<unsigned>(dim));
        return most == 0 ? 0 : kHalfNan;
    }
    const Floats largest = all(448.0f);
    const uint16_t scale = fixed != 0 ? fixed : scale_of_steps(most, 448.0f);
    const Floats divisor = all_of_half(scale);
    for (int i = 0; i < dim; i += kLanes) {
        Floats x = load(row + i) / divisor;
        x = x > largest ? largest : x;
        x = x < -largest ? -largest : x;
        const Bytes bytes = e4m3_of(x);
        std::memcpy(to + i, &bytes, sizeof bytes);
    }
    return scale;
}

}  // namespace tandem::TANDEM_ISA
