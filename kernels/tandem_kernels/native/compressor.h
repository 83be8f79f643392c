// The compressors of compressed attention (tandem/models/config/compressor.py). Of each token, a
// compressor computes inputs and gates, which are stored in the pool. When a run of tokens ends, an
// entry is made for each element from the stored inputs c and gates g of the run's tokens:
//
//     entry = rotate(norm(sum over the tokens s of softmax(g[s] + bias[s]) * c[s]))
//
// With overlap, a token has two inputs and two gates: the first ones count in the entry of the next
// run, and the second ones in that of the token's own run. A row of the pool has side by side the
// inputs and the gates of attention's entries, and those of the indexer's.
//
// The bits of an entry depend on what is stored only, whichever step computed it.

namespace tandem::TANDEM_ISA {

// The address of the inputs and gates of the token in `slot`, and their number.
template <class T>
inline T* inputs_of_token(const Step& step, const Compressor& compressor, int64_t slot) {
    const KvGroup& group = step.groups[compressor.input_group];
    char* const part = static_cast<char*>(group.kv) + slot / step.block_size * group.block_bytes +
                       group.parts[compressor.input_part];
    return reinterpret_cast<T*>(part) + slot % step.block_size * compressor.inputs.out;
}

// Makes the entry of one kind for run `number` of a sequence, and stores it in the pool.
template <class T>
void make_entry(const Model& model, const Step& step, const Layer& layer, const Span& span,
                int number, int kind) {
    const Compressor& compressor = *layer.compressor;
    const int dim = compressor.dims[kind], rate = compressor.rate;
    const int of_token = compressor.has_overlap ? 2 * dim : dim;
    const int first = kind == 0 ? 0 : compressor.inputs.out - 2 * of_token;
    const int32_t* const table =
        step.groups[compressor.input_group].block_tables + span.first_table_entry;
    alignas(64) float highest[kHeadMax] = {}, mass[kHeadMax] = {}, entry[kHeadMax] = {};
    alignas(64) float gates[kHeadMax] = {}, inputs[kHeadMax] = {};
    std::fill(highest, highest + dim, -INFINITY);
    // Reads the inputs and gates of each token. Tokens before the first one of the sequence have none.
    const auto each_token = [&](auto work) {
        const int begin = (number - compressor.has_overlap) * rate, end = (number + 1) * rate;
        for (int at = std::max(begin, 0); at < end; ++at) {
            const int64_t block = table[at / step.block_size];
            const int column = compressor.has_overlap && at >= number * rate ? dim : 0;
            const T* const from =
                inputs_of_token<T>(step, compressor, block * step.block_size + at % step.block_size) +
                first + column;
            const float* const bias =
                compressor.bias[kind] + static_cast<size_t>(at % rate) * of_token + column;
            for (int i = 0; i < dim; ++i) gates[i] = widen(from[of_token + i]) + bias[i];
            work(from);
        }
    };
    each_token([&](const T*) {
        for (int i = 0; i < dim; ++i) highest[i] = std::max(highest[i], gates[i]);
    });
    each_token([&](const T* from) {
        for (int i = 0; i < dim; ++i) inputs[i] = widen(from[i]);
        for (int i = 0; i < dim; i += kLanes) {
            const Floats share = exp(load(gates + i) - load(highest + i));
            store(mass + i, load(mass + i) + share);
            store(entry + i, fused(share, load(inputs + i), load(entry + i)));
        }
    });
    for (int i = 0; i < dim; ++i) entry[i] /= mass[i];
    norm_head(entry, compressor.norm[kind], dim, model.norm_eps);
    const int rope = layer.shared_kv->rope;
    const size_t angle =
        layer.rope * step.table_floats + static_cast<size_t>(number) * rate * (rope / 2);
    rotate_last_pairs(entry, dim, step.cosines + angle, step.sines + angle, rope, 1.0f);
    T* const to = EntryRows<T>(step, compressor, span, kind).row(number);
    for (int i = 0; i < dim; i += kLanes)
        store_some(to + i, load(entry + i), std::min(kLanes, dim - i));
}

// Stores the inputs and gates of the step's tokens, and the entries of the runs that end in it.
inline void place_entries(const Model& model, const Step& step, int index, const Rows& rows,
                          const Team& team) {
    const Layer& layer = model.layers[index];
    if (layer.compressor == nullptr) return;
    const Compressor& compressor = *layer.compressor;
    const size_t width = compressor.inputs.out;
    const Inputs normed = inputs_of(compressor.inputs, rows.input, step.num_rows, rows.rounded);
    team.each(step.num_rows, [&](int row) {
        norm_hidden(model, rows.hidden + static_cast<size_t>(row) * model.hidden,
                    layer.attention_norm, normed.row(row));
    });
    linear(compressor.inputs, normed, {rows.projected, width, Into::kSet}, team);
    team.wait();
    rows.laps->end(QKV, team.own_thread);
    const int32_t* const slots = step.groups[compressor.input_group].slots;
    by_kv_kind(step, [&](auto kept) {
        typedef decltype(kept) T;
        if constexpr (!kHasScales<T> && !kIsLatent<T>) {
            team.each(step.num_rows, [&](int row) {
                const float* const from = rows.projected + row * width;
                T* const to = inputs_of_token<T>(step, compressor, slots[row]);
                for (size_t i = 0; i < width; i += kLanes) {
                    const int num = static_cast<int>(std::min<size_t>(kLanes, width - i));
                    store_some(to + i, load_some(from + i, num), num);
                }
            });
            int turn = 0;  // The threads make the entries in turn.
            for (int s = 0; s < step.num_spans; ++s) {
                const Span& span = step.spans[s];
                const int rate = compressor.rate, before = span.context_len - span.num_queries;
                for (int run = before / rate; run < span.context_len / rate; ++run)
                    for (int kind = 0; kind < 2; ++kind)
                        if (compressor.dims[kind] > 0 && turn++ % team.threads == team.thread)
                            make_entry<T>(model, step, layer, span, run, kind);
            }
        }
    });
    team.wait();
    rows.laps->end(PLACE, team.own_thread);
}

}  // namespace tandem::TANDEM_ISA
