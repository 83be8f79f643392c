// Computes steps of small random models by the functions of api.cpp, and prints a hash of the bits of
// all logits and of the KV for each. It needs neither Python nor torch, so that an emulator of another
// processor can run it.
//
//     native_bits INSTRUCTIONS

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../kernels/tandem_kernels/native/decoder.h"
#include "../../kernels/tandem_kernels/native/scratch.h"

extern "C" {
void* tandem_create(const tandem::Model*, const char*, const tandem::Ranks*);
int tandem_to_last_kv(void*, const tandem::Step*);
int tandem_to_logits(void*, const tandem::Step*);
void tandem_destroy(void*);
void tandem_pack(const void*, int32_t, int64_t, int64_t, int32_t, void*, float*);
}

namespace {

constexpr int kLayers = 2, kHeads = 6, kKvHeads = 2, kDim = 32, kHidden = 80, kInner = 144;
constexpr int kVocab = 77, kBlock = 16, kBlocks = 40, kPositions = kBlock * kBlocks;

uint32_t state;

float random_number() {  // about from -1 to 1
    state = state * 1664525u + 1013904223u;
    return static_cast<int32_t>(state >> 8) / 8388608.0f - 1.0f;
}

std::vector<float> random_numbers(size_t num, float factor, float offset = 0.0f) {
    std::vector<float> numbers(num);
    for (float& each : numbers) each = random_number() * factor + offset;
    return numbers;
}

struct Packed {
    std::vector<float> panels;
    tandem::Matrix matrix{};

    Packed(int in, int out, bool is_bf16) : panels(static_cast<size_t>(in) * ((out + 15) / 16 * 16)) {
        const std::vector<float> weights = random_numbers(static_cast<size_t>(in) * out, 0.2f);
        const int32_t kind = is_bf16 ? tandem::BF16 : tandem::F32;
        std::vector<uint16_t> narrow(weights.size());
        for (size_t i = 0; i < weights.size(); ++i) {
            uint32_t bits;
            std::memcpy(&bits, &weights[i], sizeof bits);
            narrow[i] = static_cast<uint16_t>(bits >> 16);
        }
        const void* const from = is_bf16 ? static_cast<const void*>(narrow.data()) : weights.data();
        tandem_pack(from, kind, out, in, kind, panels.data(), nullptr);
        matrix.panels = panels.data();
        matrix.num_panels = (out + 15) / 16;
        matrix.in = in;
        matrix.out = out;
        matrix.kind = kind;
    }
};

uint64_t hash_of(uint64_t hash, const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i)
        hash = (hash ^ static_cast<const uint8_t*>(from)[i]) * 1099511628211ull;
    return hash;
}

