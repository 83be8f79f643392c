#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tandem {
namespace {

constexpr int64_t kPanel = 16;

float widen(const void* weights, int32_t kind, int64_t at) {
    if (kind == F32) return static_cast<const float*>(weights)[at];
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(weights)[at]) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// Calls `write(output, input)` in the order of the packed weights.
template <class Write>
void in_order(int64_t out, int64_t in, bool in_pairs, Write write) {
    for (int block = 0; block < num_input_blocks(in); ++block)
        for (int64_t first = 0; first < out; first += kPanel)
            for (int64_t k = first_input(in, block); k < first_input(in, block + 1); ++k)
                for (int64_t lane = 0; lane < kPanel; ++lane)
                    write(first + (in_pairs ? lane / 2 + lane % 2 * (kPanel / 2) : lane), k);
}

// Copies weights of type T to their packed positions.
template <class T>
void reorder(const T* weights, int64_t out, int64_t in, bool in_pairs, T* panels) {
    in_order(out, in, in_pairs, [&](int64_t n, int64_t k) {
        *panels++ = n < out ? weights[n * in + k] : T{};
    });
}

// Packs weights so that kSide consecutive inputs of an output are adjacent. Pads with zeros.
template <int kSide, class T>
void put_side_by_side(const T* weights, int64_t out, int64_t in, T* panels) {
    const int64_t padded = (in + kStepInputs - 1) / kStepInputs * kStepInputs;
    for (int64_t first = 0; first < out; first += kPanel)
        for (int64_t k = 0; k < padded; k += kSide)
            for (int64_t n = first; n < first + kPanel; ++n)
                for (int64_t i = k; i < k + kSide; ++i)
                    *panels++ = n < out && i < in ? weights[n * in + i] : 0;
}

void quantize(const void* weights, int32_t kind, int64_t out, int64_t in, int8_t* panels,
              float* scales) {
    for (int64_t n = 0; n < out; ++n) {
        float largest = 0.0f;
        for (int64_t k = 0; k < in; ++k)
            largest = std::max(largest, std::fabs(widen(weights, kind, n * in + k)));
        scales[n] = largest / 127.0f;
    }
    in_order(out, in, false, [&](int64_t n, int64_t k) {
        const bool empty = n >= out || scales[n] == 0.0f;
        const float weight = empty ? 0.0f : widen(weights, kind, n * in + k) / scales[n];
        *panels++ = static_cast<int8_t>(std::lrint(weight));
    });
}

}  // namespace

void pack(const void* weights, int32_t weights_kind, int64_t out, int64_t in, int32_t kind,
          void* panels, float* scales) {
    if (kind == I8)
        quantize(weights, weights_kind, out, in, static_cast<int8_t*>(panels), scales);
    else if (kind == F32)
        reorder(static_cast<const uint32_t*>(weights), out, in, false,
                static_cast<uint32_t*>(panels));
    else if (kind == BF16_PAIRS)
        put_side_by_side<2>(static_cast<const uint16_t*>(weights), out, in,
                            static_cast<uint16_t*>(panels));
    else
        reorder(static_cast<const uint16_t*>(weights), out, in, true,
                static_cast<uint16_t*>(panels));
}

bool pack_fp8(const uint8_t* weights, int64_t out, int64_t in, int32_t kind, uint8_t* panels) {
    (kind == F8_PAIRS ? put_side_by_side<2, uint8_t> : put_side_by_side<1, uint8_t>)(weights, out, in,
                                                                                     panels);
    bool are_numbers = true;
    for (int64_t i = 0; i < out * in; ++i) are_numbers &= (weights[i] & 0x7f) != 0x7f;
    return are_numbers;
}

}  // namespace tandem
