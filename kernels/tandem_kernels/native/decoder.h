// The structs that Python passes (library.py mirrors them with ctypes), and the entry points.
//
// Activations are fp32 in row-major order. Weights W [outputs][inputs] are packed once (pack.cpp),
// in the order in which a product reads them. The outputs are divided into panels of 16, and the
// inputs into blocks of at most kInputs. A block is stored panel after panel, a panel input after
// input, and an input has the weights of 16 outputs. So in a block of `num` inputs from input
// `first` on, the weight of input k and output 16 p + n is the element
//
//     first * (outputs rounded up to 16) + (p * num + k - first) * 16 + n
//
// The lanes of a vector are therefore outputs, and every output is summed over its inputs in one
// order. The bits of an output do not depend on the batch, the threads or the vector width. In
// bf16, outputs n and n + 8 of a panel are adjacent.
//
// If the processor multiplies bf16 directly (AMX, AVX512_BF16), bf16 weights are packed in pairs of
// inputs instead (BF16_PAIRS), because the instructions multiply two inputs at a time. Inputs are
// padded with zeros to a multiple of 32. The weight of input k and output 16 p + n is the element
//
//     (p * (inputs rounded up to 32) + k - k % 2) * 16 + 2 n + k % 2
//
// In this format, the even panels of gate_up are gates and the odd panels are ups, each padded to a
// multiple of 16 outputs. A product rounds its inputs to bf16 and sums in fp32 in the order of the
// instruction. The bits of a row then also depend on the instruction (AMX or AVX512_BF16).

#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.h"
#include "state.h"

