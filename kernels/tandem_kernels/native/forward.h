// Computes a step from token ids to logits, for one instruction set. All threads run the whole
// computation together, and wait for each other where an operation needs the results of another.

namespace tandem::TANDEM_ISA {

#ifndef TANDEM_AMX
struct TilesInUse {  // does nothing without AMX; amx.h has the version for AMX
    TilesInUse() {}
};
#endif

// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight
inline float norm_scale(const float* x, int num, float eps) {
    Floats squares[kVectors] = {};
    int at = 0;
    for (; at + kPanel <= num; at += kPanel)
        for (int v = 0; v < kVectors; ++v) {
            const Floats part = load(x + at + v * kLanes);
            squares[v] = fused(part, part, squares[v]);
        }
    float total = sum(squares);
    for (; at < num; ++at) total += x[at] * x[at];
    return 1.0f / std::sqrt(total / num + eps);
}

// Normalizes a row. If `weight` is null, copies the row.
inline void norm_row(const float* x, const float* weight, float eps, const InputRow& to) {
    if (weight == nullptr) {
        int at = 0;
        for (; at + kLanes <= to.in; at += kLanes) to.put(at, load(x + at));
        if (const int rest = to.in - at) to.put(at, load_some(x + at, rest), rest);
        return;
    }
    const float scale = norm_scale(x, to.in, eps);
    int at = 0;
    for (; at + kLanes <= to.in; at += kLanes)
        to.put(at, load(x + at) * scale * load(weight + at));
    if (const int rest = to.in - at)
        to.put(at, load_some(x + at, rest) * scale * load_some(weight + at, rest), rest);
}

// LayerNorm without a bias: y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight
inline void center_row(const float* x, const float* weight, float eps, const InputRow& to) {
    float total = 0.0f;
    for (int i = 0; i < to.in; ++i) total += x[i];
    const float mean = total / to.in;
    float squares = 0.0f;
    for (int i = 0; i < to.in; ++i) squares = fused(x[i] - mean, x[i] - mean, squares);
    const float scale = 1.0f / std::sqrt(squares / to.in + eps);
    int at = 0;
    for (; at + kLanes <= to.in; at += kLanes)
        to.put(at, (load(x + at) - mean) * scale * load(weight + at));
    if (const int rest = to.in - at)
        to.put(at, (load_some(x + at, rest) - mean) * scale * load_some(weight + at, rest), rest);
}

// Normalizes a row of the residual stream.
inline void norm_hidden(const Model& model, const float* x, const float* weight,
                        const InputRow& to) {
    if (model.centers_norms && weight != nullptr)
        center_row(x, weight, model.norm_eps, to);
    else
        norm_row(x, weight, model.norm_eps, to);
}

// Rotates a head (RoPE) and writes the result to `to`.
template <class T>
inline void rotate(const float* head, const float* cosines, const float* sines, int dim,
                   float scale, T* to) {
    const int half = dim / 2;
    const auto some = [&](int i, int num, auto load_of) {
        const Floats first = load_of(head + i), second = load_of(head + half + i);
        const Floats cosine = load_of(cosines + i), sine = load_of(sines + i);
        store_some(to + i, fused(first, cosine, -(second * sine)) * scale, num);
        store_some(to + half + i, fused(second, cosine, first * sine) * scale, num);
    };
    int i = 0;
    for (; i + kLanes <= half; i += kLanes)
        some(i, kLanes, [](const float* from) { return load(from); });
    if (const int rest = half - i)
        some(i, rest, [rest](const float* from) { return load_some(from, rest); });
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

inline void norm_head(float* head, const float* weight, int dim, float eps) {
    const float scale = norm_scale(head, dim, eps);
    for (int i = 0; i < dim; ++i) head[i] = head[i] * scale * weight[i];
}

// Computes x += delta * multiplier. If the layer has a post-norm, delta is normalized first.
inline void add_row(const float* delta, const float* norm, const Model& model, float* x) {
    const int num = model.hidden;
    float scale = model.residual_multiplier;
    if (norm == nullptr) {
        for (int i = 0; i < num; ++i) x[i] = fused(delta[i], scale, x[i]);
        return;
    }
    scale *= norm_scale(delta, num, model.norm_eps);
    for (int i = 0; i < num; ++i) x[i] = fused(delta[i] * scale, norm[i], x[i]);
}

constexpr int kRowsToFetch = 64;

// Writes a value as the pool stores it: normalized and multiplied, with zeros after it.
inline void put_value(const Model& model, const Layer& layer, const float* value, float* to) {
    float scale = model.value_scale;
    if (model.norms_values) scale *= norm_scale(value, layer.value_dim, model.norm_eps);
    for (int i = 0; i < layer.value_dim; ++i) to[i] = value[i] * scale;
    std::fill(to + layer.value_dim, to + layer.head_dim, 0.0f);
}

// Normalizes and rotates a row's heads, and stores its K and V in the pool.
template <class T>
void place_row(const Model& model, const Layer& layer, const Step& step, int row, float* heads) {
    const int dim = layer.head_dim, half = dim / 2;
    const int num_kv_heads = layer.num_kv_heads;
    const size_t first_angle =
        layer.rope * step.table_floats + static_cast<size_t>(step.positions[row]) * half;
    const float *cosines = step.cosines + first_angle, *sines = step.sines + first_angle;
    const bool norms_each = layer.q_norm != nullptr && !model.norms_all_heads;
    const float factor = model.attention_scale * step.query_factor(layer, row);
    const auto turn = [&](float* head, const float* norm, float scale) {
        if (norms_each && !model.norms_rotated) norm_head(head, norm, dim, model.norm_eps);
        const bool scales_later = norms_each && model.norms_rotated;
        rotate(head, cosines, sines, dim, scales_later ? 1.0f : scale, head);
        if (!scales_later) return;
        norm_head(head, norm, dim, model.norm_eps);
        for (int i = 0; i < dim; ++i) head[i] *= scale;
    };
    if (layer.q_norm != nullptr && model.norms_all_heads) {
        const int width = model.num_heads * dim;
        norm_head(heads, layer.q_norm, width, model.norm_eps);
        norm_head(heads + width, layer.k_norm, num_kv_heads * dim, model.norm_eps);
    }
    for (int h = 0; h < model.num_heads; ++h) turn(heads + h * dim, layer.q_norm, factor);
    if (layer.shares_kv) return;
    alignas(64) float padded[kHeadMax];
    for (int h = 0; h < num_kv_heads; ++h) {
        float* key = heads + (model.num_heads + h) * dim;
        turn(key, layer.k_norm, 1.0f);
        const float* value =
            heads + (model.num_heads + num_kv_heads) * dim + h * layer.value_dim;
        if (model.norms_values || model.value_scale != 1.0f || layer.value_dim < dim) {
            put_value(model, layer, value, padded);
            value = padded;
        }
        store_rows(step, key, value, dim, Place<T>(layer, step, row, h));
    }
}

inline void gate_row(const float* gate_up, const Gating& gating, const InputRow& to) {
    if (!gating.has_gates()) {
        for (int at = 0; at < to.in; at += kLanes) {
            const int num = std::min(kLanes, to.in - at);
            const Floats up = max(load_some(gate_up + at, num), Floats{});
            to.put(at, up * up, num);
        }
        return;
    }
    const float *gate = gate_up, *up = gate_up + to.in;
    int at = 0;
    for (; at + kLanes <= to.in; at += kLanes)
        to.put(at, gated(load(gate + at), load(up + at), gating));
    if (const int rest = to.in - at)
        to.put(at, gated(load_some(gate + at, rest), load_some(up + at, rest), gating), rest);
}

// Reads the weights of one output from packed panels (decoder.h, quantized.h). The rank must store
// the output's panel.
inline void widen_output(const Matrix& matrix, int output, float* to) {
    const int in = matrix.in, lane = output % kPanel;
    const int panel = output / kPanel - matrix.first_panel;
    if (is_quantized(matrix.kind))
        return widen_row(static_cast<const char*>(matrix.panels), matrix.kind, in,
                         panel * kPanel + lane, to);
    if (matrix.kind == BF16_PAIRS) {
        const Bf16* from = static_cast<const Bf16*>(matrix.panels) +
                           static_cast<size_t>(panel) * whole_steps(in) * kPanel + 2 * lane;
        for (int k = 0; k < in; ++k) to[k] = widen(from[(k - k % 2) * kPanel + k % 2]);
        return;
    }
    const size_t num_outputs = static_cast<size_t>(matrix.num_panels) * kPanel;
    for (int block = 0; block < num_input_blocks(in); ++block) {
        const int first = first_input(in, block), num = first_input(in, block + 1) - first;
        const size_t at = first * num_outputs + static_cast<size_t>(panel) * num * kPanel;
        for (int k = 0; k < num; ++k, ++to) {
            const size_t row = at + static_cast<size_t>(k) * kPanel;
            if (matrix.kind == BF16)
                *to = widen(static_cast<const Bf16*>(
                    matrix.panels)[row + lane % (kPanel / 2) * 2 + lane / (kPanel / 2)]);
            else
                *to = static_cast<const float*>(matrix.panels)[row + lane];
        }
    }
}

inline void embed(const Model& model, int token, float* to) {
    const size_t first = static_cast<size_t>(token) * model.hidden;
    if (model.embedding == nullptr) {
        widen_output(model.output, token, to);
    } else if (model.embedding_kind == BF16) {
        const Bf16* from = static_cast<const Bf16*>(model.embedding) + first;
        for (int i = 0; i < model.hidden; ++i) to[i] = widen(from[i]);
    } else if (is_quantized(model.embedding_kind)) {
        widen_row(static_cast<const char*>(model.embedding), model.embedding_kind, model.hidden,
                  token, to);
    } else {
        std::memcpy(to, static_cast<const float*>(model.embedding) + first,
                    model.hidden * sizeof(float));
    }
    if (model.embedding_multiplier != 1.0f)
        for (int i = 0; i < model.hidden; ++i) to[i] *= model.embedding_multiplier;
}

// Writes the embeddings of all rows. If a rank stores only a part of the vocabulary, the rank writes
// the embeddings of these tokens.
inline void embed_all(const Model& model, const Step& step, float* hidden, const Team& team) {
    const auto embed_row = [&](int row) {
        const int token = step.token_ids[row];
        float* to = hidden + static_cast<size_t>(row) * model.hidden;
        if (token >= 0) return embed(model, token, to);
        std::memcpy(to, step.embeddings + static_cast<size_t>(-1 - token) * model.hidden,
                    model.hidden * sizeof(float));
    };
    if (model.embedding != nullptr) return team.each(step.num_rows, embed_row);
    const int first = model.output.first_panel, end = first + model.output.num_panels;
    for (int row = team.own_thread; row < step.num_rows; row += team.own_threads) {
        const int token = step.token_ids[row];
        const int panel = token / kPanel;
        if (token < 0 || (panel >= first && panel < end)) embed_row(row);
    }
    team.wait();
}

struct ScoreBatch;

struct Rows {  // buffers of a step, shared by all threads
    float *hidden, *input, *projected, *attended, *delta, *rounded, *routed, *logits;
    float *heads, *queries, *of_heads;  // see latent.h and shared_kv.h
    Routing routing;
    Laps* laps;
    StepLora lora;
    const StateSpan* state_spans;
    int num_state_spans;
    float* layer_inputs;  // see layer_inputs.h
    // See indexer.h: [rows][heads][rounded dim], [rows][dim], [rows][heads], and the scores of the
    // queries of a batch.
    float *index_queries, *index_keys, *index_weights, *scores;
    int32_t* choice;  // [rows][choices][top k]
    const std::vector<ScoreBatch>* batches;
    float* copies;    // see alt_up.h and streams.h
    float* mixtures;  // see streams.h
};

}  // namespace tandem::TANDEM_ISA

#include "latent.h"
#include "shared_kv.h"
#include "compressor.h"
#include "indexer.h"

namespace tandem::TANDEM_ISA {

// The attention items of some layers. The threads compute `items` in turn, and then `merges`.
struct Items {
    std::vector<Item> items, merges;
};

// Returns the size of a row in Item::sums. Layers may have heads of different sizes.
inline size_t piece_row_floats(const Model& model) {
    int dim = 0;
    for (int index = 0; index < model.num_layers; ++index)
        dim = std::max(dim, model.layers[index].head_dim);
    return whole_steps(dim) + kSumsFloats;
}

// Divides the attention of a step into items (attention.h). The longest items come first, so that
// no thread begins a long one when the others are almost done. `choice` is that of Rows.
inline Items items_of(const Model& model, const Step& step, const Layer& layer, int32_t* choice,
                      Scratch& scratch) {
    const int group = model.num_heads / layer.num_kv_heads;
    const int most = rows_of_item(model, step);
    const int rate = layer.compressor == nullptr ? 0 : layer.compressor->rate;
    std::vector<Item> items;
    for (int s = 0; s < step.num_spans; ++s) {
        const size_t num_before = items.size();
        const Span& span = step.spans[s];
        const int num_queries = num_unchosen(span, layer);
        const int rows = num_queries * group, num = (rows + most - 1) / most;
        for (int i = num - 1; i >= 0; --i) {
            const int first = static_cast<int64_t>(rows) * i / num;
            const int end = static_cast<int64_t>(rows) * (i + 1) / num;
            for (int h = 0; h < layer.num_kv_heads; ++h)
                items.push_back({s, h, first, end - first, layer.window, group, {}});
        }
        for (int query = num_queries; query < span.num_queries; ++query)
            for (int h = 0; h < layer.num_kv_heads; ++h) {
                const KeyChoice chosen =
                    choice_of(*layer.indexer, choice, span.first_row + query, h);
                for (int first = 0; first < group; first += most)
                    items.push_back({s, h, query * group + first, std::min(most, group - first),
                                     layer.window, group, chosen});
            }
        for (size_t i = num_before; rate > 0 && i < items.size(); ++i) {
            items[i].rate = rate;
            items[i].base = (span.context_len / rate + kPieceKeys - 1) / kPieceKeys * kPieceKeys;
        }
    }
    // Chosen keys are not known yet, but their number is.
    const auto keys = [&](const Item& item) {
        if (item.choice.blocks != nullptr && rate == 0)
            return Seen{0, 0, item.choice.num * item.choice.size};
        return keys_of(step.spans[item.span], item);
    };
    // To estimate how long an item takes: reading a key takes as long as multiplying 4 rows by it.
    constexpr int kFetching = 4;
    const auto work = [&](const Item& item) {
        const Seen seen = keys(item);
        const auto num_before = [&](int end) {
            return std::min(seen.start, end) + std::max(std::min(seen.end, end) - seen.first, 0);
        };
        const int num_keys = num_before(item.end(seen.end)) - num_before(item.begin());
        return static_cast<int64_t>(item.num_rows + kFetching) * num_keys;
    };
    Items divided;
    const int num_threads = model.num_threads * scratch.ranks.num;
    if (num_threads == 1) {
        divided.items = std::move(items);
    } else {
        // An item that would take a thread more than an eighth of its time is computed in pieces.
        constexpr int kItemsOfThread = 8;
        int64_t all = 0;
        for (const Item& item : items) all += work(item);
        const size_t row_floats = piece_row_floats(model);
        float* sums = scratch.piece_sums.of(kPieceFloats);
        size_t room = kPieceFloats;
        for (const Item& item : items) {
            const size_t of_piece = item.num_rows * row_floats;
            const Seen seen = keys(item);
            const int end = (seen.end + kPieceKeys - 1) / kPieceKeys;
            const int end_of_start = (seen.start + kPieceKeys - 1) / kPieceKeys;
            const int first = std::max(seen.first / kPieceKeys, end_of_start);
            const int most = end_of_start + end - first;  // number of pieces with keys to read
            // The weights of blocks (block_sums.h) are added up by one thread.
            if (most == 1 || work(item) * kItemsOfThread * num_threads <= all ||
                most * of_piece > room || step.spans[item.span].first_sum >= 0) {
                divided.items.push_back(item);
                continue;
            }
            Item merge = item, part = item;
            merge.task = Task::kMerge;
            part.task = Task::kPiece;
            merge.sums = part.sums = sums;
            merge.row_floats = part.row_floats = row_floats;
            for (int i = 0; i < most; ++i) {
                part.piece = i < end_of_start ? i : first + i - end_of_start;
                if (work(part) == 0) continue;
                divided.items.push_back(part);
                part.sums += of_piece;
                ++merge.num_pieces;
            }
            divided.merges.push_back(merge);
            room -= part.sums - sums;
            sums = part.sums;
        }
    }
    std::stable_sort(divided.items.begin(), divided.items.end(),
                     [&](const Item& a, const Item& b) { return work(a) > work(b); });
    return divided;
}

// The attention items of each layer. Layers with the same window, number of KV heads and rate of
// compressors have the same items, if keys are chosen for all of them or for none.
struct LayerItems {
    std::vector<Items> items;
    std::vector<const Layer*> kinds;  // a layer for each of `items`

