// Latent attention (tandem/models/config/latent.py). attention.h computes the attention itself, as
// for one KV head in which a token's value is its latent. This file multiplies queries by the key
// matrix before, and the output by the value matrix after. The buffers are used in this order:
//
//     buffer      shape                                       content
//     projected   [rows][queries or their latent | KV]        KV: latent and key of the token
//     heads       [rows][heads][plain, then rotated]          queries computed from their latent
//     queries     [rows][heads][latent, then rotated]         (W_k^T q, rotated q), times the scale
//     attended    [rows][heads][latent, then unused]          output of attention
//     heads       [rows][heads][value]                        W_v attended
//
// The products of one head are computed by one thread. The inputs of these products are in the
// buffer `of_heads`, head after head.

namespace tandem::TANDEM_ISA {

inline Inputs inputs_of_head(const Matrix* matrices, int head, const Rows& rows, int num_rows) {
    const Matrix& matrix = matrices[head];
    return inputs_of(matrix, rows.of_heads + head * input_floats(num_rows, matrix.in), num_rows);
}

// Writes a row times a factor in the format that a product reads.
inline void put_row(const float* from, float factor, const InputRow& to) {
    int at = 0;
    for (; at + kLanes <= to.in; at += kLanes) to.put(at, load(from + at) * factor);
    if (const int rest = to.in - at) to.put(at, load_some(from + at, rest) * factor, rest);
}

// The products of all heads in a layer.
struct HeadProducts {
    const Matrix* matrices;
    const LoraProduct* LoraLayer::*added;
    int index;  // index of the layer
};

// Multiplies the inputs of each head in `of_heads`.
inline void multiply_heads(const HeadProducts& products, int num_heads, const Rows& rows,
                           int num_rows, float* to, size_t head_stride, const Team& team) {
    team.each(num_heads, [&](int head) {
        const Inputs inputs = inputs_of_head(products.matrices, head, rows, num_rows);
        const Output out{to + head * head_stride, num_heads * head_stride, Into::kSet};
        linear(products.matrices[head], inputs, out, team.alone());
        add_lora_of_head(rows.lora, products.index, products.added, head, inputs, out, team);
    });
}

// Normalizes and rotates a row's KV, and stores the result in the pool.
template <class T>
void place_token(const Model& model, const Step& step, int index, int row, const float* cosines,
                 const float* sines, float* token) {
    const Latent& latent = *model.layers[index].latent;
    norm_head(token, latent.kv_norm, latent.kv_rank, latent.norm_eps);
    float* key = token + latent.kv_rank;
    rotate(key, cosines, sines, latent.rope, 1.0f, key);
    const Place<T> to(model.layers[index], step, row, 0);
    if constexpr (kIsLatent<T>)
        store_latent(token, latent.kv_rank, latent.rope, to);
    else if constexpr (!kHasScales<T>)
        for (int i = 0; i < model.layers[index].head_dim; i += kLanes)
            store_some(to.key + i, load(token + i), kLanes);
}

// Computes the queries that are compared with latents, and stores the tokens' KV in the pool.
inline void place_latent(const Model& model, const Step& step, int index, const Rows& rows,
                         const Team& team) {
    const Layer& layer = model.layers[index];
    const Latent& latent = *layer.latent;
    const int num_heads = model.num_heads, dim = layer.head_dim, q_dim = latent.plain + latent.rope;
    const size_t width = layer.qkv.out;
    const float* queries = rows.projected;
    size_t stride = width;
    if (latent.q_norm != nullptr) {
        const Inputs normed = inputs_of(latent.q_out, rows.input, step.num_rows);
        team.each(step.num_rows, [&](int row) {
            norm_row(rows.projected + row * width, latent.q_norm, latent.norm_eps, normed.row(row));
        });
        stride = static_cast<size_t>(num_heads) * q_dim;
        const Output heads{rows.heads, stride, Into::kSet};
        linear(latent.q_out, normed, heads, team);
        team.wait();
        add_lora(rows.lora, index, &LoraLayer::q_out, normed, heads, team);
        queries = rows.heads;
        rows.laps->end(QKV, team.own_thread);
    }
    team.each(step.num_rows, [&](int row) {
        const size_t angle = layer.rope * step.table_floats +
                             static_cast<size_t>(step.positions[row]) * (latent.rope / 2);
        const float *cosines = step.cosines + angle, *sines = step.sines + angle;
        const float* from = queries + row * stride;
        float* to = rows.queries + static_cast<size_t>(row) * num_heads * dim + latent.kv_rank;
        const float factor = model.attention_scale * step.query_factor(layer, row);
        for (int head = 0; head < num_heads; ++head, from += q_dim, to += dim) {
            put_row(from, factor,
                    inputs_of_head(latent.keys, head, rows, step.num_rows).row(row));
            rotate(from + latent.plain, cosines, sines, latent.rope, factor, to);
        }
        float* token = rows.projected + (row + 1) * width - dim;
        by_kv_kind(step, [&](auto kept) {
            place_token<decltype(kept)>(model, step, index, row, cosines, sines, token);
        });
    });
    rows.laps->end(PLACE, team.own_thread);
    multiply_heads({latent.keys, &LoraLayer::keys, index}, num_heads, rows, step.num_rows,
                   rows.queries, dim, team);
    rows.laps->end(QKV, team.own_thread);
}

// Returns the fp32 buffer to which attention writes its output.
inline Inputs attended_latents(const Model& model, const Layer& layer, const Step& step,
                               const Rows& rows) {
    return {rows.attended, F32, step.num_rows, model.num_heads * layer.head_dim, nullptr};
}

// Multiplies the attention output by the value matrices. The result is the input of the product
// with attention_out. `buffer` has room for one head.
inline Inputs values_of_heads(const Model& model, int index, const Step& step, const Rows& rows,
                              float* buffer, const Team& team) {
    const Layer& layer = model.layers[index];
    const Latent& latent = *layer.latent;
    const Inputs attended = attended_latents(model, layer, step, rows);
    const int num_heads = model.num_heads;
    team.each(step.num_rows, [&](int row) {
        InputRow from = attended.row(row);
        from.in = latent.kv_rank;
        for (int head = 0; head < num_heads; ++head) {
            from.copy_to(buffer, 1);
            put_row(buffer, 1.0f, inputs_of_head(latent.values, head, rows, step.num_rows).row(row));
            from.numbers.first += layer.head_dim * from.numbers.stride;
        }
    });
    multiply_heads({latent.values, &LoraLayer::values, index}, num_heads, rows, step.num_rows,
                   rows.heads, latent.value, team);
    const Inputs values =
        inputs_of(layer.attention_out, rows.attended, step.num_rows, rows.rounded);
    team.each(step.num_rows, [&](int row) {
        put_row(rows.heads + static_cast<size_t>(row) * values.in, 1.0f, values.row(row));
    });
    rows.laps->end(ATTENTION, team.own_thread);
    return values;
}

// Returns the first layer with latent attention; null if there is none. All such layers have the
// same sizes.
inline const Layer* latent_layer(const Model& model) {
    for (int index = 0; index < model.num_layers; ++index)
        if (model.layers[index].latent != nullptr) return &model.layers[index];
    return nullptr;
}

// Sizes of a step's buffers in floats; 0 without latent attention.
struct LatentFloats {
    size_t projected = 0, input = 0, heads = 0, queries = 0, of_heads = 0, attended = 0;

    LatentFloats(const Model& model, size_t num_rows) {
        const Layer* const found = latent_layer(model);
        if (found == nullptr) return;
        const Layer& layer = *found;
        const Latent& latent = *layer.latent;
        const size_t num_heads = model.num_heads;
        projected = num_rows * layer.qkv.out;
        input = latent.q_norm == nullptr ? 0 : input_floats(num_rows, latent.q_out.in);
        heads = num_rows * num_heads * std::max(latent.plain + latent.rope, latent.value);
        queries = num_rows * num_heads * layer.head_dim;
        of_heads = num_heads * input_floats(num_rows, std::max(latent.plain, latent.kv_rank));
        attended = input_floats(num_rows, layer.attention_out.in);
    }
};

}  // namespace tandem::TANDEM_ISA
