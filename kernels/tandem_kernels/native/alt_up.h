// The copies of the residual stream of Gemma 3n (AltUp), a narrow product beside attention (LAuReL),
// and sparse gates (tandem/models/config/gemma3n.py). A layer works on `hidden` as other layers do:
//
//     copies = prediction of all copies;  hidden = the active one
//     hidden += attention;  hidden = (hidden + laurel) / sqrt(2);  hidden += MLP
//     copies += factors * (hidden - active copy)
//
// The factors follow from tanh(router . norm(x)), where x is the active copy, or then `hidden`. The
// copies of a row are in rows.copies [rows][copies][hidden].

namespace tandem::TANDEM_ISA {

inline float* copy_of(const Model& model, const Rows& rows, size_t row, int copy) {
    return rows.copies + (row * model.alt_up->num + copy) * model.hidden;
}

// Returns the sum of products of two vectors.
inline float dot_of_rows(const float* a, const float* b, int num) {
    Floats sums[kVectors] = {};
    int at = 0;
    for (; at + kPanel <= num; at += kPanel)
        for (int v = 0; v < kVectors; ++v)
            sums[v] = fused(load(a + at + v * kLanes), load(b + at + v * kLanes), sums[v]);
    float total = sum(sums);
    for (; at < num; ++at) total += a[at] * b[at];
    return total;
}

// Writes x times a factor, so that it is as large as `other`.
inline void scale_as(const float* other, int num, float* x) {
    const float own = std::sqrt(std::max(dot_of_rows(x, x, num) / num, 1e-5f));
    const float factor = std::sqrt(dot_of_rows(other, other, num) / num) / own;
    for (int i = 0; i < num; ++i) x[i] *= factor;
}

// Makes the copies from the embeddings in `hidden`, or the residual stream in `hidden` from the
// copies, by one matrix for each copy but the first.
inline void multiply_copies(const Model& model, const Matrix* matrices, const Step& step,
                            const Rows& rows, bool merges, const Team& team) {
    const int hidden = model.hidden, num = model.alt_up->num;
    const size_t stride = static_cast<size_t>(num) * hidden;
    for (int copy = 1; copy < num; ++copy) {
        const Matrix& matrix = matrices[copy - 1];
        const Inputs inputs = inputs_of(matrix, rows.input, step.num_rows, rows.rounded);
        team.each(step.num_rows, [&](int row) {
            const float* const from = merges ? copy_of(model, rows, row, copy)
                                             : rows.hidden + static_cast<size_t>(row) * hidden;
            norm_row(from, nullptr, 0.0f, inputs.row(row));
        });
        linear(matrix, inputs, {rows.copies + copy * static_cast<size_t>(hidden), stride, Into::kSet},
               team);
        team.wait();
    }
    team.each(step.num_rows, [&](int row) {
        float* const x = rows.hidden + static_cast<size_t>(row) * hidden;
        float* const first = copy_of(model, rows, row, 0);
        if (!merges) std::copy(x, x + hidden, first);
        for (int copy = 1; copy < num; ++copy)
            scale_as(first, hidden, copy_of(model, rows, row, copy));
        if (!merges) return;
        for (int i = 0; i < hidden; ++i) {
            float total = first[i];
            for (int copy = 1; copy < num; ++copy) total += first[copy * hidden + i];
            x[i] = total / num;
        }
    });
}

// Computes tanh(router . norm(x)) for each copy.
inline void compute_modes(const Model& model, const AltUpLayer& layer, const float* x,
                          float* modes) {
    const float scale = norm_scale(x, model.hidden, model.norm_eps);
    for (int copy = 0; copy < model.alt_up->num; ++copy)
        modes[copy] = std::tanh(
            dot_of_rows(x, layer.router + static_cast<size_t>(copy) * model.hidden, model.hidden) * scale);
}

// Returns a row of a matrix [rows][copies] times the modes.
inline float times_modes(const float* matrix, int row, const float* modes, int num) {
    float total = 0.0f;
    for (int i = 0; i < num; ++i) total += matrix[row * num + i] * modes[i];
    return total;
}

// Predicts all copies at the start of a layer, and copies the active one to `hidden`.
inline void predict_copies(const Model& model, int index, const Step& step, const Rows& rows,
                           const Team& team) {
    if (model.alt_up == nullptr) return;
    const AltUpLayer& layer = *model.layers[index].alt_up;
    const int hidden = model.hidden, num = model.alt_up->num, active = model.alt_up->active;
    team.each(step.num_rows, [&](int row) {
        float* const copies = copy_of(model, rows, row, 0);
        float modes[kCopiesMax], factors[kCopiesMax * kCopiesMax];
        compute_modes(model, layer, copies + active * hidden, modes);
        for (int i = 0; i < num * num; ++i)
            factors[i] = times_modes(layer.prediction, i, modes, num);
        for (int i = 0; i < hidden; ++i) {
            float predicted[kCopiesMax];
            for (int copy = 0; copy < num; ++copy) {
                float total = 0.0f;
                for (int other = 0; other < num; ++other)
                    total += copies[other * hidden + i] * factors[copy * num + other];
                predicted[copy] = total + copies[copy * hidden + i];
            }
            for (int copy = 0; copy < num; ++copy) copies[copy * hidden + i] = predicted[copy];
        }
        std::copy_n(copies + active * hidden, hidden,
                    rows.hidden + static_cast<size_t>(row) * hidden);
    });
}

// Corrects all copies after the MLP of a layer, and writes the tensor that selects the tokens'
// embeddings for the layer to `hidden`.
inline void correct_copies(const Model& model, int index, const Step& step, const Rows& rows,
                           const Team& team) {
    if (model.alt_up == nullptr) return;
    const AltUpLayer& layer = *model.layers[index].alt_up;
    const int hidden = model.hidden, num = model.alt_up->num, active = model.alt_up->active;
    team.each(step.num_rows, [&](int row) {
        float* const x = rows.hidden + static_cast<size_t>(row) * hidden;
        float* const copies = copy_of(model, rows, row, 0);
        float modes[kCopiesMax], factors[kCopiesMax];
        compute_modes(model, layer, x, modes);
        for (int copy = 0; copy < num; ++copy)
            factors[copy] = times_modes(layer.correction, copy, modes, num) + 1.0f;
        for (int i = 0; i < hidden; ++i) {
            const float difference = x[i] - copies[active * hidden + i];
            for (int copy = 0; copy < num; ++copy)
                copies[copy * hidden + i] =
                    fused(difference, factors[copy], copies[copy * hidden + i]);
            x[i] = copies[active * hidden + i];
            if (layer.output_scale != nullptr) x[i] *= layer.output_scale[i];
        }
    });
    rows.laps->end(NORM, team.own_thread);
}

// Adds LAuReL to the residual stream after attention. Its input is the input of attention, which is
// still in the active copy.
inline void add_laurel(const Model& model, int index, const Step& step, const Rows& rows,
                       const Team& team) {
    if (model.alt_up == nullptr) return;
    const Layer& layer = model.layers[index];
    const AltUpLayer& own = *layer.alt_up;
    const int hidden = model.hidden;
    const size_t rank = own.left.out;
    const Inputs normed = inputs_of(own.left, rows.input, step.num_rows, rows.rounded);
    team.each(step.num_rows, [&](int row) {
        norm_row(copy_of(model, rows, row, model.alt_up->active), layer.attention_norm,
                 model.norm_eps, normed.row(row));
    });
    linear(own.left, normed, {rows.projected, rank, Into::kSet}, team);
    team.wait();
    const Inputs narrow = inputs_of(own.right, rows.input, step.num_rows, rows.rounded);
    team.each(step.num_rows, [&](int row) {
        norm_row(rows.projected + row * rank, nullptr, 0.0f, narrow.row(row));
    });
    linear(own.right, narrow, {rows.delta, static_cast<size_t>(hidden), Into::kSet}, team);
    team.wait();
    team.each(step.num_rows, [&](int row) {
        const float* const from = copy_of(model, rows, row, model.alt_up->active);
        const float* const delta = rows.delta + static_cast<size_t>(row) * hidden;
        float* const x = rows.hidden + static_cast<size_t>(row) * hidden;
        const float scale = norm_scale(from, hidden, model.norm_eps);
        const float of_delta = norm_scale(delta, hidden, model.norm_eps);
        for (int i = 0; i < hidden; ++i)
            x[i] = (x[i] + from[i] * scale * layer.attention_norm[i] +
                    delta[i] * of_delta * own.laurel_norm[i]) *
                   0.70710678f;
    });
    rows.laps->end(NORM, team.own_thread);
}

// Replaces gates [num] by relu(gate - cutoff). The cutoff is `deviations` standard deviations above
// the mean.
inline void cut_gates(float deviations, int num, float* gates) {
    float total = 0.0f, squares = 0.0f;
    for (int i = 0; i < num; ++i) total += gates[i];
    const float mean = total / num;
    for (int i = 0; i < num; ++i) squares = fused(gates[i] - mean, gates[i] - mean, squares);
    const float cutoff = fused(std::sqrt(squares / num), deviations, mean);
    for (int i = 0; i < num; ++i) gates[i] = std::max(gates[i] - cutoff, 0.0f);
}

}  // namespace tandem::TANDEM_ISA
