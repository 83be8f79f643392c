// The packed format of fp8 (e4m3) weights. A product first expands the weights, that is, converts
// them to fp32 or bf16.
//
// A panel has 16 outputs with all their inputs, padded with zeros to a multiple of 32 inputs. A
// weight is one byte. The weight of input k and output n of a panel is at this byte:
//
//     kind       byte                              expanded to
//     F8_F32     k * 16 + n                        fp32
//     F8_BF16    k * 16 + n                        bf16, and then fp32
//     F8_PAIRS   (k - k % 2) * 16 + 2 n + k % 2    pairs of bf16 (decoder.h)
//
// The scales are fp32 [panels][blocks of scale_inputs inputs][16].
//
// An expanded weight is number * scale, rounded to the type. Products are therefore bit-identical
// to products with a matrix that was stored in this type.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "decoder.h"

namespace tandem {

// Bytes of expanded panels that fit in the L2 cache.
constexpr int kExpandedBytes = 256 << 10;
constexpr int kExpandedPanelsMost = 16;

inline bool is_fp8(int32_t kind) { return kind >= F8_F32 && kind <= F8_PAIRS; }

// Returns the kind to which weights of `kind` are expanded. The inputs of a product have the format
// for that kind.
inline int32_t kind_of_inputs(int32_t kind) {
    if (kind == F8_PAIRS) return BF16_PAIRS;
    return is_fp8(kind) ? F32 : kind;
}

inline size_t panel_numbers(int in) {
    return static_cast<size_t>(in + kStepInputs - 1) / kStepInputs * kStepInputs * 16;
}

// Returns the number of panels expanded at a time. It is even, because a panel of gates is followed
// by the panel of the same ups.
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

// Returns the size in floats of a buffer for expanded panels that is large enough for all products
// of the model; 0 without fp8 weights.
inline size_t expanded_floats(const Model& model) {
    size_t most = 0;
    const auto add = [&](const Matrix& matrix) {
        if (is_fp8(matrix.kind)) most = std::max(most, expanded_floats(matrix.in));
    };
    add(model.output);
    for (int i = 0; model.alt_up != nullptr && i + 1 < model.alt_up->num; ++i) {
        add(model.alt_up->make[i]);
        add(model.alt_up->merge[i]);
    }
    for (int i = 0; i < model.num_layers; ++i) {
        const Layer& layer = model.layers[i];
        add(layer.qkv);
        add(layer.attention_out);
        if (layer.input != nullptr) {
            add(layer.input->gate);
            add(layer.input->projection);
        }
        if (layer.state != nullptr) {
            add(layer.state->decay_out);
            add(layer.state->gate_out);
        }
        if (layer.alt_up != nullptr) {
            add(layer.alt_up->left);
            add(layer.alt_up->right);
        }
        most = std::max(most, expanded_floats(layer.mlp));
        const int num_experts = layer.experts == nullptr ? 0 : layer.experts->num;
        for (int e = 0; e < num_experts; ++e)
            most = std::max(most, expanded_floats(layer.experts->mlps[e]));
    }
    return most;
}

}  // namespace tandem
