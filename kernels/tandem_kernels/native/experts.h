// The experts of a layer: MLPs from which a router chooses a few for each row. Computed in four
// steps:
//
// 1. Logits of each row: router . norm(row). They determine the row's experts and their weights.
// 2. Sort all pairs of a row and one of its experts by expert. A pair's number in this order is its
//    place. So the inputs of one expert have consecutive places.
// 3. Outputs of each place: down . (activation(gate) * up), one product per expert.
// 4. Each row += the sum of weight * output over its experts + the shared MLP.
//
// The bits of a row depend on that row only. A row's experts are summed in the order of their
// numbers.

namespace tandem::TANDEM_ISA {

inline bool has_own_scores(const Experts& experts) {
    return experts.has_sigmoids || experts.has_roots;
}

// Returns the score of an expert that depends on its own logit only.
inline float own_score(const Experts& experts, float logit) {
    if (experts.has_sigmoids) return sigmoid(logit);
    return std::sqrt(logit > 20.0f ? logit : std::log1p(std::exp(logit)));
}

// Keeps only the experts of the best groups in the ranking. The rank of a group is the rank of its
// best expert, or with a correction the sum of the ranks of its two best experts. `of_groups` has
// room for one number per group.
inline void rank_groups(const Experts& experts, float* ranks, float* of_groups) {
    const int size = experts.num / experts.num_groups;
    for (int g = 0; g < experts.num_groups; ++g) {
        float best = -INFINITY, other = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; ++e) {
            other = std::max(other, std::min(best, ranks[e]));
            best = std::max(best, ranks[e]);
        }
        of_groups[g] = experts.correction == nullptr ? best : best + other;
    }
    for (int i = 0; i < experts.top_groups; ++i) {
        int best = -1;
        for (int g = 0; g < experts.num_groups; ++g)
            if (of_groups[g] < INFINITY && (best < 0 || of_groups[g] > of_groups[best])) best = g;
        if (best < 0) break;  // NaN
        of_groups[best] = INFINITY;  // marks the group as chosen
    }
    for (int e = 0; e < experts.num; ++e)
        if (of_groups[e / size] < INFINITY) ranks[e] = -INFINITY;
}

// Computes the weights of the chosen experts: their scores, times `scale`. If is_normalized, the
// scores are first divided by their sum. `largest` is the largest logit.
inline void share_all(const Experts& experts, const float* logits, float largest, Chosen* chosen) {
    const bool are_own = has_own_scores(experts);
    const auto score = [&](float logit) {
        return are_own ? own_score(experts, logit) : std::exp(logit - largest);
    };
    float total = 0.0f;
    for (int i = 0; i < experts.top_k; ++i) {
        chosen[i].share = score(logits[chosen[i].expert]);
        total += chosen[i].share;
    }
    if (!experts.is_normalized) {
        total = 0.0f;
        for (int e = 0; e < experts.num; ++e) total += score(logits[e]);
        if (are_own) total = 1.0f;
    }
    for (int i = 0; i < experts.top_k; ++i) {
        chosen[i].share = chosen[i].share / total * experts.scale;
        if (experts.scales != nullptr) chosen[i].share *= experts.scales[chosen[i].expert];
    }
}

// Computes the ranks of a row's experts. `largest` is the largest logit.
inline void rank_all(const Experts& experts, const float* logits, float largest, float* ranks) {
    if (experts.correction == nullptr) {
        std::copy(logits, logits + experts.num, ranks);
        return;
    }
    const bool are_own = has_own_scores(experts);
    float total = 1.0f;
    if (!are_own) {
        total = 0.0f;
        for (int e = 0; e < experts.num; ++e) total += std::exp(logits[e] - largest);
    }
    for (int e = 0; e < experts.num; ++e) {
        const float score =
            are_own ? own_score(experts, logits[e]) : std::exp(logits[e] - largest) / total;
        ranks[e] = score + experts.correction[e];
    }
}

