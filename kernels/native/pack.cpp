#include "pack.h"

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

// Elements of one size to where they belong, as they are.
template <class T>
void reorder(const T* weights, int64_t out, int64_t in, T* panels) {
    for (int64_t first = 0; first < out; first += kPanel)
        for (int64_t k = 0; k < in; ++k)
            for (int64_t lane = 0; lane < kPanel; ++lane)
                *panels++ = first + lane < out ? weights[(first + lane) * in + k] : T{};
}

void quantize(const void* weights, int32_t kind, int64_t out, int64_t in, int8_t* panels,
              float* scales) {
    for (int64_t n = 0; n < out; ++n) {
        float largest = 0.0f;
        for (int64_t k = 0; k < in; ++k)
            largest = std::fmax(largest, std::fabs(widen(weights, kind, n * in + k)));
        scales[n] = largest / 127.0f;
    }
    for (int64_t first = 0; first < out; first += kPanel)
        for (int64_t k = 0; k < in; ++k)
            for (int64_t n = first; n < first + kPanel; ++n) {
                const bool empty = n >= out || scales[n] == 0.0f;
                const float weight = empty ? 0.0f : widen(weights, kind, n * in + k) / scales[n];
                *panels++ = static_cast<int8_t>(std::lrint(weight));
            }
}

}  // namespace

void pack(const void* weights, int32_t weights_kind, int64_t out, int64_t in, int32_t kind,
          void* panels, float* scales) {
    if (kind == I8)
        quantize(weights, weights_kind, out, in, static_cast<int8_t*>(panels), scales);
    else if (kind == F32)
        reorder(static_cast<const uint32_t*>(weights), out, in, static_cast<uint32_t*>(panels));
    else
        reorder(static_cast<const uint16_t*>(weights), out, in, static_cast<uint16_t*>(panels));
}

}  // namespace tandem
