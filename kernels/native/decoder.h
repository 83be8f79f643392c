// What Python hands over (kernels/native.py mirrors these structs with ctypes) and the entry points.
//
// Activations are fp32 row by row; weights are packed once (pack.cpp) into panels of 16 outputs,
//
//     panel p, input k, lane n: element ((p * in) + k) * 16 + n = W[16 p + n][k]
//
// so that the lanes of a vector are outputs and every output is summed over its inputs in one order:
// its bits depend neither on what shares the step, nor on threads, nor on the width of the vectors.

#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

enum Kind : int32_t { F32 = 0, BF16 = 1, I8 = 2 };

struct Matrix {
    const void* panels;
    const float* scales;  // of each output, for I8; else null
    const float* bias;    // of each output, or null
    int32_t in, out;
    int32_t kind;
    int32_t padding;
};

struct Layer {
    const float* attention_norm;
    const float* q_norm;  // [head_dim] or null
    const float* k_norm;
    const float* mlp_norm;
    Matrix qkv, attention_out, gate_up, down;
};

struct Model {
    const Layer* layers;
    const float* final_norm;
    const void* embedding;  // [vocab, hidden], F32 or BF16
    Matrix output;
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, inner, vocab;
    int32_t embedding_kind;
    float norm_eps;
    int32_t num_threads;
};

struct Span {  // a sequence's query rows, the last `num_queries` tokens of its context
    int32_t first_row, num_queries, context_len, first_table_entry;
};

struct Step {
    const int32_t* token_ids;  // [rows]
    const int32_t* slots;      // [rows]: block id * block size + offset
    const float* cosines;      // [rows, head_dim / 2]
    const float* sines;
    const Span* spans;
    const int32_t* block_tables;  // of all spans, one after another
    const int32_t* logit_rows;
    void* kv;  // [num_blocks, kv heads, layers, 2, block size, head_dim], F32 or BF16
    float* logits;  // [num_logit_rows, vocab]
    int32_t num_rows, num_spans, num_logit_rows, block_size, kv_kind;
};

struct Scratch;  // buffers of one decoder, kept from step to step

// Rows are computed up to the last layer's KV, then from there to the logits.
struct Entry {
    void (*to_last_kv)(const Model&, const Step&, Scratch&);
    void (*to_logits)(const Model&, const Step&, Scratch&);
};

#if defined(__x86_64__)
extern const Entry avx512, avx2;
#endif
extern const Entry plain;

}  // namespace tandem
