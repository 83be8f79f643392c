// Attention with one KV head whose keys are its values (tandem/models/config/deepseek_v4.py).
// attention.h computes the attention itself. RoPE rotates the last elements of queries and keys, and
// this file rotates those of the output back. Then the outputs of some heads, a group, are multiplied
// by the matrix of the group. The buffers are used in this order:
//
//     buffer      shape                        content
//     projected   [rows][latent | key]         latent of the queries, and key of the token
//     queries     [rows][heads][head_dim]      queries computed from their latent, times the scale
//     attended    [rows][heads][head_dim]      output of attention
//     heads       [rows][groups][out rank]     products of the groups
//
// The inputs of the products of groups are in the buffer `of_heads`, group after group.

namespace tandem::TANDEM_ISA {

// Rotates the last `num` elements of a head, two neighbours together. With `sign` -1, rotates back.
inline void rotate_last_pairs(float* head, int dim, const float* cosines, const float* sines, int num,
                              float sign) {
    float* pair = head + dim - num;
    for (int i = 0; i < num / 2; ++i, pair += 2) {
        const float first = pair[0], second = pair[1], sine = sines[i] * sign;
        pair[0] = fused(first, cosines[i], -(second * sine));
        pair[1] = fused(second, cosines[i], first * sine);
    }
}

// Computes the queries, and stores the tokens' keys in the pool.
inline void place_shared_kv(const Model& model, const Step& step, int index, const Rows& rows,
                            const Team& team) {
    const Layer& layer = model.layers[index];
    const SharedKv& shared = *layer.shared_kv;
    const int dim = layer.head_dim;
    const size_t width = layer.qkv.out, of_row = static_cast<size_t>(model.num_heads) * dim;
    const Inputs latents = inputs_of(shared.q_out, rows.input, step.num_rows, rows.rounded);
    team.each(step.num_rows, [&](int row) {
        norm_row(rows.projected + row * width, shared.q_norm, model.norm_eps, latents.row(row));
    });
    linear(shared.q_out, latents, {rows.queries, of_row, Into::kSet}, team);
    team.wait();
    rows.laps->end(QKV, team.own_thread);
    team.each(step.num_rows, [&](int row) {
        const size_t angle = layer.rope * step.table_floats +
                             static_cast<size_t>(step.positions[row]) * (shared.rope / 2);
        const float *cosines = step.cosines + angle, *sines = step.sines + angle;
        float* query = rows.queries + row * of_row;
        for (int head = 0; head < model.num_heads; ++head, query += dim) {
            const float factor = norm_scale(query, dim, model.norm_eps) * model.attention_scale;
            for (int i = 0; i < dim; ++i) query[i] *= factor;
            rotate_last_pairs(query, dim, cosines, sines, shared.rope, 1.0f);
        }
        float* const key = rows.projected + (row + 1) * width - dim;
        norm_head(key, shared.kv_norm, dim, model.norm_eps);
        rotate_last_pairs(key, dim, cosines, sines, shared.rope, 1.0f);
        by_kv_kind(step, [&](auto kept) {
            typedef decltype(kept) T;
            if constexpr (!kHasScales<T> && !kIsLatent<T>) {
                const Place<T> to(layer, step, row, 0);
                for (int i = 0; i < dim; i += kLanes) store_some(to.key + i, load(key + i), kLanes);
            }
        });
    });
    rows.laps->end(PLACE, team.own_thread);
}

// Rotates the output of attention back, and multiplies the heads of each group by its matrix. The
// result is the input of the product with attention_out. `buffer` has room for one head.
inline Inputs products_of_groups(const Model& model, int index, const Step& step, const Rows& rows,
                                 float* buffer, const Team& team) {
    const Layer& layer = model.layers[index];
    const SharedKv& shared = *layer.shared_kv;
    const Inputs attended = attended_latents(model, layer, step, rows);
    const int num_groups = shared.num_groups, dim = layer.head_dim;
    const int of_group = model.num_heads / num_groups;
    team.each(step.num_rows, [&](int row) {
        const size_t angle = layer.rope * step.table_floats +
                             static_cast<size_t>(step.positions[row]) * (shared.rope / 2);
        InputRow from = attended.row(row);
        from.in = dim;
        for (int head = 0; head < model.num_heads; ++head) {
            from.copy_to(buffer, 1);
            from.numbers.first += dim * from.numbers.stride;
            rotate_last_pairs(buffer, dim, step.cosines + angle, step.sines + angle, shared.rope,
                              -1.0f);
            const InputRow to =
                inputs_of_head(shared.out_groups, head / of_group, rows, step.num_rows).row(row);
            for (int i = 0; i < dim; i += kLanes)
                to.put(head % of_group * dim + i, load(buffer + i));
        }
    });
    const int rank = shared.out_groups[0].out;
    const size_t width = static_cast<size_t>(num_groups) * rank;
    team.each(num_groups, [&](int group) {
        linear(shared.out_groups[group],
               inputs_of_head(shared.out_groups, group, rows, step.num_rows),
               {rows.heads + static_cast<size_t>(group) * rank, width, Into::kSet}, team.alone());
    });
    const Inputs narrow = inputs_of(layer.attention_out, rows.attended, step.num_rows, rows.rounded);
    team.each(step.num_rows, [&](int row) {
        put_row(rows.heads + row * width, 1.0f, narrow.row(row));
    });
    rows.laps->end(ATTENTION, team.own_thread);
    return narrow;
}

// Sizes of a step's buffers in floats; 0 without such attention. All layers have the same sizes.
struct SharedKvFloats {
    size_t input = 0, heads = 0, queries = 0, of_heads = 0;

    SharedKvFloats(const Model& model, size_t num_rows) {
        const Layer& layer = model.layers[0];
        if (layer.shared_kv == nullptr) return;
        const SharedKv& shared = *layer.shared_kv;
        const Matrix& group = shared.out_groups[0];
        input = input_floats(num_rows, shared.q_out.in);
        heads = num_rows * shared.num_groups * group.out;
        queries = num_rows * model.num_heads * layer.head_dim;
        of_heads = shared.num_groups * input_floats(num_rows, group.in);
    }
};

}  // namespace tandem::TANDEM_ISA
