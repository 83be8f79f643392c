// Samples tokens as tandem_kernels/sampling.py does, for one instruction set. A row is computed by
// one thread, so the bits depend on that row only.

namespace tandem::TANDEM_ISA {

constexpr int kRankedBlock = 64;     // logits of which only the largest one is compared at first
constexpr int kDrawn = 32 * kPanel;  // logits whose weights are added in fp32
constexpr int kHead = 256;           // tokens that are ranked at first
constexpr int kBuckets = 2048;

struct Weighing {
    float most, temperature;

    Floats of(Floats logits) const { return exp((logits - most) / temperature); }
};

// Calls add(panel, num) for each panel of logits. A last panel with only `num` logits is filled up
// with logits whose weight is 0.
template <class Add>
void each_panel(const float* logits, int first, int end, Add add) {
    int id = first;
    for (; id + kPanel <= end; id += kPanel) add(logits + id, kPanel);
    if (id == end) return;
    float rest[kPanel];
    for (float& logit : rest) logit = -INFINITY;
    std::memcpy(rest, logits + id, (end - id) * sizeof(float));
    add(rest, end - id);
}

// Some tokens of a row in the order of their ranks, which is by logit, and by id for equal logits.
class Ranking {
public:
    // `blocks` has room for each block of logits, `ranked` and `sums` for each logit.
    Ranking(const float* logits, int num, float* blocks, Ranked* ranked, double* sums)
        : logits_(logits), num_(num), blocks_(blocks), ranked_(ranked), sums_(sums) {
        for (int first = 0, block = 0; first < num; first += kRankedBlock, ++block)
            blocks_[block] = largest_in(logits + first, std::min(kRankedBlock, num - first));
    }

    static int count_blocks(int num) { return (num + kRankedBlock - 1) / kRankedBlock; }

    float most() const { return largest_in(blocks_, count_blocks(num_)); }

    // Ranks the `count` most likely tokens.
    void rank_first(int count, const Weighing& weighing) {
        const float least = count < num_ ? threshold(count) : -INFINITY;
        num_ranked_ = 0;
        for (int first = 0, block = 0; first < num_; first += kRankedBlock, ++block) {
            if (blocks_[block] < least) continue;
            const int end = std::min(first + kRankedBlock, num_);
            for (int id = first; id < end; ++id)
                if (logits_[id] >= least) ranked_[num_ranked_++] = {logits_[id], id};
        }
        if (count < num_ranked_)
            std::nth_element(ranked_, ranked_ + count, ranked_ + num_ranked_, is_before);
        num_ranked_ = count;
        sort(0, weighing);
    }

    // Ranks the tokens for which is_chosen(logit). The tokens before them have the weight `before`.
    template <class IsChosen>
    void rank_chosen(IsChosen is_chosen, double before, const Weighing& weighing) {
        num_ranked_ = 0;
        for (int id = 0; id < num_; ++id)
            if (is_chosen(logits_[id])) ranked_[num_ranked_++] = {logits_[id], id};
        sort(before, weighing);
    }

    // Returns the place of the first ranked token of which holds(sum of the weights up to it). If
    // there is none, returns the number of ranked tokens.
    template <class Holds>
    int find(Holds holds) const {
        const auto fails = [&](double sum) { return !holds(sum); };
        return static_cast<int>(std::partition_point(sums_, sums_ + num_ranked_, fails) - sums_);
    }

    int size() const { return num_ranked_; }
    int id(int place) const { return ranked_[place].id; }
    double sum(int place) const { return sums_[place]; }

private:
    static bool is_before(const Ranked& a, const Ranked& b) {
        return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    }

    // Returns a number that at least `count` logits are not below: with few of them, the
    // count-largest of the blocks' largest logits; with many, the count-largest logit.
    float threshold(int count) {
        const int num_blocks = count_blocks(num_);
        float* const sorted = reinterpret_cast<float*>(sums_);
        const bool is_few = count <= num_blocks;
        const int num = is_few ? num_blocks : num_;
        std::copy_n(is_few ? blocks_ : logits_, num, sorted);
        std::nth_element(sorted, sorted + count - 1, sorted + num,
                         [](float a, float b) { return a > b; });
        return sorted[count - 1];
    }

