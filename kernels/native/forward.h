// A step from token ids to logits, for one instruction set. One parallel region a call; a barrier
// between operations that read what the one before wrote.

namespace tandem::TANDEM_ISA {

// y = x / sqrt(mean(x^2) + eps) * weight
inline float norm_scale(const float* x, int num, float eps) {
    Floats squares[kVectors] = {};
    int at = 0;
    for (; at + kPanel <= num; at += kPanel)
        for (int v = 0; v < kVectors; ++v) {
            const Floats part = load(x + at + v * kLanes);
            squares[v] += part * part;
        }
    float total = sum(squares);
    for (; at < num; ++at) total += x[at] * x[at];
    return 1.0f / std::sqrt(total / num + eps);
}

inline void norm_into_tiles(const float* x, const float* weight, int row, int num_rows, int hidden,
                            float eps, float* tiles) {
    const TiledRow to = tiled_row(tiles, row, num_rows, hidden);
    const float scale = norm_scale(x, hidden, eps);
    for (int k = 0; k < hidden; ++k) to.first[static_cast<size_t>(k) * to.stride] = x[k] * scale * weight[k];
}

inline void rotate(float* head, const float* cosines, const float* sines, int dim, float scale) {
    const int half = dim / 2;
    for (int i = 0; i < half; ++i) {
        const float first = head[i], second = head[i + half];
        head[i] = (first * cosines[i] - second * sines[i]) * scale;
        head[i + half] = (second * cosines[i] + first * sines[i]) * scale;
    }
}

inline void norm_head(float* head, const float* weight, int dim, float eps) {
    const float scale = norm_scale(head, dim, eps);
    for (int i = 0; i < dim; ++i) head[i] = head[i] * scale * weight[i];
}

// Normalizes and rotates a row's heads; its K and V go into the pool.
template <class T>
void place_row(const Model& model, const Layer& layer, const Step& step, int index, int row,
               float* heads) {
    const int dim = model.head_dim, half = dim / 2;
    const float* cosines = step.cosines + static_cast<size_t>(row) * half;
    const float* sines = step.sines + static_cast<size_t>(row) * half;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int h = 0; h < model.num_heads + model.num_kv_heads; ++h) {
        const bool is_query = h < model.num_heads;
        const float* weight = is_query ? layer.q_norm : layer.k_norm;
        if (weight) norm_head(heads + h * dim, weight, dim, model.norm_eps);
        rotate(heads + h * dim, cosines, sines, dim, is_query ? scale : 1.0f);
    }
    const size_t run = static_cast<size_t>(step.block_size) * dim;
    const size_t block = step.slots[row] / step.block_size;
    const size_t offset = static_cast<size_t>(step.slots[row] % step.block_size) * dim;
    for (int h = 0; h < model.num_kv_heads; ++h) {
        const size_t head_run = ((block * model.num_kv_heads + h) * model.num_layers + index) * 2;
        T* key = static_cast<T*>(step.kv) + head_run * run + offset;
        const float* from = heads + (model.num_heads + h) * dim;
        for (int i = 0; i < dim; ++i) narrow(from[i], key[i]);
        from += model.num_kv_heads * dim;
        for (int i = 0; i < dim; ++i) narrow(from[i], key[run + i]);
    }
}

inline void gate_into_tiles(const float* gate_up, int inner, int row, int num_rows, float* tiles) {
    const TiledRow to = tiled_row(tiles, row, num_rows, inner);
    for (int at = 0; at < inner; at += kLanes) {
        const int num = inner - at < kLanes ? inner - at : kLanes;
        Floats gate = Floats{}, up = Floats{};
        std::memcpy(&gate, gate_up + at, num * sizeof(float));
        std::memcpy(&up, gate_up + inner + at, num * sizeof(float));
        const Floats result = gate / (exp(-gate) + 1.0f) * up;
        for (int i = 0; i < num; ++i) to.first[static_cast<size_t>(at + i) * to.stride] = result[i];
    }
}

inline void embed(const Model& model, int token, float* to) {
    const size_t first = static_cast<size_t>(token) * model.hidden;
    if (model.embedding_kind == BF16) {
        const Bf16* from = static_cast<const Bf16*>(model.embedding) + first;
        for (int i = 0; i < model.hidden; ++i) to[i] = widen(from[i]);
    } else {
        std::memcpy(to, static_cast<const float*>(model.embedding) + first,
                    model.hidden * sizeof(float));
    }
}

// Work items, the longest first where one thread would be last with them.
inline std::vector<Item> items_of(const Model& model, const Step& step) {
    const int group = model.num_heads / model.num_kv_heads;
    std::vector<Item> items;
    for (int s = 0; s < step.num_spans; ++s) {
        const int rows = step.spans[s].num_queries * group;
        for (int first = (rows - 1) / kRowsMax * kRowsMax; first >= 0; first -= kRowsMax)
            for (int h = 0; h < model.num_kv_heads; ++h)
                items.push_back({s, h, first, rows - first < kRowsMax ? rows - first : kRowsMax});
    }
    return items;
}

