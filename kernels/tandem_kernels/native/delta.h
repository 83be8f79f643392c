// Gated DeltaNet layers, up to the input of their output product. A row of `projected` has the
// channels of q, k and v, the output gates z, and b and a of each value head, side by side.

namespace tandem::TANDEM_ISA {

// Returns the spans of a step for the state group of `layer`, the ones with the most rows first.
// The block table of a sequence has one entry, its slot.
inline std::vector<StateSpan> state_spans_of(const Step& step, const Layer& layer) {
    std::vector<StateSpan> spans;
    for (int s = 0; s < step.num_spans; ++s) {
        const Span& span = step.spans[s];
        spans.push_back({span.first_row, span.num_queries, span.context_len - span.num_queries,
                         step.group_of(layer).block_tables[s]});
    }
    std::stable_sort(spans.begin(), spans.end(), [](const StateSpan& a, const StateSpan& b) {
        return a.num_rows > b.num_rows;
    });
    return spans;
}

// The spans of the first layer with states. All such layers are in one group.
inline std::vector<StateSpan> state_spans_of(const Model& model, const Step& step) {
    for (int index = 0; index < model.num_layers; ++index)
        if (model.layers[index].delta != nullptr)
            return state_spans_of(step, model.layers[index]);
    return {};
}

// Convolves the channels of q, k and v in place. A head's part of the states has a share of the
// channels of each.
inline void convolve_sections(const Delta& delta, float* states, const KvGroup& group, size_t width,
                              const Rows& rows, const Team& team) {
    const int num_keys = delta.num_k_heads * delta.key_dim;
    const int num_values = delta.num_v_heads * delta.value_dim;
    const int channels = (2 * num_keys + num_values) / delta.num_v_heads;
    const struct {
        const float* taps;
        int first, num;
    } sections[] = {{delta.q_taps, 0, num_keys},
                    {delta.k_taps, num_keys, num_keys},
                    {delta.v_taps, 2 * num_keys, num_values}};
    for (const auto& section : sections) {
        float* const x = rows.projected + section.first;
        Convolution convolution{};
        convolution.x = convolution.y = x;
        convolution.row_stride = static_cast<int64_t>(width);
        convolution.taps = section.taps;
        convolution.states = states + section.first / delta.num_v_heads;
        convolution.slot_stride = group.block_bytes / 4;
        convolution.group_stride = group.head_bytes / 4;
        convolution.tap_stride = channels;
        convolution.num_channels = section.num;
        convolution.group_size = section.num / delta.num_v_heads;
        convolution.num_taps = delta.num_taps;
        convolution.has_silu = true;
        convolution.spans = rows.state_spans;
        convolution.num_spans = rows.num_state_spans;
        convolve(convolution, team);
    }
}

// Computes y, in place of v, and updates the states. Then writes the norm of y, times silu(z), to the
// input rows of the output product.
inline void place_delta(const Model& model, const Step& step, int index, const Rows& rows,
                        const Team& team) {
    const Layer& layer = model.layers[index];
    const Delta& delta = *layer.delta;
    const KvGroup& group = step.group_of(layer);
    const int num_keys = delta.num_k_heads * delta.key_dim, dim = delta.value_dim;
    const int num_heads = delta.num_v_heads;
    const size_t width = projected_width(model, layer);
    const int64_t stride = static_cast<int64_t>(width);
    float* const matrices =
        reinterpret_cast<float*>(static_cast<char*>(group.kv) + layer.place * group.layer_bytes);
    convolve_sections(delta, matrices + delta.key_dim * dim, group, width, rows, team);
    float* const v = rows.projected + 2 * num_keys;
    const float* const z = v + num_heads * dim;
    const float *const b = z + num_heads * dim, *const a = b + num_heads;
    StateScan scan{};
    scan.q = {rows.projected, stride, delta.key_dim};
    scan.k = {rows.projected + num_keys, stride, delta.key_dim};
    scan.v = {v, stride, dim};
    scan.v_group_stride = static_cast<int64_t>(num_heads / delta.num_k_heads) * dim;
    scan.a = {a, stride, 1};
    scan.b = {b, stride, 1};
    scan.a_log = delta.a_log;
    scan.dt_bias = delta.dt_bias;
    scan.y = v;
    scan.y_stride = stride;
    scan.states = matrices;
    scan.slot_stride = group.block_bytes / 4;
    scan.head_stride = group.head_bytes / 4;
    scan.num_k_heads = delta.num_k_heads;
    scan.num_v_heads = num_heads;
    scan.key_dim = delta.key_dim;
    scan.value_dim = dim;
    scan.is_delta = true;
    scan.spans = rows.state_spans;
    scan.num_spans = rows.num_state_spans;
    scan_states(scan, team);
    const Inputs out = inputs_of(layer.attention_out, rows.attended, step.num_rows, rows.rounded);
    team.each(step.num_rows, [&](int row) {
        const InputRow to = out.row(row);
        for (int h = 0; h < num_heads; ++h) {
            const size_t at = row * width + h * dim;
            const float scale = norm_scale(v + at, dim, model.norm_eps);
            for (int i = 0; i < dim; i += kLanes) {
                const Floats gate = load(z + at + i);
                const Floats normed = load(v + at + i) * scale * load(delta.norm + i);
                to.put(h * dim + i, normed * gate / (exp(-gate) + 1.0f));
            }
        }
    });
    rows.laps->end(ATTENTION, team.own_thread);
}

// Multiplies the output of attention by the sigmoid of its gates, which are the last columns of
// `projected`. The queries are not needed any more, so their place takes the products.
inline void gate_attended(const Model& model, const Layer& layer, const Rows& rows,
                          const Inputs& attended, const Team& team) {
    const size_t width = projected_width(model, layer);
    const int num = attended.in;
    team.each(attended.num_rows, [&](int row) {
        float* const gated = rows.projected + row * width;
        const float* const gates = gated + width - num;
        const InputRow to = attended.row(row);
        to.copy_to(gated, 1);
        for (int i = 0; i < num; i += kLanes)
            to.put(i, load(gated + i) / (exp(-load(gates + i)) + 1.0f));
    });
}

}  // namespace tandem::TANDEM_ISA