// Chooses the best experts of a row, and lists them in the order of their numbers. Of equally
// ranked experts, the one with the lowest number is chosen. `ranks` has room for two numbers per
// expert.
//
//                           rank
//     without correction    logit
//     with correction       score + correction
//
// The score of an expert is the sigmoid of its logit, the square root of softplus of its logit, or a
// softmax over all logits. `given` has experts that are chosen whatever their ranks are; null: none.
inline void choose(const Experts& experts, const float* logits, float* ranks, const int32_t* given,
                   Chosen* chosen) {
    const float largest = *std::max_element(logits, logits + experts.num);
    if (given == nullptr) rank_all(experts, logits, largest, ranks);
    if (given == nullptr && experts.num_groups > 0)
        rank_groups(experts, ranks, ranks + experts.num);
    const auto is_taken = [&](int expert, int num) {
        for (int i = 0; i < num; ++i)
            if (chosen[i].expert == expert) return true;
        return false;
    };
    for (int i = 0; i < experts.top_k; ++i) {
        int best = given == nullptr ? -1 : given[i];
        for (int e = 0; given == nullptr && e < experts.num; ++e)
            if ((best < 0 || ranks[e] > ranks[best]) && !is_taken(e, i)) best = e;
        chosen[i].expert = best;
    }
    std::sort(chosen, chosen + experts.top_k,
              [](const Chosen& a, const Chosen& b) { return a.expert < b.expert; });
    share_all(experts, logits, largest, chosen);
}

// Assigns a place to each (row, expert) pair, sorted by expert.
inline void place_all(const Experts& experts, int num_rows, const Routing& routing) {
    const int num = num_rows * experts.top_k;
    std::fill(routing.first, routing.first + experts.num + 1, 0);
    for (int i = 0; i < num; ++i) ++routing.first[routing.chosen[i].expert + 1];
    for (int e = 0; e < experts.num; ++e) routing.first[e + 1] += routing.first[e];
    for (int i = 0; i < num; ++i) {
        Chosen& chosen = routing.chosen[i];
        chosen.place = routing.first[chosen.expert]++;
        routing.choices[chosen.place] = i;
    }
    for (int e = experts.num; e > 0; --e) routing.first[e] = routing.first[e - 1];
    routing.first[0] = 0;
}

// Returns the inputs of one expert, a part of the buffers that have the inputs of all experts.
inline Inputs inputs_of_expert(const Matrix& matrix, float* buffer, const Rows& rows, int expert) {
    const int first = rows.routing.first[expert];
    const size_t before = is_quantized(matrix.kind) ? quantized_input_floats(first, matrix.in) : 0;
    return inputs_of(matrix, buffer + input_floats(first, matrix.in),
                     rows.routing.first[expert + 1] - first, rows.rounded + before);
}

// One matrix of a chain of matrices with different kinds (Matrix::rest), and the number of outputs
// of the matrices before it.
struct Part {
    const Matrix* matrix;  // null: the chain has fewer matrices
    int first_output;
};

inline Part part_of(const Matrix& matrix, int number) {
    Part part{&matrix, 0};
    for (; number > 0 && part.matrix != nullptr; --number, part.matrix = part.matrix->rest)
        part.first_output += part.matrix->out;
    return part;
}

inline int most_parts(const Experts& experts, Matrix Mlp::*which) {
    int most = 1;
    for (int e = 0; e < experts.num; ++e)
        while (part_of(experts.mlps[e].*which, most).matrix != nullptr) ++most;
    return most;
}

// Computes one product for each expert, with inputs in `buffer`. If a quantized matrix has several
// kinds (Matrix::rest), the matrices of all experts have the same kinds, so the threads synchronize
// only once per kind.
inline void multiply_experts(const Experts& experts, Matrix Mlp::*which, float* buffer,
                             const Rows& rows, Output out, const Team& team) {
    const auto for_each = [&](int number, auto work) {
        for (int e = 0; e < experts.num; ++e) {
            const auto [matrix, first_output] = part_of(experts.mlps[e].*which, number);
            if (matrix == nullptr) continue;
            const Inputs inputs = inputs_of_expert(*matrix, buffer, rows, e);
            Output of_expert = out;
            of_expert.rows += rows.routing.first[e] * out.stride + first_output;
            if (inputs.num_rows) work(*matrix, inputs, of_expert);
        }
    };
    if (!is_quantized((experts.mlps[0].*which).kind))
        return for_each(0, [&](const Matrix& matrix, const Inputs& inputs, const Output& to) {
            linear(matrix, inputs, to, team);
        });
    const int num_parts = most_parts(experts, which);
    for (int number = 0; number < num_parts; ++number) {
        if (number > 0) team.wait();
        for_each(number, [&](const Matrix& matrix, const Inputs& inputs, const Output&) {
            round_inputs(matrix, inputs, team);
        });
        team.wait();
        for_each(number, [&](const Matrix& matrix, const Inputs& inputs, const Output& to) {
            const auto [first, end] = share_of(matrix, team);
            linear_of_quantized(matrix, inputs, first, end, to);
        });
    }
}