    void sort(double before, const Weighing& weighing) {
        std::sort(ranked_, ranked_ + num_ranked_,
                  [](const Ranked& a, const Ranked& b) { return is_before(a, b); });
        for (int at = 0; at < num_ranked_; at += kLanes) {
            const int num = std::min(kLanes, num_ranked_ - at);
            Floats logits = all(-INFINITY);
            for (int i = 0; i < num; ++i) logits[i] = ranked_[at + i].logit;
            const Floats weights = weighing.of(logits);
            for (int i = 0; i < num; ++i) sums_[at + i] = before += weights[i];
        }
    }

    const float* logits_;
    int num_, num_ranked_ = 0;
    float* blocks_;
    Ranked* ranked_;
    double* sums_;  // of the weights up to each ranked token
};

// The sum of the weights that are not below min_p, and their number.
struct Mass {
    double sum = 0;
    int num = 0;
};

inline Mass mass_of(const float* logits, int num, const Weighing& weighing, float min_p) {
    Mass mass;
    for (int first = 0; first < num; first += kDrawn) {
        Floats sums[kVectors] = {};
        Ints counts = {};
        each_panel(logits, first, std::min(first + kDrawn, num), [&](const float* panel, int) {
            for (int v = 0; v < kVectors; ++v) {
                const Floats weights = weighing.of(load(panel + v * kLanes));
                const Ints is_left = weights >= min_p;
                sums[v] += is_left ? weights : Floats{};
                counts -= is_left;
            }
        });
        mass.sum += sum(sums);
        for (int lane = 0; lane < kLanes; ++lane) mass.num += counts[lane];
    }
    if (min_p <= 0) mass.num = num;
    return mass;
}

// The weights of all tokens in buckets of nearly equal logits, the most likely tokens first. With
// them, only the bucket that matters has to be sorted.
class Buckets {
public:
    Buckets(const float* logits, int num, const Weighing& weighing) : weighing_(weighing) {
        each_panel(logits, 0, num, [&](const float* panel, int num_here) {
            float weights[kPanel];
            for (int v = 0; v < kVectors; ++v) {
                const Floats some = weighing.of(load(panel + v * kLanes));
                std::memcpy(weights + v * kLanes, &some, sizeof some);
            }
            for (int i = 0; i < num_here; ++i) {
                const int bucket = bucket_of(panel[i]);
                sums_[bucket] += weights[i];
                ++counts_[bucket];
            }
        });
        for (int bucket = 1; bucket < kBuckets; ++bucket) {
            sums_[bucket] += sums_[bucket - 1];
            counts_[bucket] += counts_[bucket - 1];
        }
    }

    double total() const { return sums_[kBuckets - 1]; }

    // Ranks the tokens in the bucket of the token with this rank, counted from 0. Returns the token's
    // place among them.
    int rank_at(Ranking& ranking, int rank) const {
        int bucket = 0;
        while (counts_[bucket] <= rank) ++bucket;
        rank_bucket(ranking, bucket);
        return rank - (bucket > 0 ? counts_[bucket - 1] : 0);
    }

    // Ranks the tokens in the bucket of the first token of which holds(sum of the weights up to it).
    // Returns the token's place among them.
    template <class Holds>
    int rank_where(Ranking& ranking, Holds holds) const {
        int bucket = 0;
        while (bucket < kBuckets - 1 && !holds(sums_[bucket])) ++bucket;
        rank_bucket(ranking, bucket);
        // The weights of a bucket were added in another order, so the sum may be slightly less here.
        return std::min(ranking.find(holds), ranking.size() - 1);
    }

private:
    int bucket_of(float logit) const {
        // Tokens with a weight of 0 are in the last bucket.
        const float place = (weighing_.most - logit) / weighing_.temperature * (kBuckets / 88.0f);
        return static_cast<int>(place < kBuckets - 1 ? place : kBuckets - 1);
    }

