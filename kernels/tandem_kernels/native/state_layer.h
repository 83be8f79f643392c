// Layers that keep a state, up to the input of their output product. A row of `projected` has side by
// side:
//
//     Gated DeltaNet        q, k and v, the output gates z, and b and a of each value head
//     Kimi Delta Attention  q, k and v, b of each head, the inputs of `decay_out` and `gate_out`, and
//                           the products of these two: a of each key channel, and the output gates z
//     Mamba 2               the output gates z, x, B and C, and dt of each head
//     short convolution     B, C and x of each channel

namespace tandem::TANDEM_ISA {

// Returns the spans of a step for the state group of a layer, the ones with the most rows first.
// The block table of a sequence has one entry, its slot.
inline std::vector<StateSpan> state_spans_of(const Step& step, const StateLayer& layer) {
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

// The spans of the first layer with a state. All such layers are in one group.
inline std::vector<StateSpan> state_spans_of(const Model& model, const Step& step) {
    for (int index = 0; index < model.num_layers; ++index)
        if (model.layers[index].state != nullptr)
            return state_spans_of(step, *model.layers[index].state);
    return {};
}

// The sizes of a layer's convolution, and where the numbers of each section are in `projected`.
struct StateShape {
    int num_sections = 0;
    int sections[kSectionsMax] = {};  // number of channels
    int outputs = 0;                  // size of the layer's output
    int channels = 0, first_channel = 0;
    int gates = 0, rates = 0, decays = 0;  // places of z, of b, and of a or dt
    int narrow = 0;                        // place of the inputs of `decay_out`

    explicit StateShape(const StateLayer& layer) {
        const int keys = layer.num_k_heads * layer.key_dim;
        outputs = layer.num_v_heads * layer.value_dim;
        const auto set = [&](int first, int second, int third) {
            num_sections = second > 0 ? 3 : 1;
            sections[0] = first, sections[1] = second, sections[2] = third;
            channels = first + second + third;
        };
        if (layer.form == GATED_DELTA) {
            set(keys, keys, outputs);
            gates = channels;
            rates = gates + outputs;
            decays = rates + layer.num_v_heads;
        } else if (layer.form == KIMI_DELTA) {
            set(keys, keys, outputs);
            rates = channels;
            narrow = rates + layer.num_v_heads;
            decays = narrow + layer.decay_out.in + layer.gate_out.in;
            gates = decays + outputs;
        } else if (layer.form == MAMBA2) {
            set(outputs, keys, keys);
            first_channel = outputs;
            decays = outputs + channels;
        } else {
            set(outputs, 0, 0);
            first_channel = 2 * outputs;
        }
    }

    // Returns the place of the first channel of a section in `projected`.
    int place(int section) const {
        int at = first_channel;
        for (int i = 0; i < section; ++i) at += sections[i];
        return at;
    }
};

// Convolves the channels in place. `states` are the convolution's inputs in the states. A head's part
// of them has a share of the channels of each section.
inline void convolve_sections(const StateLayer& layer, const StateShape& shape, float* projected,
                              int64_t stride, float* states, const KvGroup& group, const Rows& rows,
                              const Team& team) {
    const auto share_of = [&](int section) {
        return (shape.sections[section] + layer.num_v_heads - 1) / layer.num_v_heads;
    };
    int channels = 0;
    for (int i = 0; i < shape.num_sections; ++i) channels += share_of(i);
    for (int i = 0; i < shape.num_sections; ++i) {
        Convolution convolution{};
        convolution.x = convolution.y = projected + shape.place(i);
        convolution.row_stride = stride;
        convolution.taps = layer.taps[i];
        convolution.bias = layer.conv_bias[i];
        convolution.states = states;
        convolution.slot_stride = group.block_bytes / 4;
        convolution.group_stride = group.head_bytes / 4;
        convolution.tap_stride = channels;
        convolution.num_channels = shape.sections[i];
        convolution.group_size = share_of(i);
        convolution.num_taps = layer.num_taps;
        convolution.has_silu = layer.form != SHORT_CONV;
        convolution.spans = rows.state_spans;
        convolution.num_spans = rows.num_state_spans;
        convolve(convolution, team);
        states += share_of(i);
    }
}

// Computes y of a layer with a matrix in place of v or x, and updates the states. Returns y.
inline float* scan_layer(const StateLayer& layer, const StateShape& shape, float* projected,
                         int64_t stride, float* states, const KvGroup& group, const Rows& rows,
                         const Team& team) {
    const int dim = layer.value_dim, num_heads = layer.num_v_heads;
    const bool is_delta = layer.form != MAMBA2;
    const HeadRows first{projected + shape.place(0), stride, layer.key_dim};
    const HeadRows second{projected + shape.place(1), stride, layer.key_dim};
    const HeadRows third{projected + shape.place(2), stride, layer.key_dim};
    float* const v = projected + shape.place(is_delta ? 2 : 0);
    StateScan scan{};
    scan.q = is_delta ? first : third;
    scan.k = second;
    scan.v = {v, stride, dim};
    scan.v_group_stride = static_cast<int64_t>(num_heads / layer.num_k_heads) * dim;
    if (layer.form == KIMI_DELTA) {
        scan.decays = projected + shape.decays;
        scan.decay_stride = stride;
    } else {
        scan.a = {projected + shape.decays, stride, 1};
    }
    scan.b = {projected + shape.rates, stride, 1};
    scan.a_log = layer.a_log;
    scan.dt_bias = layer.dt_bias;
    scan.skip = layer.skip;
    scan.dt_max = INFINITY;
    scan.rate_max = layer.rate_max;
    scan.y = v;
    scan.y_stride = stride;
    scan.states = states;
    scan.slot_stride = group.block_bytes / 4;
    scan.head_stride = group.head_bytes / 4;
    scan.num_k_heads = layer.num_k_heads;
    scan.num_v_heads = num_heads;
    scan.key_dim = layer.key_dim;
    scan.value_dim = dim;
    scan.is_delta = is_delta;
    scan.spans = rows.state_spans;
    scan.num_spans = rows.num_state_spans;
    scan_states(scan, team);
    return v;
}

// Computes the decays' inputs and the output gates of Kimi Delta Attention from the narrow products.
inline void multiply_narrow(const StateLayer& layer, int index, const StateShape& shape,
                            float* projected, int64_t stride, int num_rows, const Rows& rows,
                            const Team& team) {
    int from = shape.narrow, to = shape.decays;
    for (const bool is_of_decays : {true, false}) {
        const Matrix* const matrix = is_of_decays ? &layer.decay_out : &layer.gate_out;
        const Inputs inputs = inputs_of(*matrix, rows.input, num_rows, rows.rounded);
        team.each(num_rows, [&](int row) {
            put_row(projected + row * stride + from, 1.0f, inputs.row(row));
        });
        const Output output{projected + to, static_cast<size_t>(stride), Into::kSet};
        linear(*matrix, inputs, output, team);
        team.wait();
        add_lora(rows.lora, index, is_of_decays ? &LoraLayer::decay_out : &LoraLayer::gate_out,
                 inputs, output, team);
        from += matrix->in;
        to += matrix->out;
    }
}

inline Floats sigmoid(Floats x) { return 1.0f / (exp(-x) + 1.0f); }

inline Floats silu(Floats x) { return x / (exp(-x) + 1.0f); }

// Writes the outputs of a row, which the gates z multiply before or after a norm, to the input row of
// the output product from number `first` on.
//
//     Gated DeltaNet:        norm of each head of y, times silu(z)
//     Kimi Delta Attention:  norm of each head of y, times sigmoid(z)
//     Mamba 2:               norm of each group of y * silu(z), or without a norm y * silu(z)
inline void put_outputs(const StateLayer& layer, float* y, const float* z, int first,
                        const InputRow& to) {
    const bool is_delta = layer.form != MAMBA2;
    const int outputs = layer.num_v_heads * layer.value_dim;
    const int size = is_delta ? layer.value_dim : outputs / layer.num_k_heads;
    for (int at = 0; at < outputs; at += size) {
        if (!is_delta)
            for (int i = at; i < at + size; i += kLanes) store(y + i, load(y + i) * silu(load(z + i)));
        const float scale = layer.has_norm ? norm_scale(y + at, size, layer.norm_eps) : 1.0f;
        for (int i = at; i < at + size; i += kLanes) {
            const Floats normed = load(y + i) * scale * load(layer.norm + i);
            if (layer.form == KIMI_DELTA)
                to.put(first + i, normed * sigmoid(load(z + i)));
            else
                to.put(first + i, is_delta ? normed * silu(load(z + i)) : normed);
        }
    }
}

// Computes the part of a layer that has a state: updates the states, and writes the outputs to the
// input rows of the output product, after those of attention.
inline void place_state(const Model& model, const Step& step, int index, const Rows& rows,
                        const Team& team) {
    const Layer& layer = model.layers[index];
    const StateLayer& own = *layer.state;
    const StateShape shape(own);
    const KvGroup& group = step.group_of(own);
    const int64_t stride = static_cast<int64_t>(projected_width(model, layer));
    const int before = layer.has_attention ? model.num_heads * layer.head_dim : 0;
    float* const projected =
        rows.projected +
        (layer.has_attention ? before + 2 * layer.num_kv_heads * layer.head_dim : 0);
    float* const states =
        reinterpret_cast<float*>(static_cast<char*>(group.kv) + own.place * group.layer_bytes);
    float* const convs = states + own.key_dim * own.value_dim;
    const Inputs out = inputs_of(layer.attention_out, rows.attended, step.num_rows, rows.rounded);
    if (own.form == SHORT_CONV) {
        const int num = shape.outputs;
        team.each(step.num_rows, [&](int row) {
            float *const b = projected + row * stride, *const x = b + 2 * num;
            for (int i = 0; i < num; ++i) x[i] *= b[i];
        });
        convolve_sections(own, shape, projected, stride, convs, group, rows, team);
        team.each(step.num_rows, [&](int row) {
            const float *const c = projected + row * stride + num, *const x = c + num;
            const InputRow to = out.row(row);
            int i = 0;
            for (; i + kLanes <= num; i += kLanes)
                to.put(before + i, load(c + i) * load(x + i));
            if (const int rest = num - i)
                to.put(before + i, load_some(c + i, rest) * load_some(x + i, rest), rest);
        });
    } else {
        if (own.form == KIMI_DELTA)
            multiply_narrow(own, index, shape, projected, stride, step.num_rows, rows, team);
        convolve_sections(own, shape, projected, stride, convs, group, rows, team);
        float* const y = scan_layer(own, shape, projected, stride, states, group, rows, team);
        team.each(step.num_rows, [&](int row) {
            put_outputs(own, y + row * stride, projected + row * stride + shape.gates, before,
                        out.row(row));
        });
    }
    rows.laps->end(ATTENTION, team.own_thread);
}

// Multiplies the output of attention by the sigmoid of its gates, which are the last columns of
// `projected`. The queries are not needed any more, so their place takes the products.
inline void gate_attended(const Model& model, const Layer& layer, const Rows& rows,
                          const Inputs& attended, const Team& team) {
    const size_t width = projected_width(model, layer);
    const int num = attended.in, num_of_gate = num / layer.num_gates;
    team.each(attended.num_rows, [&](int row) {
        float* const gated = rows.projected + row * width;
        const float* const gates = gated + width - layer.num_gates;
        const InputRow to = attended.row(row);
        to.copy_to(gated, 1);
        for (int i = 0; i < num; i += kLanes) {
            const Floats gate = num_of_gate == 1 ? load(gates + i) : all(gates[i / num_of_gate]);
            to.put(i, load(gated + i) / (exp(-gate) + 1.0f));
        }
    });
}

}  // namespace tandem::TANDEM_ISA