// Computes activation(gate) * up for all places. The result is the input of the down products.
inline float* gate_experts(const Experts& experts, const Rows& rows, int num_places,
                           const Team& team) {
    const Routing& routing = rows.routing;
    const Mlp& any = experts.mlps[0];
#ifdef TANDEM_PAIRS
    if (kind_of_inputs(any.gate_up.kind) == BF16_PAIRS && any.gate_up.gating.has_gates()) {
        for (int e = 0; e < experts.num; ++e) {
            const Inputs inputs = inputs_of_expert(any.gate_up, rows.routed, rows, e);
            if (inputs.num_rows)
                gate(experts.mlps[e].gate_up, inputs,
                     inputs_of_expert(any.down, rows.projected, rows, e), team);
        }
        team.wait();
        rows.laps->end(GATE_UP, team.own_thread);
        return rows.projected;
    }
#endif
    const size_t width = gate_up_width(any);
    multiply_experts(experts, &Mlp::gate_up, rows.routed, rows, {rows.projected, width, Into::kSet},
                     team);
    team.wait();
    rows.laps->end(GATE_UP, team.own_thread);
    team.each(num_places, [&](int place) {
        const int expert = routing.chosen[routing.choices[place]].expert;
        const Inputs gated = inputs_of_expert(any.down, rows.routed, rows, expert);
        gate_row(rows.projected + place * width, any.gate_up.gating,
                 gated.row(place - routing.first[expert]));
    });
    rows.laps->end(SILU, team.own_thread);
    return rows.routed;
}

// Normalizes rows and computes the router's logits.
inline void route(const Model& model, const Layer& layer, const Step& step, const Rows& rows,
                  const Team& team) {
    const Experts& experts = *layer.experts;
    const Routing& routing = rows.routing;
    const size_t num = experts.num;
    const Inputs normed = inputs_of(experts.router, rows.input, step.num_rows);
    const float* const norm =
        experts.router_norm == nullptr ? layer.mlp_norm : experts.router_norm;
    team.each(step.num_rows, [&](int row) {
        norm_hidden(model, rows.hidden + static_cast<size_t>(row) * model.hidden, norm,
                    normed.row(row));
    });
    linear(experts.router, normed, {rows.logits, num, Into::kSet}, team);
    team.wait();
    team.each(step.num_rows, [&](int row) {
        const int32_t* given = experts.table;
        if (given != nullptr)  // A row may have an embedding in place of a token.
            given += static_cast<size_t>(std::max(step.token_ids[row], 0)) * experts.top_k;
        choose(experts, rows.logits + row * num, rows.logits + (step.num_rows + 2 * row) * num,
               given, &routing.chosen[row * experts.top_k]);
    });
    if (team.is_first()) place_all(experts, step.num_rows, routing);
    team.wait();
    rows.laps->end(NORM, team.own_thread);
}

// Computes the shared MLP of all rows into `delta`.
inline void share_mlp(const Model& model, int index, const Step& step, const Rows& rows,
                      const Team& team) {
    const Inputs gated = gate_normed(model, index, step, rows, team);
    const Output delta{rows.delta, static_cast<size_t>(model.hidden), Into::kSet};
    linear(model.layers[index].mlp.down, gated, delta, team);
    team.wait();
    add_lora(rows.lora, index, &LoraLayer::down, gated, delta, team);
    rows.laps->end(DOWN, team.own_thread);
}