    void rank_bucket(Ranking& ranking, int bucket) const {
        ranking.rank_chosen([&](float logit) { return bucket_of(logit) == bucket; },
                            bucket > 0 ? sums_[bucket - 1] : 0, weighing_);
    }

    Weighing weighing_;
    double sums_[kBuckets] = {};
    int counts_[kBuckets] = {};
};

// Draws a token from those whose weights add up to `kept`.
inline double target_of(const Draw& draw, double kept) {
    // The random number is less than 1, but the product may be rounded up to `kept`.
    return std::min(draw.uniform * kept, std::nextafter(kept, 0.0));
}

inline int draw_row(const Draw& draw, float* blocks, Ranked* ranked, double* sums) {
    Ranking ranking(draw.logits, draw.num, blocks, ranked, sums);
    const Weighing weighing{ranking.most(), draw.temperature};
    if (!std::isfinite(weighing.most)) {
        // An edit has set all logits to -infinity, or one to infinity.
        int id = 0;
        while (draw.logits[id] != weighing.most) ++id;
        return id;
    }
    Mass mass = mass_of(draw.logits, draw.num, weighing, draw.min_p);
    mass.num = std::max(mass.num, 1);  // rounding may put the most likely token below min_p
    const bool has_top_k = 0 < draw.top_k && draw.top_k < mass.num;
    if (has_top_k) mass.num = draw.top_k;
    ranking.rank_first(has_top_k ? mass.num : std::min(kHead, mass.num), weighing);
    const bool is_all = ranking.size() == mass.num;
    if (is_all) mass.sum = ranking.sum(mass.num - 1);
    double kept = mass.sum;
    bool is_found = true;
    if (draw.top_p < 1) {
        const int cut = ranking.find([&](double sum) { return sum >= draw.top_p * mass.sum; });
        is_found = cut < ranking.size();
        if (is_found) kept = ranking.sum(cut);
    }
    if (is_found) {
        const double target = target_of(draw, kept);
        const int place = ranking.find([&](double sum) { return sum > target; });
        if (place < ranking.size()) return ranking.id(place);
    }
    const Buckets buckets(draw.logits, draw.num, weighing);
    kept = buckets.total();
    if (mass.num < draw.num) kept = ranking.sum(buckets.rank_at(ranking, mass.num - 1));
    if (draw.top_p < 1) {
        const double least = draw.top_p * kept;
        const int cut = buckets.rank_where(ranking, [&](double sum) { return sum >= least; });
        kept = ranking.sum(cut);
    }
    const double target = target_of(draw, kept);
    return ranking.id(buckets.rank_where(ranking, [&](double sum) { return sum > target; }));
}

inline void draw(const Draws& draws, int num_threads) {
    int num_most = 0;
    for (int i = 0; i < draws.num_rows; ++i) num_most = std::max(num_most, draws.rows[i].num);
    const size_t num = num_most, num_blocks = Ranking::count_blocks(num_most);
    const int num_used = std::min(num_threads, draws.num_rows);
    const std::unique_ptr<float[]> blocks(new float[num_used * num_blocks]);
    const std::unique_ptr<Ranked[]> ranked(new Ranked[num_used * num]);
    const std::unique_ptr<double[]> sums(new double[num_used * num]);
#pragma omp parallel for num_threads(num_used) schedule(dynamic)
    for (int i = 0; i < draws.num_rows; ++i) {
        const size_t thread = omp_get_thread_num();
        draws.token_ids[i] = draw_row(draws.rows[i], blocks.get() + thread * num_blocks,
                                      ranked.get() + thread * num, sums.get() + thread * num);
    }
}

}  // namespace tandem::TANDEM_ISA
