// Sums the softmax weights that queries give to each block of keys (Span::first_sum).
//
//     block_sums[j] += sum of the weights of the keys in block j, over queries, layers and heads
//
// Attention computes one sum per block for each query and head of a layer. These sums are added to
// the sums of the query, in the order of heads and layers. At the end of the step, the sums of all
// queries of a span are added to the sums of the span, in the order of the queries. The result does
// not depend on chunk boundaries, threads or other spans.

namespace tandem::TANDEM_ISA {

// The sums of one row of attention, one per block. `blocks` is null if they are not needed. Weights
// are relative to the highest score of a piece of keys (attention.h), until the piece is complete.
struct BlockShares {
    float* blocks;
    int block_size;
    int first = 0;        // the first block of the current piece
    float before = 0.0f;  // sum of the weights that this block has in the pieces before

    // Begins a piece with the key at position `key`.
    void begin_piece(int key) {
        first = key / block_size;
        before = 0.0f;
        if (key % block_size != 0) std::swap(before, blocks[first]);
    }

    // Multiplies the sums of the piece's keys before position `end` by `factor`, because the maximum
    // score to which weights are relative has changed.
    void scale(float factor, int end) const {
        if (factor == 1.0f) return;
        for (int block = first; block * block_size < end; ++block) blocks[block] *= factor;
    }

    // Ends a piece. Keys from position `end` on are not in it. Multiplies the sums of the pieces
    // before by `of_before`, and the sums of the piece by `of_piece`. One of the factors is 1.
    void end_piece(float of_before, float of_piece, int end) {
        scale(of_piece, end);
        const int piece = std::exchange(first, 0);
        scale(of_before, piece * block_size);
        if (before != 0.0f) blocks[piece] = fused(before, of_before, blocks[piece]);
    }

    // Adds a panel of weights for the keys from position `key` on. Weights from `end` on are zeros.
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

// The sums of all spans of a step.
struct BlockSums {
    const Step* step = nullptr;  // null: no span needs sums
    int num_heads = 0;
    const size_t* first = nullptr;  // for each span: index of its first block in `queries`
    float* queries = nullptr;       // for each span: [queries][blocks]
    float* heads = nullptr;         // for each span: [queries][heads][blocks]

    int num_blocks(const Span& span) const {
        return (span.context_len + step->block_size - 1) / step->block_size;
    }

    bool any(int index) const { return step != nullptr && step->spans[index].first_sum >= 0; }

    // Sets the sums of a query and a head to zero and returns them; null if the span needs no sums.
    BlockShares shares(int index, int query, int head) const {
        const int num = num_blocks(step->spans[index]);
        float* const blocks = heads + first[index] * num_heads +
                              (static_cast<size_t>(query) * num_heads + head) * num;
        std::memset(blocks, 0, num * sizeof(float));
        return {blocks, step->block_size};
    }

    // Adds the sums of a layer's heads to the sums of the queries. All threads call this function.
    void add_heads(const Team& team) const {
        if (step == nullptr) return;
        for (int index = 0; index < step->num_spans; ++index) {
            const Span& span = step->spans[index];
            if (span.first_sum < 0) continue;
            const int num = num_blocks(span);
            team.share(span.num_queries, [&](int query) {
                float* const to = queries + first[index] + static_cast<size_t>(query) * num;
                const float* from = heads + first[index] * num_heads +
                                    static_cast<size_t>(query) * num_heads * num;
                for (int head = 0; head < num_heads; ++head, from += num)
                    for (int block = 0; block < num; ++block) to[block] += from[block];
            });
        }
    }

    // Adds the step's sums to the spans' sums.
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

// Returns the sums of a step. At the start of the step, the first rank sets the sums of the queries
// to zero.
inline BlockSums block_sums_of(const Model& model, const Step& step, Scratch& scratch,
                               bool begins) {
    if (step.block_sums == nullptr) return {};
    BlockSums sums{&step, model.num_heads};
    size_t num_queries = 0;  // number of (query, block) pairs
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
    if (begins && scratch.ranks.rank == 0)
        std::memset(sums.queries, 0, num_queries * sizeof(float));
    return sums;
}

}  // namespace tandem::TANDEM_ISA
