// Computes the log probabilities of tandem_kernels/logprobs.py for one instruction set. A row is
// computed by one thread in one pass, so the bits depend on that row only.

namespace tandem::TANDEM_ISA {

// The most likely tokens that were found so far, the most likely one first. Of tokens with equal
// logits, the one with the lowest id comes first.
class Top {
public:
    Top(int32_t* ids, float* logits, int size) : ids_(ids), logits_(logits), size_(size) {}

    bool takes(float logit) const {
        return size_ > 0 && (num_ < size_ || logit > logits_[num_ - 1]);
    }

    void add(int32_t id, float logit) {
        int at = num_ < size_ ? num_++ : num_ - 1;
        for (; at > 0 && logits_[at - 1] < logit; --at) {
            logits_[at] = logits_[at - 1];
            ids_[at] = ids_[at - 1];
        }
        logits_[at] = logit;
        ids_[at] = id;
    }

private:
    int32_t* ids_;
    float* logits_;
    int size_, num_ = 0;
};

constexpr int kMeasured = 32 * kPanel;  // number of logits that are processed at a time

// Returns the largest of `num` logits.
inline float largest_in(const float* logits, int num) {
    Floats parts[kVectors];
    for (Floats& part : parts) part = all(-INFINITY);
    int i = 0;
    for (; i + kPanel <= num; i += kPanel)
        for (int v = 0; v < kVectors; ++v)
            parts[v] = max(parts[v], load(logits + i + v * kLanes));
    float found = largest(parts);
    for (; i < num; ++i) found = std::max(found, logits[i]);
    return found;
}

inline void measure_row(const float* logits, int vocab, int32_t token, const Measure& to, int row) {
    int32_t* const top_ids = to.top_ids + static_cast<size_t>(row) * to.num_top;
    float* const top_logprobs = to.top_logprobs + static_cast<size_t>(row) * to.num_top;
    Top top(top_ids, top_logprobs, to.num_top);
    const float chosen = logits[token];
    float most = -INFINITY;
    double total = 0;  // sum of exp(logit - most)
    int32_t rank = 1;
    for (int at = 0; at < vocab; at += kMeasured) {
        const int num = std::min(vocab - at, kMeasured);
        const float* const part = logits + at;
        const float here = largest_in(part, num);
        if (here > most) {
            total *= std::exp(static_cast<double>(most) - here);
            most = here;
        }
        Floats sums[kVectors] = {};
        Ints above = {};
        int i = 0;
        for (; i + kPanel <= num; i += kPanel)
            for (int v = 0; v < kVectors; ++v) {
                const Floats some = load(part + i + v * kLanes);
                sums[v] += exp(some - most);
                above -= some > chosen;
            }
        total += sum(sums);
        for (int lane = 0; lane < kLanes; ++lane) rank += above[lane];
        for (; i < num; ++i) {
            total += std::exp(static_cast<double>(part[i]) - most);
            rank += part[i] > chosen;
        }
        if (top.takes(here))
            for (i = 0; i < num; ++i)
                if (top.takes(part[i])) top.add(at + i, part[i]);
    }
    const double normalizer = most + std::log(total);
    to.logprobs[row] = static_cast<float>(chosen - normalizer);
    to.ranks[row] = rank;
    for (int i = 0; i < to.num_top; ++i)
        top_logprobs[i] = static_cast<float>(top_logprobs[i] - normalizer);
}

inline void measure(const float* logits, int vocab, const Measure& measure, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
    for (int i = 0; i < measure.num_rows; ++i)
        measure_row(logits + static_cast<size_t>(measure.rows[i]) * vocab, vocab,
                    measure.token_ids[i], measure, i);
}

}  // namespace tandem::TANDEM_ISA
