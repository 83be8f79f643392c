// How much weight the queries of some spans give each block of keys (Span::first_sum).
//
//     block_sums[j] += sum of a query's softmax weights of the keys of block j, over queries, layers
//                      and heads
//
// Attention writes [blocks] for each query and head of a layer. They are added to the query's, head
// after head and layer after layer, and at the step's end query after query to the span's: so sums do
// not depend on how the tokens of a sequence are cut into steps, on threads, or on other spans.

namespace tandem::TANDEM_ISA {

// A row of attention's: the blocks of its keys, from the tile on that is weighed. Null: not wanted.
struct BlockShares {
    float* blocks;
    int block_size;

    // What lies before a tile was weighed with another maximum.
    void scale(float factor, int tile) const {
        if (factor == 1.0f) return;
        for (int block = 0; block * block_size < tile; ++block) blocks[block] *= factor;
    }

    // A panel of weights, from the position `key` on; those from `end` on are zeros.
    void add(const float* weights, int key, int end) const {
        if (key >= end) return;
        if (block_size % kPanel != 0) {
            for (int i = 0; i < kPanel && key + i < end; ++i)
                blocks[(key + i) / block_size] += weights[i];
            return;
        }
        Floats parts[kVectors];
        for (int v = 0; v < kVectors; ++v) parts[v] = load(weights + v * kLanes);
        blocks[key / block_size] += sum(parts);
    }
};

// Those of all spans of a step.
struct BlockSums {
    const Step* step = nullptr;  // null: no span has any
    int num_heads = 0;
    const size_t* first = nullptr;  // of each span: its first block of `queries`
    float* queries = nullptr;       // [queries][blocks] of each span
    float* heads = nullptr;         // [queries][heads][blocks] of each span

    int num_blocks(const Span& span) const {
        return (span.context_len + step->block_size - 1) / step->block_size;
    }

    bool any(int index) const { return step != nullptr && step->spans[index].first_sum >= 0; }

    // Of a query and a head of a span that has any: zeros.
    BlockShares shares(int index, int query, int head) const {
        const int num = num_blocks(step->spans[index]);
        float* const blocks = heads + first[index] * num_heads +
                              (static_cast<size_t>(query) * num_heads + head) * num;
        std::memset(blocks, 0, num * sizeof(float));
        return {blocks, step->block_size};
    }

    // Adds up a layer's heads; in a parallel region.
    void add_heads() const {
        if (step == nullptr) return;
        for (int index = 0; index < step->num_spans; ++index) {
            const Span& span = step->spans[index];
            if (span.first_sum < 0) continue;
            const int num = num_blocks(span);
#pragma omp for schedule(static) nowait
            for (int query = 0; query < span.num_queries; ++query) {
                float* const to = queries + first[index] + static_cast<size_t>(query) * num;
                const float* from = heads + first[index] * num_heads +
                                    static_cast<size_t>(query) * num_heads * num;
                for (int head = 0; head < num_heads; ++head, from += num)
                    for (int block = 0; block < num; ++block) to[block] += from[block];
            }
        }
    }

    // Adds the step's to what there was before.
    void add_queries() const {
        if (step == nullptr) return;
        for (int index = 0; index < step->num_spans; ++index) {
            const Span& span = step->spans[index];
            if (span.first_sum < 0) continue;
            const int num = num_blocks(span);
            const float* from = queries + first[index];
            float* const to = step->block_sums + span.first_sum;
            for (int query = 0; query < span.num_queries; ++query, from += num)
                for (int block = 0; block < num; ++block) to[block] += from[block];
        }
    }
};

// Begins the sums of a step, or goes on with them.
inline BlockSums block_sums_of(const Model& model, const Step& step, Scratch& scratch,
                               bool begins) {
    if (step.block_sums == nullptr) return {};
    BlockSums sums{&step, model.num_heads};
    size_t num_queries = 0;  // times blocks
    scratch.first_shares.resize(step.num_spans);
    for (int index = 0; index < step.num_spans; ++index) {
        const Span& span = step.spans[index];
        scratch.first_shares[index] = num_queries;
        if (span.first_sum >= 0)
            num_queries += static_cast<size_t>(span.num_queries) * sums.num_blocks(span);
    }
    sums.first = scratch.first_shares.data();
    sums.queries = scratch.block_shares.of(num_queries * (1 + model.num_heads));
    sums.heads = sums.queries + num_queries;
    if (begins) std::memset(sums.queries, 0, num_queries * sizeof(float));
    return sums;
}

}  // namespace tandem::TANDEM_ISA
