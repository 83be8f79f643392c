// The packed format of fp8 (e4m3) weights: panels of 16 outputs with all their inputs, padded with
// zeros to a multiple of 32, in the order in which a product reads the expanded weights:
//
//     F8_F32, F8_BF16    byte k * 16 + n is input k of output n; expanded to fp32 (for
//                        F8_BF16 after rounding to bf16)
//     F8_PAIRS           byte (k - k % 2) * 16 + 2 n + k % 2; expanded to pairs of bf16 (decoder.h)
//     scales             fp32 [panels][blocks of scale_inputs inputs][16]
//
// A weight is number * scale, rounded to the expanded type. Products are therefore bit-identical to
// those with weights stored in that type.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "decoder.h"

namespace tandem {

// bytes of the panels that are expanded at a time, which fit in the L2 cache
constexpr int kExpandedBytes = 256 << 10;
constexpr int kExpandedPanelsMost = 16;

inline bool is_fp8(int32_t kind) { return kind >= F8_F32 && kind <= F8_PAIRS; }

// Returns the kind whose input format is used by products with weights of `kind`.
inline int32_t kind_of_inputs(int32_t kind) {
    if (kind == F8_PAIRS) return BF16_PAIRS;
    return is_fp8(kind) ? F32 : kind;
}

inline size_t panel_numbers(int in) {
    return static_cast<size_t>(in + kStepInputs - 1) / kStepInputs * kStepInputs * 16;
}

// Returns the number of panels expanded at a time. It is even, because gates are multiplied
// together with their ups.
inline int panels_expanded(int in) {
    const auto most = static_cast<int>(kExpandedBytes / sizeof(uint16_t) / panel_numbers(in));
    return std::clamp(most / 2 * 2, 2, kExpandedPanelsMost);
}

// Returns the size in floats of the buffer to which a thread expands panels.
inline size_t expanded_floats(int in) { return panels_expanded(in) * panel_numbers(in); }

inline size_t expanded_floats(const Mlp& mlp) {
    size_t most = 0;
    for (const Matrix* matrix : {&mlp.gate_up, &mlp.down})
        if (is_fp8(matrix->kind)) most = std::max(most, expanded_floats(matrix->in));
    return most;
}

// Returns the largest such size over all products of a model; 0 if no weights are in fp8.
inline size_t expanded_floats(const Model& model) {
    size_t most = is_fp8(model.output.kind) ? expanded_floats(model.output.in) : 0;
    for (int i = 0; i < model.num_layers; ++i) {
        const Layer& layer = model.layers[i];
        for (const Matrix* matrix : {&layer.qkv, &layer.attention_out})
            if (is_fp8(matrix->kind)) most = std::max(most, expanded_floats(matrix->in));
        most = std::max(most, expanded_floats(layer.mlp));
        const int num_experts = layer.experts == nullptr ? 0 : layer.experts->num;
        for (int e = 0; e < num_experts; ++e)
            most = std::max(most, expanded_floats(layer.experts->mlps[e]));
    }
    return most;
}

}  // namespace tandem
