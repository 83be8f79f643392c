// The kernels of layers with a state, for one instruction set. See state.h.

namespace tandem::TANDEM_ISA {

// Computes log(1 + exp(x)) with a relative error of about 3 ulp.
//
//     softplus(x) = max(x, 0) + log(1 + u)    with u = exp(-|x|)
//     log(1 + u) = 2 atanh(s)                 with s = u / (2 + u), at most 1/3
inline Floats softplus(Floats x) {
    const Floats above = max(x, Floats{});
    const Floats u = exp(x - 2.0f * above);
    const Floats s = u / (u + 2.0f), square = s * s;
    Floats series = fused(square, 1.0f / 15, 1.0f / 13);
    series = fused(series, square, 1.0f / 11);
    series = fused(series, square, 1.0f / 9);
    series = fused(series, square, 1.0f / 7);
    series = fused(series, square, 1.0f / 5);
    series = fused(series, square, 1.0f / 3);
    series = fused(series, square, 1.0f);
    return fused(2.0f * s, series, above);
}

// Calls work(at, num, load) for the parts of a row, which has `size` numbers.
template <class Work>
inline void each_part(int size, Work work) {
    int at = 0;
    for (; at + kLanes <= size; at += kLanes)
        work(at, kLanes, [](const float* from) { return load(from); });
    if (const int rest = size - at)
        work(at, rest, [rest](const float* from) { return load_some(from, rest); });
}

constexpr int kConvolvedAtOnce = 512;  // channels

// Convolves some channels of a span. The inputs before a row are in a ring, because the output may
// replace the inputs. kTaps is the number of taps, or 0 if it is not known to the compiler.
template <int kTaps>
void convolve_channels(const Convolution& c, const StateSpan& span, int first, int num) {
    constexpr int kWidth = kConvolvedAtOnce;
    alignas(64) float ring[(kTapsMax - 1) * kWidth];
    const int num_before = (kTaps > 0 ? kTaps : c.num_taps) - 1;
    float* const states = c.states + span.slot * c.slot_stride;
    const auto each_run = [&](auto work) {  // a run of channels that are contiguous in the states
        for (int at = first; at < first + num;) {
            const int group = at / c.group_size, inside = at % c.group_size;
            const int run = std::min(first + num - at, c.group_size - inside);
            work(states + group * c.group_stride + inside, at - first, run * sizeof(float));
            at += run;
        }
    };
    if (span.first_position == 0)
        std::fill(ring, ring + num_before * kWidth, 0.0f);
    else
        each_run([&](const float* state, int at, size_t bytes) {
            for (int i = 0; i < num_before; ++i)
                std::memcpy(ring + i * kWidth + at, state + i * c.tap_stride, bytes);
        });
    for (int row = 0; row < span.num_rows; ++row) {
        const size_t begin = (span.first_row + row) * c.row_stride + first;
        const float* before[kTapsMax - 1];
        for (int i = 0; i < num_before; ++i) before[i] = ring + (row + i) % num_before * kWidth;
        float* const oldest = ring + row % num_before * kWidth;
        each_part(num, [&](int at, int width, auto load_of) {
            const Floats x = load_of(c.x + begin + at);
            Floats sum = c.bias != nullptr ? load_of(c.bias + first + at) : Floats{};
            const float* tap = c.taps + first + at;
            for (int i = 0; i < num_before; ++i, tap += c.num_channels)
                sum = fused(load(before[i] + at), load_of(tap), sum);
            sum = fused(x, load_of(tap), sum);
            store(oldest + at, x);
            if (c.has_silu) sum = sum / (exp(-sum) + 1.0f);
            store_some(c.y + begin + at, sum, width);
        });
    }
    each_run([&](float* state, int at, size_t bytes) {
        for (int i = 0; i < num_before; ++i)
            std::memcpy(state + i * c.tap_stride,
                        ring + (span.num_rows + i) % num_before * kWidth + at, bytes);
    });
}

void convolve(const Convolution& convolution, const Team& team) {
    constexpr int kWidth = kConvolvedAtOnce;
    const int channels = convolution.num_channels, parts = (channels + kWidth - 1) / kWidth;
    team.each_in_turn(static_cast<size_t>(convolution.num_spans) * parts, [&](size_t item) {
        const StateSpan& span = convolution.spans[item / parts];
        const int first = static_cast<int>(item % parts) * kWidth;
        const int num = std::min(kWidth, channels - first);
        if (span.num_rows == 0) return;
        if (convolution.num_taps == 4) return convolve_channels<4>(convolution, span, first, num);
        if (convolution.num_taps == 3) return convolve_channels<3>(convolution, span, first, num);
        convolve_channels<0>(convolution, span, first, num);
    });
}

constexpr int kScannedRows = 64;  // rows whose factors are computed together

// The factors of some rows of one head. In terms of the rows q, k and v in memory:
//
//     y = q_factor (decay S^T q + (q . k) w) + skip v        S = decay S + k w^T
//     Gated DeltaNet:  w = factor (v - read_factor S^T k)    Mamba 2:  w = factor v
//
// With decays by channel, S^T q and S^T k are those of the decayed S, and `decay` is 1.
struct Factors {
    alignas(64) float decay[kScannedRows], factor[kScannedRows], read_factor[kScannedRows];
    alignas(64) float q_factor[kScannedRows], products[kScannedRows];  // products: q . k
};

inline float dot(const float* a, const float* b, int num) {
    Floats parts[kVectors] = {};
    int at = 0;
    for (; at + kPanel <= num; at += kPanel)
        for (int v = 0; v < kVectors; ++v)
            parts[v] = fused(load(a + at + v * kLanes), load(b + at + v * kLanes), parts[v]);
    for (int v = 0; at < num; at += kLanes, ++v) {
        const int rest = std::min(num - at, kLanes);
        parts[v] = fused(load_some(a + at, rest), load_some(b + at, rest), parts[v]);
    }
    return sum(parts);
}

inline void compute_factors(const StateScan& scan, int first_row, int num_rows, int head,
                            Factors& to) {
    const int k_head = head / (scan.num_v_heads / scan.num_k_heads);
    const bool by_channel = scan.decays != nullptr;
    const float rate = -std::exp(scan.a_log[head]);
    alignas(64) float steps[kScannedRows] = {}, betas[kScannedRows] = {};
    for (int i = 0; i < num_rows; ++i) {
        if (!by_channel) steps[i] = *scan.a.of(first_row + i, head) + scan.dt_bias[head];
        if (scan.is_delta) betas[i] = *scan.b.of(first_row + i, head);
    }
    for (int i = 0; i < num_rows; i += kLanes) {
        Floats step = softplus(load(steps + i));
        if (!scan.is_delta) {
            step = max(step < scan.dt_max ? step : all(scan.dt_max), all(scan.dt_min));
            store(to.factor + i, step);
        }
        store(to.decay + i, by_channel ? all(1.0f) : exp(step * rate));
        store(betas + i, scan.rate_max / (exp(-load(betas + i)) + 1.0f));
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(scan.key_dim));
    for (int i = 0; i < num_rows; ++i) {
        const float *q = scan.q.of(first_row + i, k_head), *k = scan.k.of(first_row + i, k_head);
        to.products[i] = dot(q, k, scan.key_dim);
        to.q_factor[i] = 1.0f;
        if (!scan.is_delta) continue;
        constexpr float kEps = 1e-6f;
        const float k_norm = 1.0f / std::sqrt(dot(k, k, scan.key_dim) + kEps);
        to.q_factor[i] = scale / std::sqrt(dot(q, q, scan.key_dim) + kEps);
        to.factor[i] = betas[i] * k_norm;
        to.read_factor[i] = to.decay[i] * k_norm;
    }
}

// Replaces the inputs of the decays of channels by the decays, for all rows of the spans.
inline void compute_decays(const StateScan& scan, const Team& team) {
    const int dim = scan.key_dim;
    team.each_in_turn(static_cast<size_t>(scan.num_spans) * scan.num_v_heads, [&](size_t item) {
        const StateSpan& span = scan.spans[item / scan.num_v_heads];
        const int head = static_cast<int>(item % scan.num_v_heads);
        const float rate = -std::exp(scan.a_log[head]);
        const float* const bias = scan.dt_bias + head * dim;
        for (int row = span.first_row; row < span.first_row + span.num_rows; ++row) {
            float* const decays = scan.decays + row * scan.decay_stride + head * dim;
            each_part(dim, [&](int at, int num, auto load_of) {
                const Floats step = softplus(load_of(decays + at) + load_of(bias + at));
                store_some(decays + at, exp(step * rate), num);
            });
        }
    });
}

// Some columns of a head's state, in memory, and the rows of their sequence.
struct Columns {
    float* state;         // [key_dim][value_dim]: the first column
    const float* values;  // the first column of v in the first row
    int first_row, num_rows, k_head, v_head, first;
    bool begins;  // true: the state before the first row is zero
};

enum class Rule { kDelta, kDeltaByChannel, kMamba2 };

// S^T q and S^T k for some columns.
template <int kNum>
struct Reads {
    Floats of_q[kNum] = {}, of_k[kNum] = {};
};

// Adds a row of the state to the sums over rows. The order of additions is that of the rows.
template <int kNum, Rule kRule>
inline __attribute__((always_inline)) void read_row(const Floats (&row)[kNum], float q, float k,
                                                    Reads<kNum>& reads) {
    for (int v = 0; v < kNum; ++v) {
        reads.of_q[v] = fused(row[v], q, reads.of_q[v]);
        if (kRule != Rule::kMamba2) reads.of_k[v] = fused(row[v], k, reads.of_k[v]);
    }
}

// Changes a row of the state by one row of the sequence. With decays by channel, the row of the
// state was decayed before.
template <int kNum, Rule kRule>
inline __attribute__((always_inline)) void update_row(const float* state, float decay, float k,
                                                      const Floats (&written)[kNum],
                                                      Floats (&row)[kNum]) {
    for (int v = 0; v < kNum; ++v) {
        row[v] = load(state + v * kLanes);
        row[v] = kRule == Rule::kDeltaByChannel ? fused(written[v], k, row[v])
                                                : fused(row[v], decay, written[v] * k);
    }
}

template <int kNum>
inline __attribute__((always_inline)) void store_row(float* state, const Floats (&row)[kNum]) {
    for (int v = 0; v < kNum; ++v) store(state + v * kLanes, row[v]);
}

// Decays a row of the state, if channels have decays of their own, and stores it.
template <int kNum, Rule kRule>
inline __attribute__((always_inline)) void decay_row(float* state, const float* decays, int channel,
                                                     Floats (&row)[kNum]) {
    if (kRule == Rule::kDeltaByChannel)
        for (int v = 0; v < kNum; ++v) row[v] *= decays[channel];
    store_row<kNum>(state, row);
}

// Computes kNum vectors of columns for some rows, whose factors are given. While the state is
// changed by one row, it is read for the next row. With decays by channel, it is then already
// decayed for the next row, too.
template <int kNum, Rule kRule>
void scan_columns(const StateScan& scan, const Columns& c, const Factors& factors) {
    const int key_dim = scan.key_dim;
    const size_t stride = scan.value_dim;
    const auto decays_of = [&](int row) {
        if (kRule != Rule::kDeltaByChannel) return static_cast<const float*>(nullptr);
        return static_cast<const float*>(scan.decays + row * scan.decay_stride +
                                         static_cast<size_t>(c.v_head) * key_dim);
    };
    Reads<kNum> reads;
    if (c.begins) {
        for (int i = 0; i < key_dim; ++i)
            for (int v = 0; v < kNum; ++v) store(c.state + i * stride + v * kLanes, Floats{});
    } else {
        const float *q = scan.q.of(c.first_row, c.k_head), *k = scan.k.of(c.first_row, c.k_head);
        const float* const decays = decays_of(c.first_row);
        for (int i = 0; i < key_dim; ++i) {
            Floats row[kNum];
            for (int v = 0; v < kNum; ++v) row[v] = load(c.state + i * stride + v * kLanes);
            if (kRule == Rule::kDeltaByChannel)
                decay_row<kNum, kRule>(c.state + i * stride, decays, i, row);
            read_row<kNum, kRule>(row, q[i], k[i], reads);
        }
    }
    for (int t = 0; t < c.num_rows; ++t) {
        const int at = c.first_row + t;
        const float* value = c.values + t * scan.v.row_stride;
        float* y = scan.y + at * scan.y_stride + c.v_head * static_cast<size_t>(scan.value_dim) +
                   c.first;
        const float decay = factors.decay[t];
        Floats written[kNum];
        for (int v = 0; v < kNum; ++v) {
            const Floats x = load(value + v * kLanes);
            written[v] = x;
            if (kRule != Rule::kMamba2)
                written[v] = fused(-reads.of_k[v], factors.read_factor[t], written[v]);
            written[v] *= factors.factor[t];
            const Floats out = fused(reads.of_q[v], decay, written[v] * factors.products[t]);
            const float q_factor = factors.q_factor[t];
            store(y + v * kLanes, kRule == Rule::kMamba2
                                      ? fused(out, q_factor, x * scan.skip[c.v_head])
                                      : out * q_factor);
        }
        const float* k = scan.k.of(at, c.k_head);
        if (t + 1 < c.num_rows) {
            const float *next_q = scan.q.of(at + 1, c.k_head), *next_k = scan.k.of(at + 1, c.k_head);
            const float* const next_decays = decays_of(at + 1);
            reads = Reads<kNum>{};
            for (int i = 0; i < key_dim; ++i) {
                Floats row[kNum];
                update_row<kNum, kRule>(c.state + i * stride, decay, k[i], written, row);
                decay_row<kNum, kRule>(c.state + i * stride, next_decays, i, row);
                read_row<kNum, kRule>(row, next_q[i], next_k[i], reads);
            }
        } else {
            for (int i = 0; i < key_dim; ++i) {
                Floats row[kNum];
                update_row<kNum, kRule>(c.state + i * stride, decay, k[i], written, row);
                store_row<kNum>(c.state + i * stride, row);
            }
        }
    }
}

constexpr int kColumnVectors = 4;

// Computes the columns from `first` to before `end` of a head for a span.
template <Rule kRule>
void scan_head(const StateScan& scan, const StateSpan& span, int head, int first, int end) {
    float* const state =
        scan.states + span.slot * scan.slot_stride + head * scan.head_stride;
    const int num_shared = scan.num_v_heads / scan.num_k_heads;
    const float* const values = scan.v.of(span.first_row, head % num_shared) +
                                head / num_shared * scan.v_group_stride;
    Factors factors;
    for (int row = 0; row < span.num_rows; row += kScannedRows) {
        Columns c{nullptr, nullptr, span.first_row + row,
                  std::min(kScannedRows, span.num_rows - row), head / num_shared, head, 0,
                  span.first_position + row == 0};
        compute_factors(scan, c.first_row, c.num_rows, head, factors);
        for (c.first = first; c.first < end;) {
            c.state = state + c.first;
            c.values = values + row * scan.v.row_stride + c.first;
            if (c.first + kColumnVectors * kLanes <= end) {
                scan_columns<kColumnVectors, kRule>(scan, c, factors);
                c.first += kColumnVectors * kLanes;
            } else {
                scan_columns<1, kRule>(scan, c, factors);
                c.first += kLanes;
            }
        }
    }
}

void scan_states(const StateScan& scan, const Team& team) {
    if (scan.decays != nullptr) compute_decays(scan, team);
    constexpr int kColumns = 64;  // columns of an item, if there are few heads
    const size_t num_heads = static_cast<size_t>(scan.num_spans) * scan.num_v_heads;
    const bool has_few = num_heads < 2 * static_cast<size_t>(team.threads);
    const int width = has_few ? kColumns : scan.value_dim;
    const int parts = (scan.value_dim + width - 1) / width;
    team.each_in_turn(num_heads * parts, [&](size_t item) {
        const int first = static_cast<int>(item % parts) * width;
        const int head = static_cast<int>(item / parts % scan.num_v_heads);
        const StateSpan& span = scan.spans[item / parts / scan.num_v_heads];
        const int end = std::min(first + width, scan.value_dim);
        if (scan.decays != nullptr)
            scan_head<Rule::kDeltaByChannel>(scan, span, head, first, end);
        else if (scan.is_delta)
            scan_head<Rule::kDelta>(scan, span, head, first, end);
        else
            scan_head<Rule::kMamba2>(scan, span, head, first, end);
    });
}

}  // namespace tandem::TANDEM_ISA
