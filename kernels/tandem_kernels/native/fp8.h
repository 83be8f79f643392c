// How weights in fp8 (e4m3) are packed: panels of 16 outputs, each of all its inputs and of zeros up
// to a multiple of 32, in the order in which a product reads what they become:
//
//     F8_F32, F8_BF16    byte k * 16 + n is input k of output n; they become fp32, and
//                        of F8_BF16 fp32 that were rounded to bf16
//     F8_PAIRS           byte (k - k % 2) * 16 + 2 n + k % 2; they become pairs of bf16 (decoder.h)
//     scales             fp32 [panels][blocks of scale_inputs inputs][16]
//
// A weight is its number times its scale, rounded to what it becomes: a product has the bits that it
// has with weights that were stored so.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "decoder.h"

namespace tandem {

constexpr int kExpandedBytes = 256 << 10;  // of panels at once, in the second-level cache
constexpr int kExpandedPanelsMost = 16;

inline bool is_fp8(int32_t kind) { return kind >= F8_F32 && kind <= F8_PAIRS; }

// As whose a product's inputs lie.
inline int32_t kind_of_inputs(int32_t kind) {
    if (kind == F8_PAIRS) return BF16_PAIRS;
    return is_fp8(kind) ? F32 : kind;
}

inline size_t panel_numbers(int in) {
    return static_cast<size_t>(in + kStepInputs - 1) / kStepInputs * kStepInputs * 16;
}

// An even number: gates are multiplied beside their ups.
inline int panels_expanded(int in) {
    const auto most = static_cast<int>(kExpandedBytes / sizeof(uint16_t) / panel_numbers(in));
    return std::clamp(most / 2 * 2, 2, kExpandedPanelsMost);
}

// What a thread expands panels to.
inline size_t expanded_floats(int in) { return panels_expanded(in) * panel_numbers(in); }

inline size_t expanded_floats(const Mlp& mlp) {
    size_t most = 0;
    for (const Matrix* matrix : {&mlp.gate_up, &mlp.down})
        if (is_fp8(matrix->kind)) most = std::max(most, expanded_floats(matrix->in));
    return most;
}

// The same of all products of a model; 0: none is with weights in fp8.
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
