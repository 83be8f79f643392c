// The residual stream of DeepSeek V4, which is several streams (tandem/models/config/deepseek_v4.py,
// arXiv:2512.24880). The streams of a row are in rows.copies [rows][streams][hidden]. Attention and
// the MLP of a layer work on `hidden` as in other models:
//
//     hidden = weighted sum of the streams;  hidden = attention(norm(hidden)), or the MLP
//     streams = factors * hidden + matrix . streams
//
// The weights, the factors and the matrix of a row are computed from its streams. They are in
// rows.mixtures, in this order.

namespace tandem::TANDEM_ISA {

inline float* streams_of(const Model& model, const Rows& rows, int row) {
    return rows.copies + static_cast<size_t>(row) * model.streams->num * model.hidden;
}

// Makes all streams copies of the embeddings in `hidden`.
inline void start_streams(const Model& model, const Step& step, const Rows& rows, const Team& team) {
    team.each(step.num_rows, [&](int row) {
        for (int stream = 0; stream < model.streams->num; ++stream)
            std::copy_n(rows.hidden + static_cast<size_t>(row) * model.hidden, model.hidden,
                        streams_of(model, rows, row) + static_cast<size_t>(stream) * model.hidden);
    });
}

// Makes a matrix [num][num] doubly stochastic, after a softmax of each row.
inline void balance(const Streams& streams, float* matrix) {
    const int num = streams.num;
    const float eps = streams.eps;
    const auto divide = [&](int stride, int other_stride) {
        for (int i = 0; i < num; ++i) {
            float* const first = matrix + i * stride;
            float total = 0.0f;
            for (int j = 0; j < num; ++j) total += first[j * other_stride];
            for (int j = 0; j < num; ++j) first[j * other_stride] /= total + eps;
        }
    };
    for (int i = 0; i < num; ++i) {
        float* const row = matrix + i * num;
        const float most = *std::max_element(row, row + num);
        float total = 0.0f;
        for (int j = 0; j < num; ++j) total += row[j] = std::exp(row[j] - most);
        for (int j = 0; j < num; ++j) row[j] = row[j] / total + eps;
    }
    divide(1, num);
    for (int i = 1; i < streams.num_iterations; ++i) {
        divide(num, 1);
        divide(1, num);
    }
}

// Computes a row's weights of the streams, and its factors and matrix if there are any, in place of
// the products of the row.
inline void finish_mixture(const Streams& streams, const StreamMixture& mixture, float* products) {
    const int num = streams.num, outputs = mixture.matrix.out;
    for (int i = 0; i < outputs; ++i)
        products[i] = fused(products[i], mixture.scale[std::min(i / num, 2)], mixture.base[i]);
    for (int i = 0; i < num; ++i) products[i] = sigmoid(products[i]) + streams.eps;
    if (outputs == num) return;
    for (int i = num; i < 2 * num; ++i) products[i] = 2.0f * sigmoid(products[i]);
    balance(streams, products + 2 * num);
}

// Writes the weighted sum of the streams to `hidden`.
inline void collapse_streams(const Model& model, const StreamMixture& mixture, const Step& step,
                             const Rows& rows, const Team& team) {
    const int num = model.streams->num, hidden = model.hidden, width = num * hidden;
    const size_t outputs = mixture.matrix.out;
    const Inputs normed = inputs_of(mixture.matrix, rows.input, step.num_rows, rows.rounded);
    team.each(step.num_rows, [&](int row) {
        const float* const streams = streams_of(model, rows, row);
        put_row(streams, norm_scale(streams, width, model.norm_eps), normed.row(row));
    });
    linear(mixture.matrix, normed, {rows.mixtures, outputs, Into::kSet}, team);
    team.wait();
    team.each(step.num_rows, [&](int row) {
        float* const weights = rows.mixtures + row * outputs;
        finish_mixture(*model.streams, mixture, weights);
        const float* const streams = streams_of(model, rows, row);
        float* const to = rows.hidden + static_cast<size_t>(row) * hidden;
        for (int i = 0; i < hidden; ++i) {
            float total = 0.0f;
            for (int stream = 0; stream < num; ++stream)
                total += streams[static_cast<size_t>(stream) * hidden + i] * weights[stream];
            to[i] = total;
        }
    });
    rows.laps->end(NORM, team.own_thread);
}

// Clears `hidden`, to which the output of attention is then added.
inline void clear_hidden(const Model& model, const Step& step, const Rows& rows, const Team& team) {
    team.each(step.num_rows, [&](int row) {
        float* const to = rows.hidden + static_cast<size_t>(row) * model.hidden;
        std::fill(to, to + model.hidden, 0.0f);
    });
}

// Mixes the streams, and adds `hidden` to each of them. `mixture` is the one from which `hidden` was
// computed.
inline void add_to_streams(const Model& model, const StreamMixture& mixture, const Step& step,
                           const Rows& rows, const Team& team) {
    const int num = model.streams->num, hidden = model.hidden;
    team.each(step.num_rows, [&](int row) {
        const float* const factors =
            rows.mixtures + static_cast<size_t>(row) * mixture.matrix.out + num;
        const float* const matrix = factors + num;
        const float* const output = rows.hidden + static_cast<size_t>(row) * hidden;
        float* const streams = streams_of(model, rows, row);
        for (int i = 0; i < hidden; ++i) {
            float before[kCopiesMax];
            for (int j = 0; j < num; ++j) before[j] = streams[static_cast<size_t>(j) * hidden + i];
            for (int k = 0; k < num; ++k) {
                float total = 0.0f;
                for (int j = 0; j < num; ++j) total += matrix[j * num + k] * before[j];
                streams[static_cast<size_t>(k) * hidden + i] = fused(factors[k], output[i], total);
            }
        }
    });
    rows.laps->end(NORM, team.own_thread);
}

// Sizes of a step's buffers in floats; 0 if the residual stream is one stream.
struct StreamFloats {
    size_t input = 0, mixtures = 0;

    StreamFloats(const Model& model, size_t num_rows) {
        if (model.streams == nullptr) return;
        const StreamMixture& mixture = model.layers[0].streams->attention;
        input = input_floats(num_rows, mixture.matrix.in);
        mixtures = num_rows * mixture.matrix.out;
    }
};

}  // namespace tandem::TANDEM_ISA
