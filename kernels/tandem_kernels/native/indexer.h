// The indexers of sparse attention (tandem/models/config/indexer.py). A layer with an indexer
// computes three things in addition:
//
// 1. With the layer's KV: an index key for each token, which is stored in the pool, and for each
//    token several queries and, if tokens are chosen, as many weights.
// 2. Scores of the keys before each query that sees more keys than are chosen. If tokens are chosen:
//
//        score(s) = sum over heads h of weight[h] * relu(query[h] . key[s])
//
//    If blocks are chosen, each head chooses for one KV head, and the score of a block is the highest
//    query[h] . key[s] of its keys that the query sees.
// 3. The tokens or blocks with the highest scores, in ascending order of positions. Of equal scores,
//    those at lower positions are chosen. attention.h reads only the chosen keys.
//
// If the layer has a compressor, the keys are the entries that it has made for the indexer
// (compressor.h), and the indexer chooses entries. `rate` is then the number of tokens of an entry.
//
// The scores of all queries may not fit in memory, so queries are computed in batches. The threads
// take parts of the keys of some queries. The bits of a score depend on its query and key only.

namespace tandem::TANDEM_ISA {

constexpr int kScoredKeys = 1024;          // keys of a work item, rounded up to whole blocks
constexpr int kScoredQueries = 16;         // largest number of queries of a work item
constexpr size_t kScoresMax = 4 << 20;     // numbers that a batch may have, unless it has one query

// Returns the number of choices for a query.
inline int num_choices(const Indexer& indexer) {
    return indexer.head_weights.out > 0 ? 1 : indexer.num_heads;
}

// Returns the number of the span's queries that see no more keys than the layer's indexer chooses.
// They come first. They attend to all keys.
inline int num_unchosen(const Span& span, const Layer& layer) {
    if (layer.indexer == nullptr) return span.num_queries;
    const Indexer& indexer = *layer.indexer;
    // A query at position p sees (p + 1) / rate keys.
    const int64_t most = static_cast<int64_t>(indexer.top_k) * indexer.choice_size;
    const int64_t end = (most + 1) * indexer.rate - 1;
    const int before = span.context_len - span.num_queries;
    return static_cast<int>(std::clamp<int64_t>(end - before, 0, span.num_queries));
}

// Returns the keys that are chosen for a query and a KV head. `choice` is that of Rows. The first
// indexer of the model has the sizes of all others.
inline KeyChoice choice_of(const Indexer& indexer, int32_t* choice, int row, int head) {
    const int num = num_choices(indexer);
    const size_t number = static_cast<size_t>(row) * num + (num == 1 ? 0 : head);
    return {choice + number * indexer.top_k, indexer.top_k, indexer.choice_size};
}

// Consecutive queries of a span, and some of the keys that they see.
struct ScoreItem {
    int span, first_query, num_queries, first_key, end_key;
    size_t first_score;  // index of the first score of the first query
};

// A query of which keys are chosen. Its scores are [choices][blocks of the span's context].
struct ChoosingQuery {
    int span, query;
    size_t first_score;
};

struct ScoreBatch {
    std::vector<ScoreItem> items;
    std::vector<ChoosingQuery> queries;
    size_t num_scores = 0;
};

inline int num_blocks(int num_keys, const Indexer& indexer) {
    return (num_keys + indexer.choice_size - 1) / indexer.choice_size;
}

// Returns the number of scores of a query for one choice. All queries of a span have as many.
inline size_t num_scores(const Span& span, const Indexer& indexer) {
    return num_blocks(span.context_len / indexer.rate, indexer);
}

// Returns the number of the indexer's keys that a query sees.
inline int num_seen(const Span& span, int query, const Indexer& indexer) {
    return keys_seen(span, query, 0).end / indexer.rate;
}

// Adds queries of a span to a batch.
inline void add_queries(const Step& step, const Indexer& indexer, int span, int first, int num,
                        ScoreBatch& batch) {
    const Span& of = step.spans[span];
    const size_t of_query = num_choices(indexer) * num_scores(of, indexer);
    const int num_keys = num_seen(of, first + num - 1, indexer);
    const int each = num_blocks(kScoredKeys, indexer) * indexer.choice_size;
    for (int key = 0; key < num_keys; key += each)
        batch.items.push_back(
            {span, first, num, key, std::min(key + each, num_keys), batch.num_scores});
    for (int i = 0; i < num; ++i, batch.num_scores += of_query)
        batch.queries.push_back({span, first + i, batch.num_scores});
}

// Divides the queries of which keys are chosen into batches. The batches are those of all indexers
// of the model, because all have the same sizes.
inline std::vector<ScoreBatch> score_batches(const Model& model, const Step& step) {
    std::vector<ScoreBatch> batches;
    const Layer* const end = model.layers + model.num_layers;
    const Layer* const layer = std::find_if(
        model.layers, end, [](const Layer& each) { return each.indexer != nullptr; });
    if (layer == end) return batches;
    const Indexer& indexer = *layer->indexer;
    for (int index = 0; index < step.num_spans; ++index) {
        const Span& span = step.spans[index];
        const size_t of_query = num_choices(indexer) * num_scores(span, indexer);
        for (int query = num_unchosen(span, *layer), num; query < span.num_queries; query += num) {
            if (batches.empty() || batches.back().num_scores + of_query > kScoresMax)
                batches.emplace_back();
            const size_t room = (kScoresMax - std::min(batches.back().num_scores, kScoresMax)) / of_query;
            const int most = static_cast<int>(std::clamp<size_t>(room, 1, kScoredQueries));
            num = std::min(most, span.num_queries - query);
            add_queries(step, indexer, index, query, num, batches.back());
        }
    }
    return batches;
}

// The place of an indexer's key in the pool.
template <class T>
inline T* index_key(const Step& step, const Layer& layer, size_t block, size_t offset) {
    const KvGroup& group = step.group_of(layer);
    const size_t dim = layer.indexer->dim;
    char* const keys = static_cast<char*>(group.kv) + block * group.block_bytes +
                       layer.num_kv_heads * group.head_bytes;
    return reinterpret_cast<T*>(keys) +
           (static_cast<size_t>(layer.indexer->place) * step.block_size + offset) * dim;
}

// Normalizes an indexer's key [dim]: LayerNorm with a bias, or RMSNorm.
inline void norm_index_key(const Indexer& indexer, float* key) {
    const int dim = indexer.dim;
    if (indexer.key_bias == nullptr)
        return norm_head(key, indexer.key_norm, dim, indexer.key_norm_eps);
    float total = 0.0f, squares = 0.0f;
    for (int i = 0; i < dim; ++i) total += key[i];
    const float mean = total / dim;
    for (int i = 0; i < dim; ++i) squares = fused(key[i] - mean, key[i] - mean, squares);
    const float scale = 1.0f / std::sqrt(squares / dim + indexer.key_norm_eps);
    for (int i = 0; i < dim; ++i)
        key[i] = fused((key[i] - mean) * scale, indexer.key_norm[i], indexer.key_bias[i]);
}

// Computes the queries, keys and weights of a layer's indexer, and stores the keys in the pool. The
// latents of the queries are in `projected`, if the model has them.
inline void place_index(const Model& model, const Step& step, int index, const Rows& rows,
                        const Team& team) {
    const Layer& layer = model.layers[index];
    if (layer.indexer == nullptr || layer.shares_choice) return;
    const Indexer& indexer = *layer.indexer;
    const Latent* const latent = layer.latent;
    const SharedKv* const shared = layer.shared_kv;
    const bool has_own_keys = indexer.keys.out > 0;
    const auto multiply = [&](const Matrix& matrix, bool is_of_latents, float* to) {
        const Inputs inputs = inputs_of(matrix, rows.input, step.num_rows, rows.rounded);
        team.each(step.num_rows, [&](int row) {
            if (is_of_latents)
                norm_row(rows.projected + static_cast<size_t>(row) * layer.qkv.out,
                         shared == nullptr ? latent->q_norm : shared->q_norm,
                         shared == nullptr ? latent->norm_eps : model.norm_eps, inputs.row(row));
            else
                norm_hidden(model, rows.hidden + static_cast<size_t>(row) * model.hidden,
                            layer.attention_norm, inputs.row(row));
        });
        linear(matrix, inputs, {to, static_cast<size_t>(matrix.out), Into::kSet}, team);
        team.wait();
    };
    if (has_own_keys) multiply(indexer.keys, false, rows.index_keys);
    multiply(indexer.queries, latent != nullptr || shared != nullptr, rows.index_queries);
    if (indexer.head_weights.out > 0) multiply(indexer.head_weights, false, rows.index_weights);
    rows.laps->end(QKV, team.own_thread);
    const int dim = indexer.dim, rounded = rounded_dim(indexer);
    const int rope_dim = latent != nullptr ? latent->rope
                                           : shared != nullptr ? shared->rope : layer.head_dim;
    team.each(step.num_rows, [&](int row) {
        const size_t angle = layer.rope * step.table_floats +
                             static_cast<size_t>(step.positions[row]) * (rope_dim / 2);
        const auto turn = [&](float* head) {
            if (shared != nullptr)
                return rotate_last_pairs(head, dim, step.cosines + angle, step.sines + angle,
                                         shared->rope, 1.0f);
            rotate(head, step.cosines + angle, step.sines + angle, indexer.rope, 1.0f, head);
        };
        float* query = rows.index_queries + static_cast<size_t>(row) * indexer.queries.out;
        for (int head = 0; head < indexer.num_heads; ++head, query += rounded) {
            if (indexer.query_norm != nullptr)
                norm_head(query, indexer.query_norm, dim, model.norm_eps);
            turn(query);
        }
        if (!has_own_keys) return;
        float* const key = rows.index_keys + static_cast<size_t>(row) * dim;
        norm_index_key(indexer, key);
        turn(key);
        const size_t slot = step.group_of(layer).slots[row];
        by_kv_kind(step, [&](auto kept) {
            typedef decltype(kept) T;
            if constexpr (!kHasScales<T> && !kIsLatent<T>) {
                T* const to = index_key<T>(step, layer, slot / step.block_size,
                                           slot % step.block_size);
                for (int i = 0; i < dim; i += kLanes) {
                    const int num = std::min(kLanes, dim - i);
                    store_some(to + i, load_some(key + i, num), num);
                }
            }
        });
    });
    rows.laps->end(PLACE, team.own_thread);
}

// Computes scores[m][num_keys] = queries[m] . keys for `num_rows` rows, at most MR. Rows of scores
// are kScoreRow numbers apart.
template <class T, int MR>
void score_queries(int num_rows, const float* queries, const uint32_t* keys, int dim, int num_keys,
                   float* scores) {
    if constexpr (MR > 0) {
        if (num_rows != MR)
            return score_queries<T, MR - 1>(num_rows, queries, keys, dim, num_keys, scores);
        score_rows<T, MR>(queries, dim, keys, dim, num_keys, scores);
    }
}

// Computes the scores of a work item. `buffer` is the thread's.
template <class T>
void score_item(const Step& step, const Layer& layer, const ScoreItem& item, const Rows& rows,
                float* buffer) {
    const Indexer& indexer = *layer.indexer;
    const Span& span = step.spans[item.span];
    const int32_t* const table = step.group_of(layer).block_tables + span.first_table_entry;
    const int dim = indexer.dim, rounded = rounded_dim(indexer), num_heads = indexer.num_heads;
    const int blocks = num_scores(span, indexer), size = indexer.choice_size;
    const EntryRows<T> entries =
        indexer.keys.out > 0 ? EntryRows<T>{} : EntryRows<T>{step, *layer.compressor, span, 1};
    const bool is_of_tokens = indexer.head_weights.out > 0;
    uint32_t* const turned = reinterpret_cast<uint32_t*>(buffer);
    T* const padded = reinterpret_cast<T*>(buffer + static_cast<size_t>(kKeys) * rounded);
    float* const products = buffer + 2 * static_cast<size_t>(kKeys) * rounded;
    if (dim < rounded) std::memset(padded, 0, sizeof(T) * kKeys * rounded);
    const auto scores_of = [&](int i) {
        return rows.scores + item.first_score +
               static_cast<size_t>(i) * (is_of_tokens ? 1 : num_heads) * blocks;
    };
    if (!is_of_tokens)
        for (int i = 0; i < item.num_queries; ++i)
            for (int head = 0; head < num_heads; ++head)
                std::fill(scores_of(i) + head * blocks + item.first_key / size,
                          scores_of(i) + head * blocks + num_blocks(item.end_key, indexer),
                          -INFINITY);
    for (int first = item.first_key; first < item.end_key; first += kKeys) {
        const int num = std::min(kKeys, item.end_key - first);
        const int num_turned = (num + kPanel - 1) / kPanel * kPanel;
        const T* keys[kKeys];
        for (int i = 0; i < num; ++i) {
            const int key = first + i;
            keys[i] = entries.rate > 0 ? entries.row(key)
                                       : index_key<T>(step, layer, table[key / step.block_size],
                                                      key % step.block_size);
            if (dim == rounded) continue;
            keys[i] = static_cast<T*>(std::memcpy(padded + i * rounded, keys[i], sizeof(T) * dim));
        }
        std::fill(keys + num, keys + num_turned, keys[0]);
        transpose(keys, 0, num_turned, rounded, turned);
        for (int i = 0; i < item.num_queries; ++i) {
            const int query = item.first_query + i;
            const int seen = std::min(num_seen(span, query, indexer) - first, num);
            if (seen <= 0) continue;
            const size_t row = span.first_row + query;
            const float* const queries = rows.index_queries + row * indexer.queries.out;
            alignas(64) float sums[kKeys] = {};
            for (int head = 0; head < num_heads; head += kTileRows) {
                const int num_rows = std::min(kTileRows, num_heads - head);
                score_queries<T, kTileRows>(num_rows, queries + head * rounded, turned, rounded,
                                            num_turned, products);
                for (int m = 0; m < num_rows; ++m) {
                    const float* const of_head = products + m * kScoreRow;
                    if (is_of_tokens) {
                        const float weight = rows.index_weights[row * num_heads + head + m];
                        for (int key = 0; key < num_turned; key += kLanes)
                            store(sums + key, fused(max(load(of_head + key), Floats{}), weight,
                                                    load(sums + key)));
                        continue;
                    }
                    float* const to = scores_of(i) + (head + m) * blocks;
                    for (int key = 0; key < seen; ++key) {
                        float& highest = to[(first + key) / size];
                        if (of_head[key] > highest) highest = of_head[key];
                    }
                }
            }
            if (is_of_tokens) std::memcpy(scores_of(i) + first, sums, seen * sizeof(float));
        }
    }
}

// Returns a number that is higher for a higher score, and equal for 0 and -0.
inline uint32_t rank_of(float score) {
    score += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

// Writes the indices of the `top` highest of `num` scores in ascending order. Of equal scores, those
// with lower indices are taken. `top` is at most `num`.
inline void take_highest(const float* scores, int num, int top, int32_t* to) {
    // Finds the lowest rank that is taken, 8 bits after the other. `rest` is then the number of
    // scores of this rank that are taken.
    uint32_t lowest = 0, known = 0;
    int rest = top;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int counts[256] = {};
        for (int i = 0; i < num; ++i) {
            const uint32_t rank = rank_of(scores[i]);
            if ((rank & known) == lowest) ++counts[rank >> shift & 255];
        }
        uint32_t digit = 255;
        for (; counts[digit] < rest; --digit) rest -= counts[digit];
        lowest |= digit << shift;
        known |= 255u << shift;
    }
    for (int i = 0; i < num; ++i) {
        const uint32_t rank = rank_of(scores[i]);
        if (rank > lowest || (rank == lowest && rest-- > 0)) *to++ = i;
    }
}

// Chooses the keys of a query for one KV head, or for all of them.
inline void choose_of_query(const Step& step, const Indexer& indexer, const ChoosingQuery& query,
                            int number, const Rows& rows) {
    const Span& span = step.spans[query.span];
    float* const scores =
        rows.scores + query.first_score + number * num_scores(span, indexer);
    const int num = num_blocks(num_seen(span, query.query, indexer), indexer);
    std::fill(scores + std::max(num - indexer.num_local, 0), scores + num, INFINITY);
    const KeyChoice choice =
        choice_of(indexer, rows.choice, span.first_row + query.query, number);
    take_highest(scores, num, choice.num, const_cast<int32_t*>(choice.blocks));
}

// Chooses the keys of all queries in a layer with an indexer of its own.
inline void choose_keys(const Model& model, const Step& step, int index, const Rows& rows,
                        float* buffer, const Team& team) {
    const Layer& layer = model.layers[index];
    if (layer.indexer == nullptr || layer.shares_choice) return;
    const Indexer& indexer = *layer.indexer;
    const int num = num_choices(indexer);
    for (const ScoreBatch& batch : *rows.batches) {
        team.each_in_turn(batch.items.size(), [&](size_t i) {
            by_kv_kind(step, [&](auto kept) {
                typedef decltype(kept) T;
                if constexpr (!kHasScales<T> && !kIsLatent<T>)
                    score_item<T>(step, layer, batch.items[i], rows, buffer);
            });
        });
        team.each_in_turn(batch.queries.size() * num, [&](size_t i) {
            choose_of_query(step, indexer, batch.queries[i / num], i % num, rows);
        });
    }
    rows.laps->end(ATTENTION, team.own_thread);
}

// Sizes of a step's buffers, in floats; 0 without indexers.
struct IndexFloats {
    size_t queries = 0, keys = 0, weights = 0, scores = 0, choice = 0;

    IndexFloats(const Model& model, size_t num_rows, const std::vector<ScoreBatch>& batches) {
        for (int index = 0; index < model.num_layers; ++index) {
            const Indexer* const indexer = model.layers[index].indexer;
            if (indexer == nullptr) continue;
            // Rounded up, so that each part begins at a cache line.
            const size_t rounded_rows = (num_rows + kPanel - 1) / kPanel * kPanel;
            queries = rounded_rows * indexer->queries.out;
            keys = indexer->keys.out == 0 ? 0 : rounded_rows * indexer->dim;
            weights = rounded_rows * indexer->head_weights.out;
            choice = num_rows * num_choices(*indexer) * indexer->top_k;
        }
        for (const ScoreBatch& batch : batches) scores = std::max(scores, batch.num_scores);
    }
};

}  // namespace tandem::TANDEM_ISA
