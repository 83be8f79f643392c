// What Python hands over (library.py mirrors these structs with ctypes) and the entry points.
//
// Activations are fp32 row by row; weights are packed once (pack.cpp), for each block of inputs in
// panels of 16 outputs, in the order in which a product reads them:
//
//     inputs first.. of a block of `num`, panel p, lane n:
//     element first * (outputs rounded up) + (p * num + k - first) * 16 + n = W[16 p + n][k]
//
// so that the lanes of a vector are outputs and every output is summed over its inputs in one order:
// its bits depend neither on what shares the step, nor on threads, nor on the width of the vectors.
// In bf16 outputs n and n + 8 of a panel lie side by side.
//
// Where the processor multiplies bf16 as it is (AMX, AVX512_BF16), weights in bf16 are packed in
// pairs of inputs instead, zeros after the last up to a multiple of 32:
//
//     panel p, lane n: element (p * (inputs rounded up) + k - k % 2) * 16 + 2 n + k % 2 = W[16 p + n][k]
//
// Of gate_up then the even panels are gates and the odd ones ups (each to a multiple of 16 outputs).
// A product rounds its inputs to bf16 then, and sums in fp32 over all inputs in the order of the
// instruction: a row's bits depend on as little as above, but on which of the two it is.

#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

enum Kind : int32_t {
    F32 = 0,
    BF16 = 1,
    I8 = 2,
    BF16_PAIRS = 3,
    I8_I4 = 4,  // of KV alone, as the next two
    I4 = 5,
    F8 = 6,
    I8_F32 = 7,    // of KV of latent attention alone: latents of int8, and rotated keys
    I8_BF16 = 15,
    // Of weights alone, in groups with scales (quantized.h). Q4_1 and Q5_1 have mins, too, and the
    // last two zeros.
    Q8_0 = 8,
    Q4_0 = 9,
    Q4_1 = 10,
    Q5_0 = 11,
    Q5_1 = 12,
    Q6 = 13,
    MXFP4 = 14,
    Q4_Z32 = 19,
    Q4_Z64 = 20,
    // Of weights alone, in fp8 (fp8.h).
    F8_F32 = 16,
    F8_BF16 = 17,
    F8_PAIRS = 18,
};

enum Activation : int32_t { SILU_GATE = 0, GELU_TANH_GATE = 1, CLAMPED_GATE = 2 };

struct Gating {
    int32_t activation;
    float alpha, limit;  // of CLAMPED_GATE
};

constexpr int kStepInputs = 32;  // of a step of a product of pairs

constexpr int kInputs = 384;  // at most, of a block: a panel's stay in the first-level cache

inline int num_input_blocks(int in) { return (in + kInputs - 1) / kInputs; }

inline int first_input(int in, int block) {
    return static_cast<int>(static_cast<int64_t>(in) * block / num_input_blocks(in));
}

struct Matrix {
    const void* panels;
    const float* scales;  // of each output, for I8; for fp8 see fp8.h; else null
    const float* bias;    // of each output, or null
    int32_t in, out;
    int32_t kind;
    int32_t scale_inputs;  // of fp8: inputs that share a scale, a multiple of kStepInputs
    Gating gating;  // of gates and ups
    const Matrix* rest;  // quantized outputs after these, of another kind or order; or null
    const int32_t* order;  // [in] of quantized weights: the input at each place; null: in order
};

struct Mlp {
    Matrix gate_up, down;
};

struct Experts {  // MLPs of one shape, of which each row has some
    const Mlp* mlps;  // [num]
    Matrix router;    // a logit for each
    const float* correction;  // [num]: added to sigmoids, which are the scores then; or null
    int32_t num, top_k;
    int32_t is_normalized;  // the weights of a row's experts sum to 1, before the scale
    int32_t num_groups, top_groups;  // experts are of the groups that rank first; 0: of all
    float scale;                     // of weights
};

struct Latent {  // see latent.h
    const float* q_norm;  // [q rank] of queries' latents, or null: they have none
    const float* kv_norm;
    Matrix q_out;          // [heads * (plain + rope), q rank]
    const Matrix* keys;    // of each head: [kv rank, plain]
    const Matrix* values;  // of each head: [value, kv rank]
    int32_t kv_rank, rope, plain, value;
    float norm_eps;
};

struct Layer {  // a norm that is null is not there
    const float* attention_norm;
    const float* attention_post_norm;  // of what attention adds to the residual stream
    const float* q_norm;               // [head_dim], or of all heads as one
    const float* k_norm;
    const float* sinks;  // [heads]: scores that no keys have, or null
    const float* mlp_norm;
    const float* mlp_post_norm;
    Matrix qkv, attention_out;
    Mlp mlp;  // beside experts the one that all rows have, or none
    const Experts* experts;  // in the place of the MLP, or null
    const Latent* latent;    // all layers have one, or none
    int32_t rope;    // which table of angles
    int32_t window;  // keys that a query sees, its own the last; 0: all before it
    int32_t group;   // of KV: where its keys and values lie
    int32_t place;   // among the layers of its group
};