uint64_t compute(const char* instructions, bool is_bf16, int32_t activation, float cap) {
    using namespace tandem;
    state = 1;
    std::vector<Packed> matrices;
    matrices.reserve(4 * kLayers + 1);
    const auto matrix = [&](int in, int out) {
        matrices.emplace_back(in, out, is_bf16);
        return matrices.back().matrix;
    };
    const std::vector<float> norms = random_numbers((2 * kLayers + 1) * kHidden, 0.3f, 1.0f);
    Layer layers[kLayers];
    std::memset(static_cast<void*>(layers), 0, sizeof layers);
    for (int i = 0; i < kLayers; ++i) {
        Layer& layer = layers[i];
        layer.attention_norm = &norms[2 * i * kHidden];
        layer.mlp_norm = &norms[(2 * i + 1) * kHidden];
        layer.qkv = matrix(kHidden, (kHeads + 2 * kKvHeads) * kDim);
        layer.attention_out = matrix(kHeads * kDim, kHidden);
        layer.mlp.gate_up = matrix(kHidden, 2 * kInner);
        layer.mlp.gate_up.gating = {activation, 1.0f, 1.0f, 0.0f};
        layer.mlp.down = matrix(kInner, kHidden);
        layer.place = i;
        layer.has_attention = layer.has_mlp = 1;
        layer.num_kv_heads = kKvHeads;
        layer.head_dim = layer.value_dim = kDim;
        layer.scalar = 1.0f;
    }
    Model model;
    std::memset(static_cast<void*>(&model), 0, sizeof model);
    const std::vector<float> embedding = random_numbers(kVocab * kHidden, 1.0f);
    model.layers = layers;
    model.final_norm = &norms[2 * kLayers * kHidden];
    model.embedding = embedding.data();
    model.output = matrix(kHidden, kVocab);
    model.num_layers = kLayers;
    model.hidden = kHidden;
    model.num_heads = kHeads;
    model.inner = kInner;
    model.vocab = kVocab;
    model.embedding_kind = F32;
    model.computed_kind = is_bf16 ? BF16 : F32;
    model.norm_eps = 1e-5f;
    model.num_threads = 1;
    model.attention_scale = 0.18f;
    model.embedding_multiplier = model.residual_multiplier = model.logits_multiplier = 1.0f;
    model.attention_cap = cap;
    model.value_scale = 1.0f;

    const size_t size = is_bf16 ? 2 : 4, part = 2 * kBlock * kDim * size;
    std::vector<char> pool(kBlocks * kKvHeads * kLayers * part);
    std::vector<float> cosines, sines;
    // Exact functions of the position, because the C libraries may differ in cos and sin.
    for (int i = 0; i < kPositions * kDim / 2; ++i) {
        const float x = random_number();
        cosines.push_back(x);
        sines.push_back(1.0f - x * x);
    }
    std::vector<int32_t> table(kBlocks);
    for (int i = 0; i < kBlocks; ++i) table[i] = (7 * i + 3) % kBlocks;
    const Ranks alone;
    void* const decoder = tandem_create(&model, instructions, &alone);
    if (decoder == nullptr) {
        std::fprintf(stderr, "the decoder cannot be made\n");
        std::exit(1);
    }
    uint64_t hash = 14695981039346656037ull;
    int context = 0;
    for (const int num : {530, 1, 7, 2}) {  // more keys than one piece has
        context += num;
        std::vector<int32_t> tokens, positions, slots, rows;
        for (int i = 0; i < num; ++i) {
            const int position = context - num + i;
            tokens.push_back((position * 31 + 5) % kVocab);
            positions.push_back(position);
            slots.push_back(table[position / kBlock] * kBlock + position % kBlock);
            rows.push_back(i);
        }
        Span span{};
        span.num_queries = num;
        span.context_len = context;
        span.first_sum = -1;
        KvGroup group{};
        group.kv = pool.data();
        group.slots = slots.data();
        group.block_tables = table.data();
        group.layer_bytes = part;
        group.head_bytes = kLayers * part;
        group.block_bytes = kKvHeads * kLayers * part;
        std::vector<float> logits(static_cast<size_t>(num) * kVocab);
        std::vector<int32_t> most_likely(num);
        Step step;
        std::memset(static_cast<void*>(&step), 0, sizeof step);
        step.token_ids = tokens.data();
        step.positions = positions.data();
        step.cosines = cosines.data();
        step.sines = sines.data();
        step.spans = &span;
        step.logit_rows = rows.data();
        step.groups = &group;
        step.logits = logits.data();
        step.most_likely = most_likely.data();
        step.num_rows = step.num_logit_rows = num;
        step.num_spans = 1;
        step.block_size = kBlock;
        step.kv_kind = is_bf16 ? BF16 : F32;
        step.table_floats = cosines.size();
        step.table_positions = kPositions;
        if (tandem_to_last_kv(decoder, &step) || tandem_to_logits(decoder, &step)) std::exit(1);
        for (float each : logits)
            if (!std::isfinite(each)) std::exit(1);
        hash = hash_of(hash, logits.data(), logits.size() * sizeof(float));
        hash = hash_of(hash, most_likely.data(), most_likely.size() * sizeof(int32_t));
    }
    tandem_destroy(decoder);
    return hash_of(hash, pool.data(), pool.size());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return 1;
    for (const bool is_bf16 : {false, true})
        for (const int32_t activation : {tandem::SILU_GATE, tandem::GELU_TANH_GATE})
            std::printf("%s %d %016llx\n", is_bf16 ? "bf16" : "fp32", activation,
                        static_cast<unsigned long long>(
                            compute(argv[1], is_bf16, activation, activation ? 20.0f : 0.0f)));
}