namespace tandem {

enum Kind : int32_t {
    F32 = 0,
    BF16 = 1,
    I8 = 2,
    BF16_PAIRS = 3,
    I8_I4 = 4,  // for KV only, as are I4 and F8
    I4 = 5,
    F8 = 6,
    I8_F32 = 7,    // KV of latent attention only: int8 latents, and rotated keys in fp32 or bf16
    I8_BF16 = 15,
    // For weights only, in groups with scales (quantized.h). Q4_1, Q5_1 and Q2_K also have minimums,
    // and Q4_Z32 and Q4_Z64 zero points.
    Q8_0 = 8,
    Q4_0 = 9,
    Q4_1 = 10,
    Q5_0 = 11,
    Q5_1 = 12,
    Q6 = 13,
    MXFP4 = 14,
    Q4_Z32 = 19,
    Q4_Z64 = 20,
    IQ4 = 21,
    Q2_K = 22,
    Q3_K = 23,
    TERNARY = 24,
    // For weights only, in fp8 (fp8.h).
    F8_F32 = 16,
    F8_BF16 = 17,
    F8_PAIRS = 18,
};

// With RELU_SQUARED an MLP has no gates: `gate_up` has only the ups.
enum Activation : int32_t {
    SILU_GATE = 0,
    GELU_TANH_GATE = 1,
    CLAMPED_GATE = 2,
    RELU_SQUARED = 3
};

struct Gating {
    int32_t activation;
    bool has_gates() const { return activation != RELU_SQUARED; }
    // SILU_GATE: factors on the gate before the activation, and on the result. CLAMPED_GATE: the
    // factor on the gate in the sigmoid, the limit, and what is added to the up.
    float alpha, limit, offset;
};

constexpr int kStepInputs = 32;  // inputs in one step of a product with weights in pairs

// Largest number of inputs in a block, so that the weights of one panel fit in the L1 cache.
constexpr int kInputs = 384;

inline int num_input_blocks(int in) { return (in + kInputs - 1) / kInputs; }

inline int first_input(int in, int block) {
    return static_cast<int>(static_cast<int64_t>(in) * block / num_input_blocks(in));
}

struct Matrix {
    // The stored panels: `num_panels` panels from number `first_panel` on. A rank of a
    // tensor-parallel engine stores only the panels that its own threads multiply.
    const void* panels;
    const float* scales;  // I8: one per output; fp8: see fp8.h; other kinds: null
    const float* bias;    // one per output, or null
    int32_t first_panel, num_panels;
    int32_t in, out;
    int32_t kind;
    int32_t scale_inputs;  // fp8: inputs that share a scale, a multiple of kStepInputs
    Gating gating;  // activation, for gates and ups
    // The further outputs of a quantized matrix, if they have another kind or order; else null. They
    // may be fp32.
    const Matrix* rest;
    // [in], quantized weights: order[i] is the input whose weights are at position i.
    // null: the inputs are in their own order.
    const int32_t* order;
};

struct Mlp {
    Matrix gate_up, down;
};

struct Experts {  // the experts of a layer, which all have one shape, and their router
    const Mlp* mlps;  // [num]
    Matrix router;    // one logit per expert
    // [num], added to the scores of experts to rank them. null: experts are ranked by the logits.
    const float* correction;
    int32_t num, top_k;
    int32_t is_normalized;  // true: the weights of a row's experts sum to 1, before `scale`
    int32_t has_sigmoids;   // true: the score of an expert is sigmoid(logit), not a softmax
    int32_t has_roots;      // true: the score is the square root of softplus(logit)
    // true: the weight of an expert multiplies the expert's input instead of its output
    int32_t weighs_inputs;
    int32_t num_groups, top_groups;  // experts are chosen in the `top_groups` best groups; 0: all
    float scale;                     // factor on the weights
    // [hidden]: the weights of the shared MLP's gate, times those of the norm before the MLP. null:
    // the shared MLP has no gate.
    const float* shared_gate;
    // [hidden]: norms before the router and the experts, and after the experts and the shared MLP.
    // null: the layer's norm before the MLP is used, and none after.
    const float *router_norm, *input_norm, *output_norm, *shared_output_norm;
    const float* scales;  // [num], factors on the weights of the experts; null: none
    const int32_t* table;  // [vocab, top_k]: the experts of each token; null: the router chooses
};

struct Latent {  // see latent.h
    const float* q_norm;  // [q rank], for the queries' latents; null: queries have no latents
    const float* kv_norm;
    Matrix q_out;          // [heads * (plain + rope), q rank]
    const Matrix* keys;    // per head [kv rank, plain]
    const Matrix* values;  // per head [value, kv rank]
    int32_t kv_rank, rope, plain, value;
    float norm_eps;
};

// The additional weights of attention with one KV head whose keys are its values (shared_kv.h).
struct SharedKv {
    const float* q_norm;       // [q rank]: the norm of the queries' latents
    const float* kv_norm;      // [head_dim]
    Matrix q_out;              // [heads * head_dim, q rank]
    const Matrix* out_groups;  // per group [out rank, heads / groups * head_dim]
    int32_t num_groups;
    int32_t rope;  // number of elements of a head that RoPE rotates; they come last
};

// The compressor of a layer makes attention's entries, and those of the indexer if there is one.
struct Compressor {  // see compressor.h
    Matrix inputs;  // [inputs, hidden]: for each kind of entry, the inputs and then the gates
    const float* bias[2];  // [rate][dim, or 2 dim with overlap]: added to the gates
    const float* norm[2];  // [dim]
    int32_t dims[2];       // elements of an entry; 0: there are no entries of this kind
    int32_t rate;          // number of tokens of a run, from which an entry is made
    int32_t has_overlap;   // true: an entry is made from the run before, too
    // The KV groups of the entries and of the inputs, and the numbers of the layer's parts there.
    // The indexer's entries are the part after attention's.
    int32_t entry_group, entry_part, input_group, input_part;
};

struct Indexer {  // see indexer.h
    // [heads * rounded dim, inputs]. If queries have latents, these are the inputs, otherwise the
    // normalized hidden states. Each head has `dim` outputs and then zeros.
    Matrix queries;
    Matrix keys;              // [dim, hidden]; no outputs: the keys are entries of a compressor
    Matrix head_weights;      // [heads, hidden], if tokens are chosen
    const float* query_norm;  // [dim]: norm of each head's query; null: none
    const float* key_norm;    // [dim]
    const float* key_bias;    // [dim]: the norm of keys is a LayerNorm with this bias; null: RMSNorm
    int32_t num_heads, dim, rope;  // rope: number of elements that RoPE rotates; they come first
    int32_t top_k;        // number of tokens, or of blocks, to which a query attends
    int32_t choice_size;  // number of tokens in a chosen block; 1: tokens are chosen
    int32_t num_local;    // number of blocks that are always chosen, up to that of the query
    int32_t place;        // index among the indexers of all layers
    int32_t rate;         // number of tokens of a key: 1, or that of a compressor's entries
    float key_norm_eps;
};

enum StateForm : int32_t { GATED_DELTA = 0, MAMBA2 = 1, SHORT_CONV = 2, KIMI_DELTA = 3 };

constexpr int kSectionsMax = 3;

struct StateLayer {  // see state_layer.h
    // For each section of the convolution's channels: the taps [num_taps][channels], and the biases
    // [channels] or null.
    const float *taps[kSectionsMax], *conv_bias[kSectionsMax];
    // [v heads]; dt_bias of Kimi Delta Attention: [outputs]. skip: null except for Mamba 2.
    const float *a_log, *dt_bias, *skip;
    const float* norm;                    // [outputs]; without a norm, factors on the output
    int32_t form;                         // StateForm
    int32_t has_norm;
    // Mamba 2: k heads are groups. Short convolution: value_dim is the number of channels.
    int32_t num_k_heads, num_v_heads, key_dim, value_dim, num_taps;
    int32_t group, place;  // as in Layer, for the state
    float rate_max;        // Gated DeltaNet: factor on the rates sigmoid(b)
    float norm_eps;
    // Kimi Delta Attention: the second matrices of the decays and of the output gates, [outputs, dim]
    Matrix decay_out, gate_out;
};

struct LayerInput {  // see layer_inputs.h
    Matrix gate;        // [size, hidden]
    Matrix projection;  // [hidden, size]
    const float* norm;  // [hidden]
};

struct LayerInputs {  // the embeddings that tokens have for each layer (layer_inputs.h)
    const void* embedding;  // [vocab, layers * size]: F32 or BF16
    Matrix projection;      // [layers * size, hidden]
    const float* norm;      // [size]
    int32_t embedding_kind, size;
    int32_t vocab;     // number of embeddings; tokens from this id on have that of token 0
    float multiplier;  // factor on the embeddings
};

struct AltUpLayer {  // see alt_up.h
    // [copies][hidden]: weights of the router, times those of its norm, divided by `hidden`
    const float* router;
    const float* prediction;    // [copies * copies][copies]
    const float* correction;    // [copies][copies]
    const float* output_scale;  // [hidden]; null: no factors
    Matrix left, right;         // [rank, hidden] and [hidden, rank]: LAuReL
    const float* laurel_norm;   // [hidden]
};

struct AltUp {  // the copies of the residual stream
    const Matrix *make, *merge;  // [copies - 1]: matrices [hidden, hidden]
    int32_t num, active;         // number of copies, and index of the one that layers compute
};

constexpr int kCopiesMax = 16;

// How several residual streams become the input of attention, of the MLP, or of the last norm.
struct StreamMixture {  // see streams.h
    Matrix matrix;       // [outputs, streams * hidden], fp32
    const float* base;   // [outputs]
    const float* scale;  // one for each of up to 3 kinds of outputs
};

struct LayerStreams {
    StreamMixture attention, mlp;
};

struct Streams {
    StreamMixture head;  // makes the input of the last norm
    int32_t num, num_iterations;
    float eps;
};

struct Layer {  // Norms that the model does not have are null.
    const float* attention_norm;
    const float* attention_post_norm;  // applied to the output of attention
    const float* q_norm;               // [head_dim], or [heads * head_dim] if norms_all_heads
    const float* k_norm;
    const float* sinks;  // [heads]: attention sinks, or null
    const float* mlp_norm;
    const float* mlp_post_norm;
    Matrix qkv, attention_out;
    const float* projected_factors;  // factors on the outputs of `qkv`, or null
    Mlp mlp;  // with experts: the shared experts, if there are any
    const Experts* experts;  // null: a dense MLP
    // null: grouped-query attention; all layers have the same form of attention
    const Latent* latent;
    int32_t rope;    // index of the layer's table of cosines and sines
    // Keys to which a query attends, including its own; 0: no limit. A negative number -c: the query
    // at position p attends to the keys from position p - p % c on.
    int32_t window;
    int32_t group;   // index of the layer's KV group
    int32_t place;   // index of the layer among the layers of this KV group
    // The last outputs of `qkv` are gates on attention's output, one for each head or one for each
    // of its elements. 0: no gates.
    int32_t num_gates;
    int32_t has_attention;    // false: the layer keeps no KV
    int32_t has_mlp;          // false: the layer has neither an MLP nor experts
    const StateLayer* state;  // null: the layer keeps no state
    // value_dim: numbers of a value that `qkv` computes, at most head_dim. The pool has zeros after
    // them. With latent attention it is head_dim.
    int32_t num_kv_heads, head_dim, value_dim;
    // true: the layer has no keys and values, and reads those at `group` and `place`, which an
    // earlier layer has stored. `qkv` computes only queries.
    int32_t shares_kv;
    float scalar;             // factor on the output of the layer
    const LayerInput* input;  // null: tokens have no embeddings for layers
    // The indexer that chooses the keys to which a query attends. null: a query attends to all.
    const Indexer* indexer;
    // true: `indexer` is an earlier layer's, and this layer uses the choice of that layer
    int32_t shares_choice;
    // true: gates of the MLP below the mean of a row plus `gate_deviations` standard deviations
    // become 0
    int32_t has_sparse_gates;
    float gate_deviations;
    const AltUpLayer* alt_up;  // null: the residual stream has no copies
    const SharedKv* shared_kv;    // null: keys are not values, except with latent attention
    const Compressor* compressor; // null: a query attends to no entries
    const LayerStreams* streams;  // null: the residual stream is one stream
};

struct Model {
    const Layer* layers;
    const float* final_norm;
    // [vocab, hidden]: F32 or BF16, or panels of a quantized kind. null: embeddings are read from
    // the output matrix.
    const void* embedding;
    Matrix output;
    int32_t num_layers, hidden, num_heads, inner, vocab;
    // computed_kind: F32 or BF16, the compute dtype of the model
    int32_t embedding_kind, computed_kind;
    float norm_eps;
    int32_t num_threads;      // of this rank
    int32_t norms_all_heads;  // true: q_norm and k_norm are over all heads together
    int32_t norms_rotated;    // true: q_norm and k_norm are applied after the rotation
    int32_t centers_norms;    // true: norms of the residual stream are LayerNorms without biases
    int32_t is_parallel;      // true: the MLP reads the residual stream before attention is added
    int32_t norms_values;     // true: values are normalized, without weights
    float attention_scale;    // factor on scores
    float embedding_multiplier, residual_multiplier, logits_multiplier;
    float logit_cap;      // soft cap of logits; 0: no cap
    float attention_cap;  // soft cap of scores; 0: no cap
    float value_scale;    // factor on values
    const LayerInputs* layer_inputs;  // null: tokens have no embeddings for layers
    const AltUp* alt_up;              // null: the residual stream has no copies
    const Streams* streams;           // null: the residual stream is one stream
};

struct Span {  // the tokens that a step computes for a sequence: the last ones of its context
    int32_t first_row, num_queries, context_len, first_table_entry;
    // Under a KV budget, in layers without a window: a query attends to the first `num_first` and
    // the last `num_last` keys of its context, including its own. Blocks between them are not read.
    // num_last 0: a query attends to all keys.
    int32_t num_first, num_last;
    int32_t first_sum;  // index of the span's first sum in Step::block_sums; -1: no sums
};

struct KvGroup {  // the pool of some layers, and the slots and block tables in this pool
    // [num_blocks][kv heads][layers] parts: see kv_part.h. In a state group a part is the matrix of
    // a head, and then the last inputs of its part of the convolution.
    void* kv;
    const int32_t* slots;         // [rows]: block id * block size + offset in the block
    // The block tables of all spans, one after the other. Entries before a window are not read.
    const int32_t* block_tables;
    int64_t block_bytes, head_bytes, layer_bytes;  // strides between blocks, heads and layers
    // I4: order and static scales of the key channels, [layers][kv heads][head_dim]; else null.
    const int32_t* key_order;
    const float* key_scales;
    // F8: static scales, float16 [layers][K, V]; null: each token has its own scales.
    const uint16_t* fixed_scales;
    // In a group of rows (compressor.h): the offset in bytes of each part of a block.
    const int64_t* parts;
};

// The LoRA delta of a product is (x A^T) B^T. A product of fused matrices has a part for each
// matrix. `a` has the A matrices of all parts, one below the other. `b` is already multiplied by
// the adapter's scale. These matrices are not packed in pairs.
struct LoraPart {
    Matrix b;                           // [outputs of the part, rank of the part]
    int32_t first_output, first_rank;
};

struct LoraProduct {
    Matrix a;  // [ranks of all parts, inputs]
    const LoraPart* parts;
    int32_t num_parts;  // 0: no delta
};

// The LoRA products of a layer. If it has experts, gate_up and down belong to the shared MLP.
struct LoraLayer {
    LoraProduct qkv, attention_out, gate_up, down;
    LoraProduct q_out;                    // `q_out`, `keys` and `values` are for latent attention
    LoraProduct decay_out, gate_out;      // of Kimi Delta Attention
    const LoraProduct *keys, *values;     // one for each head; null: no delta
};

struct LoraRows {  // the rows of one adapter
    const LoraLayer* layers;
    int32_t first_row, num_rows;
};

struct Step {
    // [rows]: -1 - i stands for row i of `embeddings` in place of a token.
    const int32_t* token_ids;
    const int32_t* positions;  // [rows]
    const float* cosines;      // [tables][positions][rotated dim / 2]
    const float* sines;
    // [tables][positions]: factors on the queries at each position; null: no factors
    const float* query_factors;
    const Span* spans;
    const int32_t* logit_rows;
    // [number of negative token ids, hidden]: embeddings that are no tokens', such as an image's.
    // null: there are none. Only if there is one rank.
    const float* embeddings;
    const KvGroup* groups;
    float* logits;         // [num_logit_rows, vocab]
    // [num_logit_rows]: the most likely token of each row, with the lowest id if logits are equal
    int32_t* most_likely;
    // Sums of softmax weights per block, for the spans that need them. The step adds to these sums.
    float* block_sums;
    int32_t num_rows, num_spans, num_logit_rows, block_size;
    int32_t kv_kind;       // F32, BF16, I8, I8_I4 (keys and values), I4, F8, I8_F32 or I8_BF16
    int64_t table_floats;  // distance between two tables of cosines, or of sines, in floats
    int64_t table_positions;  // number of positions in a table
    const LoraRows* adapted;  // the rows of each adapter; rows without an adapter come last
    int32_t num_adapted;
    int32_t lora_rank;  // largest rank of a LoraProduct

