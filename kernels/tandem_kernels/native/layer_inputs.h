// The embeddings that tokens have for each layer (Gemma 3n and 4). The input of a token for layer l
// is part l of
//
//     (norm(W x / sqrt(hidden)) + embedding[token] * multiplier) / sqrt(2)
//
// where x is the token's embedding, and the norm is over each part. At its end, the layer adds
// norm(projection . (activation(gate . x) * input)) to the residual stream x. If the stream has
// copies, x is what alt_up.h computes from the active copy, and all copies but the first change.

namespace tandem::TANDEM_ISA {

// Returns the buffer for the inputs of all layers, [rows][layers][size]. null: there are none.
inline float* layer_inputs_of(const Model& model, const Step& step, Scratch& scratch) {
    if (model.layer_inputs == nullptr) return nullptr;
    return scratch.layer_inputs.of(static_cast<size_t>(step.num_rows) * model.num_layers *
                                   model.layer_inputs->size);
}

// Writes the residual stream to the inputs of a product.
inline Inputs hidden_inputs(const Model& model, const Matrix& matrix, const Step& step,
                            const Rows& rows, const Team& team) {
    const Inputs inputs = inputs_of(matrix, rows.input, step.num_rows, rows.rounded);
    team.each(step.num_rows, [&](int row) {
        norm_row(rows.hidden + static_cast<size_t>(row) * model.hidden, nullptr, 0.0f,
                 inputs.row(row));
    });
    return inputs;
}

// Computes the inputs of all layers.
inline void compute_layer_inputs(const Model& model, const Step& step, const Rows& rows,
                                 const Team& team) {
    const LayerInputs& all = *model.layer_inputs;
    const int size = all.size;
    const size_t width = static_cast<size_t>(model.num_layers) * size;
    const Inputs inputs = hidden_inputs(model, all.projection, step, rows, team);
    linear(all.projection, inputs, {rows.layer_inputs, width, Into::kSet}, team);
    team.wait();
    const float scale = 1.0f / std::sqrt(static_cast<float>(model.hidden));
    team.each(step.num_rows, [&](int row) {
        float* to = rows.layer_inputs + row * width;
        const int token = step.token_ids[row] < all.vocab ? step.token_ids[row] : 0;
        const size_t first = token * width;
        for (size_t i = 0; i < width; ++i) to[i] *= scale;
        for (size_t at = 0; at < width; at += size) {
            norm_head(to + at, all.norm, size, model.norm_eps);
            for (size_t i = at; i < at + size; ++i) {
                const float embedded =
                    all.embedding_kind == BF16
                        ? widen(static_cast<const Bf16*>(all.embedding)[first + i])
                        : static_cast<const float*>(all.embedding)[first + i];
                to[i] = fused(embedded, all.multiplier, to[i]) * 0.70710678f;
            }
        }
    });
}

// Adds what a layer makes of its inputs to the residual stream.
inline void add_layer_input(const Model& model, int index, const Step& step, const Rows& rows,
                            const Team& team) {
    const LayerInput& input = *model.layers[index].input;
    const int size = model.layer_inputs->size;
    const size_t hidden = model.hidden;
    const Inputs normed = hidden_inputs(model, input.gate, step, rows, team);
    linear(input.gate, normed, {rows.projected, static_cast<size_t>(size), Into::kSet}, team);
    team.wait();
    const Inputs gates = inputs_of(input.projection, rows.input, step.num_rows, rows.rounded);
    const Gating& gating = input.gate.gating;
    team.each(step.num_rows, [&](int row) {
        const float* gate = rows.projected + static_cast<size_t>(row) * size;
        const float* of_layer =
            rows.layer_inputs + (static_cast<size_t>(row) * model.num_layers + index) * size;
        const InputRow to = gates.row(row);
        for (int at = 0; at < size; at += kLanes) {
            const int num = std::min(size - at, kLanes);
            to.put(at, gated(load_some(gate + at, num), load_some(of_layer + at, num), gating),
                   num);
        }
    });
    linear(input.projection, gates, {rows.delta, hidden, Into::kSet}, team);
    team.wait();
    team.each(step.num_rows, [&](int row) {
        const float* const delta = rows.delta + row * hidden;
        if (model.alt_up == nullptr)
            return add_row(delta, input.norm, model, rows.hidden + row * hidden);
        for (int copy = 1; copy < model.alt_up->num; ++copy)
            add_row(delta, input.norm, model, copy_of(model, rows, row, copy));
    });
    rows.laps->end(DOWN, team.own_thread);
}

// Multiplies the residual stream by a layer's factor.
inline void scale_hidden(const Model& model, float factor, const Step& step, const Rows& rows,
                         const Team& team) {
    if (factor == 1.0f) return;
    const size_t hidden = model.hidden;
    team.each(step.num_rows, [&](int row) {
        float* x = rows.hidden + row * hidden;
        for (size_t i = 0; i < hidden; ++i) x[i] *= factor;
    });
}

}  // namespace tandem::TANDEM_ISA