struct Model {
    const Layer* layers;
    const float* final_norm;
    // [vocab, hidden]: F32 or BF16, or panels of a quantized kind; null: the output matrix
    const void* embedding;
    Matrix output;
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, inner, vocab;
    int32_t embedding_kind, computed_kind;  // the last of norms and biases: F32 or BF16
    float norm_eps;
    int32_t num_threads;
    int32_t norms_all_heads;  // of q and of k as one, not each head
    float attention_scale;    // of scores
    float embedding_multiplier, residual_multiplier, logits_multiplier;
    float logit_cap;      // 0: none
    float attention_cap;  // of scores; 0: none
};

struct Span {  // a sequence's query rows, the last `num_queries` tokens of its context
    int32_t first_row, num_queries, context_len, first_table_entry;
    // In layers without a window of their own a query sees so many first keys of the context and so
    // many last ones, its own among them; 0 last ones: all. Table entries between are not read.
    int32_t num_first, num_last;
    int32_t first_sum;  // of Step::block_sums; -1: the span has none
};

struct KvGroup {  // layers whose KV lies in one pool, by block ids of its own
    void* kv;             // [num_blocks][kv heads][layers] parts: see kv_part.h
    const int32_t* slots;         // [rows]: block id * block size + offset
    const int32_t* block_tables;  // of all spans, one after another; not read before a window
    int64_t block_bytes, head_bytes, layer_bytes;  // from one block, head or layer to the next
    const int32_t* key_order;  // of I4: channels [layers][kv heads][head_dim]; else null
    const float* key_scales;   // of the channels, in that order
    const uint16_t* fixed_scales;  // of F8: float16 [layers][K and V]; null: tokens have their own
};

// What a LoRA adapter adds to a product: (x A^T) B^T. The matrices A of its parts are one below the
// other, B has the scale; none of them is packed in pairs.
struct LoraPart {
    Matrix b;                           // [outputs of the part, its rank]
    int32_t first_output, first_rank;
};

struct LoraProduct {
    Matrix a;  // [ranks of all parts, inputs]
    const LoraPart* parts;
    int32_t num_parts;  // 0: it adds nothing
};

struct LoraLayer {  // of a layer with experts, gates, ups and downs are of its shared MLP
    LoraProduct qkv, attention_out, gate_up, down;
    LoraProduct q_out;                    // of Latent, as the next two
    const LoraProduct *keys, *values;     // of each head, or null: nothing
};

struct LoraRows {  // an adapter's
    const LoraLayer* layers;
    int32_t first_row, num_rows;
};

struct Step {
    const int32_t* token_ids;  // [rows]
    const int32_t* positions;  // [rows]
    const float* cosines;      // [tables][more than any position][what is rotated / 2]
    const float* sines;
    const Span* spans;
    const int32_t* logit_rows;
    const KvGroup* groups;
    float* logits;         // [num_logit_rows, vocab]
    int32_t* most_likely;  // [num_logit_rows]: tokens, of equals the first
    // Of each block of some spans, what its keys' weights have summed to so far: the step's are added.
    float* block_sums;
    int32_t num_rows, num_spans, num_logit_rows, block_size;
    int32_t kv_kind;       // F32, BF16, I8, I8_I4 (keys and values), I4, F8, I8_F32 or I8_BF16
    int64_t table_floats;  // from one table of angles to the next
    const LoraRows* adapted;  // rows with adapters, which are the first ones
    int32_t num_adapted;
    int32_t lora_rank;  // the largest LoraProduct's

    const KvGroup& group_of(const Layer& layer) const { return groups[layer.group]; }
};

// Rows of logits, a token of each, and what is found of them (logprobs.h).
struct Measure {
    const int32_t* rows;       // [num_rows]: of the step's logits
    const int32_t* token_ids;  // [num_rows]
    float* logprobs;           // [num_rows]
    int32_t* ranks;            // [num_rows]
    int32_t* top_ids;          // [num_rows, num_top]
    float* top_logprobs;       // [num_rows, num_top]
    int32_t num_rows, num_top;  // num_top: at most the vocabulary
};

struct Scratch;  // buffers of one decoder, kept from step to step

// Rows are computed up to the last layer's KV, then from there to the logits.
struct Entry {
    void (*to_last_kv)(const Model&, const Step&, Scratch&);
    void (*to_logits)(const Model&, const Step&, Scratch&);
    Kind kind_of_bf16;  // as which weights in bf16 are to be packed
    double (*product_gflops)(int num_threads, Kind kind);
    double (*read_gb_per_s)(const float* data, size_t num, int num_threads);
    void (*measure)(const float* logits, int vocab, const Measure&, int num_threads);
};

#if defined(__x86_64__)
extern const Entry avx512, avx2;
#if __GNUC__ >= 11  // older ones do not know these instructions
#define TANDEM_KNOWS_BF16
extern const Entry amx, avx512_bf16;
bool amx_permitted();  // by the system, for this process: to be asked before anything of `amx`
#endif
#endif
extern const Entry plain;

}  // namespace tandem
