// Layers with a state: the structs that the kernels of state_kernels.h take. All numbers are fp32,
// because a rounding error stays in the state.

#pragma once

#include <cstdint>

#include "team.h"

namespace tandem {

constexpr int kTapsMax = 8;

// The tokens that a step computes for a sequence, in consecutive rows. A sequence whose first
// position is 0 begins with a state of zeros, whatever its slot contains. The spans of a step have
// different slots.
struct StateSpan {
    int32_t first_row, num_rows, first_position, slot;
};

// Causal convolution of each channel over the rows of each span, as in causal_conv.py.
struct Convolution {
    const float* x;  // [rows][channels], with a stride between rows
    float* y;        // [rows][channels], with the same stride. May be x.
    int64_t row_stride;
    const float* taps;  // [num_taps][channels]: the transposed weights
    const float* bias;  // [channels] or null
    // [slots][groups][num_taps - 1][group_size]: the last inputs, oldest first
    float* states;
    int64_t slot_stride, group_stride, tap_stride;
    int32_t num_channels, group_size, num_taps, has_silu;  // num_taps: at most kTapsMax
    const StateSpan* spans;
    int32_t num_spans;
};

// Rows of heads: number i of head h in row r is data[r * row_stride + h * head_stride + i].
struct HeadRows {
    const float* data;
    int64_t row_stride, head_stride;

    const float* of(int row, int head) const { return data + row * row_stride + head * head_stride; }
};

// Gated DeltaNet, Kimi Delta Attention or Mamba 2 in the recurrent form, as in linear_attention.py.
//
//                      Gated DeltaNet     Kimi Delta Attention     Mamba 2
//     q, k, v          q, k, v            q, k, v                  C, B, x
//     a                a                  (unused)                 dt
//     decays           null               a                        null
//     b                b                  b                        (unused)
//     skip             null               null                     D
struct StateScan {
    HeadRows q, k;  // heads of key_dim numbers
    HeadRows v;     // heads of value_dim numbers, which is a multiple of 16
    // The v heads of one k head have the stride v.head_stride, and those of the next k head begin
    // this much later.
    int64_t v_group_stride;
    HeadRows a, b;  // one number for each v head
    // [rows][v heads][key_dim], with a stride between rows: the inputs of the decays of channels.
    // The scan replaces them by the decays. null: all channels of a head have the decay of `a`.
    float* decays;
    int64_t decay_stride;
    const float *a_log, *dt_bias, *skip;  // [v heads]; dt_bias with `decays`: [v heads][key_dim]
    float dt_min, dt_max;                 // Mamba 2: limits of softplus(dt + dt_bias)
    float rate_max;                       // factor on sigmoid(b)
    float* y;                             // [rows][v heads][value_dim]
    int64_t y_stride;                     // between rows
    float* states;  // [slots][v heads][key_dim][value_dim], with strides
    int64_t slot_stride, head_stride;
    int32_t num_k_heads, num_v_heads, key_dim, value_dim;
    int32_t is_delta;  // false: Mamba 2
    // Spans with many rows should come first, so that no thread begins one when the others are
    // almost done.
    const StateSpan* spans;
    int32_t num_spans;
};

}  // namespace tandem