    template <class T>
    const KvGroup& group_of(const T& layer) const {
        return groups[layer.group];
    }

    // Returns the factor on the queries of a row in a layer.
    float query_factor(const Layer& layer, int row) const {
        if (query_factors == nullptr) return 1.0f;
        return query_factors[layer.rope * table_positions + positions[row]];
    }
};

// The arguments and results of measuring log probabilities (logprobs.h): rows of logits, and one
// chosen token for each.
struct Measure {
    const int32_t* rows;       // [num_rows]: indices into the step's logits
    const int32_t* token_ids;  // [num_rows]
    float* logprobs;           // [num_rows]
    int32_t* ranks;            // [num_rows]
    int32_t* top_ids;          // [num_rows, num_top]
    float* top_logprobs;       // [num_rows, num_top]
    int32_t num_rows, num_top;  // num_top: at most the vocabulary
};

// A row of logits, and how its token is sampled (draws.h): the members are those of a Draw in
// tandem_kernels/sampling.py, with its uniform random number.
struct Draw {
    const float* logits;
    double top_p, uniform;
    float temperature, min_p;
    int32_t num, top_k;  // num: of the logits
};

struct Ranked {  // a token
    float logit;
    int32_t id;
};

struct Draws {
    const Draw* rows;
    int32_t* token_ids;  // [num_rows]
    int32_t num_rows;
};

struct Scratch;  // buffers of one decoder, which are kept from step to step

// The functions of one instruction set. A step is computed by two calls: the first ends when the
// last layer's KV is stored, the second computes the rest up to the logits.
struct Entry {
    void (*to_last_kv)(const Model&, const Step&, Scratch&);
    void (*to_logits)(const Model&, const Step&, Scratch&);
    Kind kind_of_bf16;  // kind to which bf16 weights are packed
    double (*product_gflops)(int num_threads, Kind kind);
    double (*read_gb_per_s)(const float* data, size_t num, int num_threads);
    void (*measure)(const float* logits, int vocab, const Measure&, int num_threads);
    void (*draw)(const Draws&, int num_threads);
    void (*convolve)(const Convolution&, const Team&);
    void (*scan_states)(const StateScan&, const Team&);
};

#if defined(__x86_64__)
extern const Entry avx512, avx2;
#ifdef TANDEM_KNOWS_BF16
extern const Entry amx, avx512_bf16;
#endif
#endif
#if defined(__aarch64__)
extern const Entry neon;
#endif
extern const Entry plain;

}  // namespace tandem