    LayerItems(const Model& model, const Step& step, int num_layers, int32_t* choice,
               Scratch& scratch) {
        for (int index = 0; index < num_layers; ++index) {
            const Layer& layer = model.layers[index];
            if (kind_of(layer) < kinds.size()) continue;
            kinds.push_back(&layer);
            items.push_back(items_of(model, step, layer, choice, scratch));
        }
    }

    size_t kind_of(const Layer& layer) const {
        const auto rate_of = [](const Layer& each) {
            return each.compressor == nullptr ? 0 : each.compressor->rate;
        };
        const auto is_alike = [&](const Layer* other) {
            return other->window == layer.window && other->num_kv_heads == layer.num_kv_heads &&
                   (other->indexer == nullptr) == (layer.indexer == nullptr) &&
                   rate_of(*other) == rate_of(layer);
        };
        return std::find_if(kinds.begin(), kinds.end(), is_alike) - kinds.begin();
    }

    const Items& of(const Layer& layer) const { return items[kind_of(layer)]; }
};

// Returns the size of a row in `projected`.
inline size_t projected_width(const Model& model, const Layer& layer) {
    if (layer.shared_kv != nullptr) return layer.qkv.out;
    if (layer.latent != nullptr || layer.state != nullptr || layer.num_gates > 0) {
        size_t width = 0;
        for (const Matrix* part = &layer.qkv; part != nullptr; part = part->rest) width += part->out;
        if (layer.state != nullptr) width += layer.state->decay_out.out + layer.state->gate_out.out;
        return width;
    }
    const int num_kv_heads = layer.shares_kv ? 0 : layer.num_kv_heads;
    return static_cast<size_t>(model.num_heads + num_kv_heads) * layer.head_dim +
           static_cast<size_t>(num_kv_heads) * layer.value_dim;
}

}  // namespace tandem::TANDEM_ISA

#include "state_functions.h"

#include "alt_up.h"
#include "layer_inputs.h"
#include "streams.h"
#include "state_layer.h"

namespace tandem::TANDEM_ISA {

// Computes a layer up to attention: normalizes the rows, projects them, computes the part that has a
// state, rotates Q and K, and stores K and V. The queries are then in `projected`, or in
// `queries` with latent attention or if keys are values. Does the same for the layer's indexer and
// compressor.
inline void store_kv(const Model& model, const Step& step, int index, const Rows& rows,
                     const Team& team) {
    const Layer& layer = model.layers[index];
    if (!layer.has_attention && layer.state == nullptr) return;
    const size_t width = projected_width(model, layer);
    const Inputs normed = inputs_of(layer.qkv, rows.input, step.num_rows, rows.rounded);
    team.each(step.num_rows, [&](int row) {
        if (step.num_rows <= kRowsToFetch && layer.has_attention && !layer.shares_kv) {
            by_kv_kind(step, [&](auto kept) {
                for (int h = 0; h < layer.num_kv_heads; ++h)
                    Place<decltype(kept)>(layer, step, row, h).fetch(layer);
            });
        }
        norm_hidden(model, rows.hidden + static_cast<size_t>(row) * model.hidden,
                    layer.attention_norm, normed.row(row));
    });
    rows.laps->end(NORM, team.own_thread);
    const Output projected{rows.projected, width, Into::kSet};
    linear(layer.qkv, normed, projected, team);
    team.wait();
    add_lora(rows.lora, index, &LoraLayer::qkv, normed, projected, team);
    if (layer.projected_factors != nullptr)
        team.each(step.num_rows, [&](int row) {
            float* const to = rows.projected + row * width;
            for (size_t i = 0; i < width; ++i) to[i] *= layer.projected_factors[i];
        });
    rows.laps->end(QKV, team.own_thread);
    if (layer.state != nullptr) place_state(model, step, index, rows, team);
    if (!layer.has_attention) return;
    if (layer.latent != nullptr) {
        place_latent(model, step, index, rows, team);
        return place_index(model, step, index, rows, team);
    }
    if (layer.shared_kv != nullptr) {
        place_shared_kv(model, step, index, rows, team);
        place_index(model, step, index, rows, team);
        return place_entries(model, step, index, rows, team);  // overwrites `projected`
    }
    team.each(step.num_rows, [&](int row) {
        float* heads = rows.projected + row * width;
        by_kv_kind(step, [&](auto kept) {
            place_row<decltype(kept)>(model, layer, step, row, heads);
        });
    });
    rows.laps->end(PLACE, team.own_thread);
    place_index(model, step, index, rows, team);
}

// Returns the number of gates and ups of a row.
inline size_t gate_up_width(const Mlp& mlp) {
    return (mlp.gate_up.gating.has_gates() ? 2 : 1) * static_cast<size_t>(mlp.down.in);
}

// Computes activation(gate) * up, the input of the MLP's down product.
inline Inputs gate_all(const Model& model, int index, const Step& step, const Inputs& normed,
                       const Rows& rows, const Team& team) {
    const Layer& layer = model.layers[index];
    const Mlp& mlp = layer.mlp;
#ifdef TANDEM_PAIRS
    if (kind_of_inputs(mlp.gate_up.kind) == BF16_PAIRS && mlp.gate_up.gating.has_gates() &&
        !layer.has_sparse_gates) {
        Inputs gated = inputs_of(mlp.down, rows.projected, step.num_rows, rows.rounded);
        gated.added = added_gates(model, rows.lora, index, normed, team);
        gate(mlp.gate_up, normed, gated, team);
        team.wait();
        rows.laps->end(GATE_UP, team.own_thread);
        return gated;
    }
#endif
    const Inputs gated = inputs_of(mlp.down, rows.input, step.num_rows, rows.rounded);
    const size_t width = gate_up_width(mlp);
    const Output projected{rows.projected, width, Into::kSet};
    linear(mlp.gate_up, normed, projected, team);
    team.wait();
    add_lora(rows.lora, index, &LoraLayer::gate_up, normed, projected, team);
    rows.laps->end(GATE_UP, team.own_thread);
    team.each(step.num_rows, [&](int row) {
        float* const gates = rows.projected + row * width;
        if (layer.has_sparse_gates) cut_gates(layer.gate_deviations, mlp.down.in, gates);
        gate_row(gates, mlp.gate_up.gating, gated.row(row));
    });
    rows.laps->end(SILU, team.own_thread);
    return gated;
}

// Returns whether a product adds up an output completely before it writes the output. Other
// products write partial sums. These are added up in a separate buffer, because adding each of them
// to the larger residual stream would lose precision.
inline bool is_one_sum(const Matrix& matrix) {
    return num_input_blocks(matrix.in) == 1 || kind_of_inputs(matrix.kind) == BF16_PAIRS ||
           is_quantized(matrix.kind);
}

inline bool adds_at_once(const Model& model, const Matrix& matrix, const float* post_norm) {
    return post_norm == nullptr && model.residual_multiplier == 1.0f && is_one_sum(matrix);
}

// Computes a product and adds it to the residual stream.
inline void add_product(const Model& model, const Matrix& matrix, const Inputs& inputs,
                        const float* post_norm, Stage stage, const Rows& rows, int index,
                        LoraProduct LoraLayer::*added, const Team& team) {
    const size_t hidden = model.hidden;
    const bool at_once = adds_at_once(model, matrix, post_norm);
    const Output output = at_once ? Output{rows.hidden, hidden, Into::kAdd}
                                  : Output{rows.delta, hidden, Into::kSet};
    linear(matrix, inputs, output, team);
    team.wait();
    add_lora(rows.lora, index, added, inputs, output, team);
    rows.laps->end(stage, team.own_thread);
    if (at_once) return;
    team.each(inputs.num_rows, [&](int row) {
        add_row(rows.delta + row * hidden, post_norm, model, rows.hidden + row * hidden);
    });
    rows.laps->end(NORM, team.own_thread);
}

inline void add_experts(const Model& model, int index, const Step& step, const Rows& rows,
                        const Team& team);

// Normalizes the input rows, and then computes the same as gate_all().
inline Inputs gate_normed(const Model& model, int index, const Step& step, const Rows& rows,
                          const Team& team) {
    const Layer& layer = model.layers[index];
    const Inputs normed = inputs_of(layer.mlp.gate_up, rows.input, step.num_rows, rows.rounded);
    team.each(step.num_rows, [&](int row) {
        norm_hidden(model, rows.hidden + static_cast<size_t>(row) * model.hidden, layer.mlp_norm,
                    normed.row(row));
    });
    rows.laps->end(NORM, team.own_thread);
    return gate_all(model, index, step, normed, rows, team);
}

inline void add_mlp(const Model& model, int index, const Step& step, const Rows& rows,
                    const Team& team) {
    const Layer& layer = model.layers[index];
    const Inputs gated = gate_normed(model, index, step, rows, team);
    add_product(model, layer.mlp.down, gated, layer.mlp_post_norm, DOWN, rows, index,
                &LoraLayer::down, team);
}

// Adds the attention output and the MLP to the residual stream. Both read the stream as it was
// before.
inline void add_parallel(const Model& model, int index, const Step& step, const Inputs& attended,
                         const Rows& rows, const Team& team) {
    const Layer& layer = model.layers[index];
    const size_t hidden = model.hidden;
    const Output delta{rows.delta, hidden, Into::kSet};
    linear(layer.attention_out, attended, delta, team);
    team.wait();
    add_lora(rows.lora, index, &LoraLayer::attention_out, attended, delta, team);
    rows.laps->end(ATTENTION_OUT, team.own_thread);
    const Inputs gated = gate_normed(model, index, step, rows, team);
    team.each(step.num_rows, [&](int row) {
        add_row(rows.delta + row * hidden, nullptr, model, rows.hidden + row * hidden);
    });
    rows.laps->end(NORM, team.own_thread);
    add_product(model, layer.mlp.down, gated, nullptr, DOWN, rows, index, &LoraLayer::down, team);
}

// Computes attention, and returns its outputs and those of the part that has a state.
inline Inputs attend_layer(const Model& model, const Step& step, int index, const Rows& rows,
                           const Items& items, const BlockSums& sums, float* buffer,
                           const Team& team) {
    const Layer& layer = model.layers[index];
    const bool is_latent = layer.latent != nullptr;
    // True: the output of attention is multiplied by other matrices before attention_out.
    const bool has_products = is_latent || layer.shared_kv != nullptr;
    const float* const queries = has_products ? rows.queries : rows.projected;
    const size_t width = has_products ? static_cast<size_t>(model.num_heads) * layer.head_dim
                                      : projected_width(model, layer);
    Inputs attended =
        has_products ? attended_latents(model, layer, step, rows)
                     : inputs_of(layer.attention_out, rows.attended, step.num_rows, rows.rounded);
    if (layer.has_attention) {
        choose_keys(model, step, index, rows, buffer, team);
        for (const std::vector<Item>* each : {&items.items, &items.merges}) {
            const size_t num = each->size();
            if (num == 0) continue;
            team.each_in_turn(num, [&](size_t i) {
                const Item& next = (*each)[i + team.threads < num ? i + team.threads : i];
                attend_any(model, step, index, (*each)[i], next, queries, width, attended, sums,
                           buffer);
            });
        }
        sums.add_heads(team);
        if (layer.num_gates > 0) gate_attended(model, layer, rows, attended, team);
        rows.laps->end(ATTENTION, team.own_thread);
    }
    if (is_latent) attended = values_of_heads(model, index, step, rows, buffer, team);
    if (layer.shared_kv != nullptr)
        attended = products_of_groups(model, index, step, rows, buffer, team);
    return attended;
}

// Computes attention and the MLP or experts, and adds them to the residual stream.
inline void finish_layer(const Model& model, const Step& step, int index, const Rows& rows,
                         const Items& items, const BlockSums& sums, float* buffer,
                         const Team& team) {
    const Layer& layer = model.layers[index];
    if (layer.has_attention || layer.state != nullptr) {
        const Inputs attended = attend_layer(model, step, index, rows, items, sums, buffer, team);
        if (model.is_parallel) return add_parallel(model, index, step, attended, rows, team);
        if (layer.streams != nullptr) clear_hidden(model, step, rows, team);
        add_product(model, layer.attention_out, attended, layer.attention_post_norm, ATTENTION_OUT,
                    rows, index, &LoraLayer::attention_out, team);
        add_laurel(model, index, step, rows, team);
        if (layer.streams != nullptr) {
            add_to_streams(model, layer.streams->attention, step, rows, team);
            collapse_streams(model, layer.streams->mlp, step, rows, team);
        }
    }
    if (!layer.has_mlp) return;
    if (layer.experts != nullptr)
        add_experts(model, index, step, rows, team);
    else
        add_mlp(model, index, step, rows, team);
    if (layer.streams != nullptr) add_to_streams(model, layer.streams->mlp, step, rows, team);
    correct_copies(model, index, step, rows, team);
    if (layer.input != nullptr) add_layer_input(model, index, step, rows, team);
    scale_hidden(model, layer.scalar, step, rows, team);
}

// Returns the experts of the first layer that has experts; null if there is none. The experts of
// all layers have the same shape.
inline const Experts* experts_of(const Model& model) {
    for (int index = 0; index < model.num_layers; ++index)
        if (model.layers[index].experts != nullptr) return model.layers[index].experts;
    return nullptr;
}

inline Rows rows_of(const Model& model, const Step& step,
                    const std::vector<ScoreBatch>& batches, Scratch& scratch) {
    const size_t rows = step.num_rows;
    int heads = 0, attended = 0, laurel = 0, narrow = 0;
    for (int index = 0; index < model.num_layers; ++index) {
        const Layer& layer = model.layers[index];
        heads = std::max(heads, static_cast<int>(projected_width(model, layer)));
        attended = std::max({attended, layer.attention_out.in, model.num_heads * layer.head_dim});
        if (layer.state != nullptr)
            narrow = std::max({narrow, layer.state->decay_out.in, layer.state->gate_out.in});
        if (layer.alt_up != nullptr) laurel = std::max(laurel, layer.alt_up->left.out);
        if (layer.compressor != nullptr) heads = std::max(heads, layer.compressor->inputs.out);
    }
    const int of_layer = model.layer_inputs == nullptr ? 0 : model.layer_inputs->size;
    const int inner = std::max({model.inner, of_layer, laurel}), hidden = model.hidden;
    for (Buffer& buffer : scratch.of_thread) buffer.of(attention_floats(model, step));
    const LatentFloats latent(model, rows);
    const SharedKvFloats shared(model, rows);
    const StreamFloats streams(model, rows);
    size_t projected =
        std::max(rows * std::max({heads, 2 * inner, whole_steps(inner)}), latent.projected);
    size_t routed = 0, logits = 0;
    Routing routing{};
    size_t rounded = quantized_input_floats(rows, std::max({inner, hidden, heads, attended}));
    const Experts* const experts = experts_of(model);
    if (experts != nullptr) {
        const size_t places = rows * experts->top_k;
        const Mlp& mlp = experts->mlps[0];
        const int gates = std::max(mlp.gate_up.out, 2 * mlp.down.in);
        projected = std::max(projected, places * std::max(gates, whole_steps(hidden)));
        projected = std::max(projected, input_floats(places, mlp.down.in));
        routed = input_floats(places, std::max(hidden, mlp.down.in));
        rounded = std::max(rounded, quantized_input_floats(places, std::max(hidden, mlp.down.in)));
        logits = 3 * rows * experts->num;
        routing = {reinterpret_cast<Chosen*>(scratch.chosen.of(places * (sizeof(Chosen) / 4))),
                   reinterpret_cast<int32_t*>(scratch.choices.of(places)),
                   reinterpret_cast<int32_t*>(scratch.first.of(experts->num + 1))};
    }
    rounded = std::max(rounded, scratch.expanded_floats * model.num_threads * scratch.ranks.num);
    const IndexFloats index(model, rows, batches);
    float* const of_index = scratch.index.of(index.queries + index.keys + index.weights);
    const int num_copies = model.alt_up != nullptr    ? model.alt_up->num
                           : model.streams != nullptr ? model.streams->num
                                                      : 0;
    return {scratch.hidden.of(rows * hidden),
            scratch.input.of(
                std::max({input_floats(rows, std::max({inner, hidden, narrow})), latent.input,
                          shared.input, streams.input})),
            scratch.projected.of(projected),
            scratch.attended.of(
                std::max(input_floats(rows, attended), latent.attended)),
            scratch.delta.of(rows * hidden),
            scratch.rounded.of(rounded),
            scratch.routed.of(routed),
            scratch.logits.of(logits),
            scratch.heads.of(std::max(latent.heads, shared.heads)),
            scratch.queries.of(std::max(latent.queries, shared.queries)),
            scratch.of_heads.of(std::max(latent.of_heads, shared.of_heads)),
            routing,
            &scratch.laps,
            lora_of(model, step, scratch),
            nullptr,
            0,
            layer_inputs_of(model, step, scratch),
            of_index,
            of_index + index.queries,
            of_index + index.queries + index.keys,
            scratch.scores.of(index.scores),
            reinterpret_cast<int32_t*>(scratch.choice.of(index.choice)),
            &batches,
            scratch.copies.of(rows * num_copies * hidden),
            scratch.mixtures.of(streams.mixtures)};
}

inline void to_last_kv(const Model& model, const Step& step, Scratch& scratch) {
    const std::vector<ScoreBatch> batches = score_batches(model, step);
    Rows rows = rows_of(model, step, batches, scratch);
    const std::vector<StateSpan> state_spans = state_spans_of(model, step);
    rows.state_spans = state_spans.data();
    rows.num_state_spans = static_cast<int>(state_spans.size());
    const LayerItems items(model, step, model.num_layers - 1, rows.choice, scratch);
    const BlockSums sums = block_sums_of(model, step, scratch, true);
    scratch.laps.start();
#pragma omp parallel num_threads(model.num_threads)
    {
        const TilesInUse tiles;
        const Team team = scratch.team(omp_get_thread_num(), omp_get_num_threads());
        float* buffer = scratch.of_thread[team.own_thread].of(attention_floats(model, step));
        embed_all(model, step, rows.hidden, team);
        if (model.layer_inputs != nullptr) compute_layer_inputs(model, step, rows, team);
        if (model.alt_up != nullptr)
            multiply_copies(model, model.alt_up->make, step, rows, false, team);
        if (model.streams != nullptr) start_streams(model, step, rows, team);
        rows.laps->end(EMBED, team.own_thread);
        for (int index = 0; index < model.num_layers; ++index) {
            predict_copies(model, index, step, rows, team);
            if (model.streams != nullptr)
                collapse_streams(model, model.layers[index].streams->attention, step, rows, team);
            store_kv(model, step, index, rows, team);
            if (index + 1 < model.num_layers)
                finish_layer(model, step, index, rows, items.of(model.layers[index]), sums, buffer,
                             team);
        }
        scratch.leave(team);
    }
}

// Finds the largest of the logits from `first` to before `end`, and its lowest token id. Computes
// the maximum first, and then searches the first logit that equals the maximum. A NaN counts as the
// largest number, as in numpy.
inline Largest largest_of(const float* logits, int first, int end) {
    constexpr int kAtOnce = 32 * kPanel;
    Largest best{-INFINITY, first};
    for (int at = first; at < end; at += kAtOnce) {
        const int num = std::min(end - at, kAtOnce);
        Floats parts[kVectors];
        Ints nans[kVectors] = {};
        for (Floats& part : parts) part = all(-INFINITY);
        int i = 0;
        for (; i + kPanel <= num; i += kPanel)
            for (int v = 0; v < kVectors; ++v) {
                const Floats some = load(logits + at + i + v * kLanes);
                parts[v] = max(parts[v], some);
                nans[v] |= some != some;
            }
        float here = largest(parts);
        bool has_nan = false;
        for (int v = 0; v < kVectors; ++v)
            for (int lane = 0; lane < kLanes; ++lane) has_nan |= nans[v][lane] != 0;
        for (; i < num; ++i) {
            here = std::max(here, logits[at + i]);
            has_nan |= std::isnan(logits[at + i]);
        }
        if (has_nan) {
            const float* const found = std::find_if(logits + at, logits + end,
                                                    [](float logit) { return std::isnan(logit); });
            return {NAN, static_cast<int32_t>(found - logits)};
        }
        if (here > best.logit) best = {here, at};
    }
    const float* found = std::find(logits + best.token, logits + end, best.logit);
    return {best.logit, found < logits + end ? static_cast<int32_t>(found - logits) : first};
}

// Each thread has found the largest logit of its part of the vocabulary: `of_threads` [threads, logit
// rows]. Combines these results to the most likely token of each row.
inline void find_most_likely(const Step& step, const Largest* of_threads, size_t num_threads) {
    const size_t num_rows = step.num_logit_rows;
    for (size_t row = 0; row < num_rows; ++row) {
        Largest best = of_threads[row];
        for (size_t at = row; at < num_threads * num_rows && !std::isnan(best.logit); at += num_rows)
            if (!(of_threads[at].logit <= best.logit)) best = of_threads[at];
        step.most_likely[row] = best.token;
    }
}

// Applies the model's multiplier and cap, cap * tanh(logit / cap), to some logits.
inline void finish_logits(const Model& model, float* logits, int first, int end) {
    if (model.logits_multiplier != 1.0f)
        for (int i = first; i < end; ++i) logits[i] *= model.logits_multiplier;
    if (model.logit_cap > 0.0f)
        for (int i = first; i < end; ++i)
            logits[i] = std::tanh(logits[i] / model.logit_cap) * model.logit_cap;
}

inline void to_logits(const Model& model, const Step& step, Scratch& scratch) {
    const std::vector<ScoreBatch> batches = score_batches(model, step);
    const Rows rows = rows_of(model, step, batches, scratch);
    const Items items =
        items_of(model, step, model.layers[model.num_layers - 1], rows.choice, scratch);
    const BlockSums sums = block_sums_of(model, step, scratch, false);
    const Inputs last = inputs_of(
        model.output, scratch.last.of(input_floats(step.num_logit_rows, model.hidden)),
        step.num_logit_rows, rows.rounded);
    const size_t num_threads = static_cast<size_t>(model.num_threads) * scratch.ranks.num;
    Largest* const largest = reinterpret_cast<Largest*>(
        scratch.largest.of(num_threads * step.num_logit_rows * (sizeof(Largest) / 4)));
    scratch.laps.start();
#pragma omp parallel num_threads(model.num_threads)
    {
        const TilesInUse tiles;
        const Team team = scratch.team(omp_get_thread_num(), omp_get_num_threads());
        float* buffer = scratch.of_thread[team.own_thread].of(attention_floats(model, step));
        finish_layer(model, step, model.num_layers - 1, rows, items, sums, buffer, team);
        if (model.alt_up != nullptr)
            multiply_copies(model, model.alt_up->merge, step, rows, true, team);
        if (model.streams != nullptr)
            collapse_streams(model, model.streams->head, step, rows, team);
        team.each(step.num_logit_rows, [&](int i) {
            norm_hidden(model, rows.hidden + static_cast<size_t>(step.logit_rows[i]) * model.hidden,
                        model.final_norm, last.row(i));
        });
        rows.laps->end(NORM, team.own_thread);
        linear(model.output, last, {step.logits, static_cast<size_t>(model.vocab), Into::kSet},
               team);
        const auto [first, end] = share_of(model.output, team);
        const int end_output = std::min(end * kPanel, model.vocab);
        for (int i = 0; i < step.num_logit_rows; ++i) {
            float* logits = step.logits + static_cast<size_t>(i) * model.vocab;
            finish_logits(model, logits, first * kPanel, end_output);
            largest[static_cast<size_t>(team.thread) * step.num_logit_rows + i] =
                largest_of(logits, first * kPanel, end_output);
        }
        scratch.leave(team);
    }
    rows.laps->end(OUTPUT, 0);
    if (scratch.ranks.rank != 0) return;
    sums.add_queries();
    find_most_likely(step, largest, num_threads);
}

}  // namespace tandem::TANDEM_ISA