// Multiplies the output of the shared expert in `delta` by the sigmoid of its gate.
// `gate` [hidden] has the gate's weights, multiplied by those of the norm before the MLP.
inline void gate_shared(const Model& model, const float* gate, const float* hidden, float* delta) {
    const int num = model.hidden;
    float logit = 0.0f;
    for (int i = 0; i < num; ++i) logit = fused(hidden[i], gate[i], logit);
    const float factor = sigmoid(logit * norm_scale(hidden, num, model.norm_eps));
    for (int i = 0; i < num; ++i) delta[i] *= factor;
}

// Writes a normalized row times a weight.
inline void weighted_row(const Model& model, const Layer& layer, const float* x, float weight,
                         const InputRow& to) {
    const float scale = norm_scale(x, to.in, model.norm_eps) * weight;
    int at = 0;
    for (; at + kLanes <= to.in; at += kLanes)
        to.put(at, load(x + at) * scale * load(layer.mlp_norm + at));
    if (const int rest = to.in - at)
        to.put(at, load_some(x + at, rest) * scale * load_some(layer.mlp_norm + at, rest), rest);
}

// Normalizes a row [hidden] in place. Does nothing if `norm` is null.
inline void norm_output(const Model& model, const float* norm, float* row) {
    if (norm != nullptr) norm_head(row, norm, model.hidden, model.norm_eps);
}

// Adds the output of a layer's experts to the residual stream.
inline void add_experts(const Model& model, int index, const Step& step, const Rows& rows,
                        const Team& team) {
    const Layer& layer = model.layers[index];
    const Experts& experts = *layer.experts;
    const bool has_shared = layer.mlp.down.panels != nullptr;
    if (has_shared) share_mlp(model, index, step, rows, team);
    const Routing& routing = rows.routing;
    const Mlp& any = experts.mlps[0];
    const size_t hidden = model.hidden;
    const int top_k = experts.top_k, num_places = step.num_rows * top_k;
    route(model, layer, step, rows, team);
    const float* const input_norm =
        experts.input_norm == nullptr ? layer.mlp_norm : experts.input_norm;
    team.each(num_places, [&](int place) {
        const int choice = routing.choices[place], expert = routing.chosen[choice].expert;
        const Inputs inputs = inputs_of_expert(any.gate_up, rows.routed, rows, expert);
        const InputRow to = inputs.row(place - routing.first[expert]);
        const float* const from = rows.hidden + choice / top_k * hidden;
        if (experts.weighs_inputs)
            weighted_row(model, layer, from, routing.chosen[choice].share, to);
        else
            norm_hidden(model, from, input_norm, to);
    });
    rows.laps->end(NORM, team.own_thread);
    float* const gated = gate_experts(experts, rows, num_places, team);
    float* const parts = gated == rows.routed ? rows.projected : rows.routed;
    multiply_experts(experts, &Mlp::down, gated, rows, {parts, hidden, Into::kSet}, team);
    team.wait();
    rows.laps->end(DOWN, team.own_thread);
    team.each(step.num_rows, [&](int row) {
        float* delta = rows.delta + row * hidden;
        if (!has_shared)
            std::fill(delta, delta + hidden, 0.0f);
        else if (experts.shared_gate != nullptr)
            gate_shared(model, experts.shared_gate, rows.hidden + row * hidden, delta);
        // With a norm after the experts, their outputs are summed apart from the shared MLP's.
        float* const sum = experts.output_norm == nullptr ? delta : rows.input + row * hidden;
        if (sum != delta) std::fill(sum, sum + hidden, 0.0f);
        for (int i = row * top_k; i < (row + 1) * top_k; ++i) {
            const Chosen& chosen = routing.chosen[i];
            const float* part = parts + chosen.place * hidden;
            const float share = experts.weighs_inputs ? 1.0f : chosen.share;
            for (size_t at = 0; at < hidden; ++at) sum[at] = fused(part[at], share, sum[at]);
        }
        norm_output(model, experts.shared_output_norm, delta);
        if (sum != delta) {
            norm_output(model, experts.output_norm, sum);
            for (size_t at = 0; at < hidden; ++at) delta[at] += sum[at];
        }
        float* const to = rows.hidden + row * hidden;
        if (layer.streams != nullptr) std::fill(to, to + hidden, 0.0f);  // see streams.h
        add_row(delta, layer.mlp_post_norm, model, to);
    });
    rows.laps->end(NORM, team.own_thread);
}

}  // namespace tandem::TANDEM_ISA