struct Rows {  // buffers of a step, as all threads see them
    float *hidden, *input, *projected, *attended;
};

// Normalizes, projects, rotates and stores; queries stay in `projected`.
inline void store_kv(const Model& model, const Step& step, int index, const Rows& rows, int thread,
                     int threads) {
    const Layer& layer = model.layers[index];
    const int width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim;
#pragma omp for schedule(static)
    for (int row = 0; row < step.num_rows; ++row)
        norm_into_tiles(rows.hidden + static_cast<size_t>(row) * model.hidden, layer.attention_norm,
                        row, step.num_rows, model.hidden, model.norm_eps, rows.input);
    linear(layer.qkv, rows.input, step.num_rows,
           {rows.projected, static_cast<size_t>(width), Into::kSet}, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int row = 0; row < step.num_rows; ++row) {
        float* heads = rows.projected + static_cast<size_t>(row) * width;
        if (step.kv_kind == BF16)
            place_row<Bf16>(model, layer, step, index, row, heads);
        else
            place_row<float>(model, layer, step, index, row, heads);
    }
}

// Attention and the MLP, added to the residual stream.
inline void finish_layer(const Model& model, const Step& step, int index, const Rows& rows,
                         const std::vector<Item>& items, float* buffer, int thread, int threads) {
    const Layer& layer = model.layers[index];
    const size_t width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim;
    const Output residual{rows.hidden, static_cast<size_t>(model.hidden), Into::kAdd};
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < items.size(); ++i) {
        if (step.kv_kind == BF16)
            attend<Bf16>(model, step, index, items[i], rows.projected, width, rows.attended, buffer);
        else
            attend<float>(model, step, index, items[i], rows.projected, width, rows.attended, buffer);
    }
    linear(layer.attention_out, rows.attended, step.num_rows, residual, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int row = 0; row < step.num_rows; ++row)
        norm_into_tiles(rows.hidden + static_cast<size_t>(row) * model.hidden, layer.mlp_norm, row,
                        step.num_rows, model.hidden, model.norm_eps, rows.input);
    linear(layer.gate_up, rows.input, step.num_rows,
           {rows.projected, 2 * static_cast<size_t>(model.inner), Into::kSet}, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int row = 0; row < step.num_rows; ++row)
        gate_into_tiles(rows.projected + 2 * static_cast<size_t>(row) * model.inner, model.inner,
                        row, step.num_rows, rows.input);
    linear(layer.down, rows.input, step.num_rows, residual, thread, threads);
#pragma omp barrier
}

inline Rows rows_of(const Model& model, const Step& step, Scratch& scratch) {
    const size_t rows = step.num_rows;
    const size_t heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim;
    const size_t inner = model.inner, hidden = model.hidden;
    for (Buffer& buffer : scratch.of_thread) buffer.of(attention_floats(model.head_dim));
    return {scratch.hidden.of(rows * hidden), scratch.input.of(rows * (inner > hidden ? inner : hidden)),
            scratch.projected.of(rows * (2 * inner > heads ? 2 * inner : heads)),
            scratch.attended.of(rows * model.num_heads * model.head_dim)};
}

inline void to_last_kv(const Model& model, const Step& step, Scratch& scratch) {
    const Rows rows = rows_of(model, step, scratch);
    const std::vector<Item> items = items_of(model, step);
#pragma omp parallel num_threads(model.num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        float* buffer = scratch.of_thread[thread].of(attention_floats(model.head_dim));
#pragma omp for schedule(static)
        for (int row = 0; row < step.num_rows; ++row)
            embed(model, step.token_ids[row], rows.hidden + static_cast<size_t>(row) * model.hidden);
        for (int index = 0; index < model.num_layers; ++index) {
            store_kv(model, step, index, rows, thread, threads);
            if (index + 1 < model.num_layers)
                finish_layer(model, step, index, rows, items, buffer, thread, threads);
        }
    }
}

inline void to_logits(const Model& model, const Step& step, Scratch& scratch) {
    const Rows rows = rows_of(model, step, scratch);
    const std::vector<Item> items = items_of(model, step);
    float* last = scratch.last.of(static_cast<size_t>(step.num_logit_rows) * model.hidden);
#pragma omp parallel num_threads(model.num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        float* buffer = scratch.of_thread[thread].of(attention_floats(model.head_dim));
        finish_layer(model, step, model.num_layers - 1, rows, items, buffer, thread, threads);
#pragma omp for schedule(static)
        for (int i = 0; i < step.num_logit_rows; ++i)
            norm_into_tiles(rows.hidden + static_cast<size_t>(step.logit_rows[i]) * model.hidden,
                            model.final_norm, i, step.num_logit_rows, model.hidden, model.norm_eps, last);
        linear(model.output, last, step.num_logit_rows,
               {step.logits, static_cast<size_t>(model.vocab), Into::kSet}, thread, threads);
    }
}

}  // namespace tandem::TANDEM_ISA
