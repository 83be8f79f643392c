// Measures two limits of the processor, with which the times of a step's stages are compared: the
// rate of products whose operands are in the L1 cache, and the memory read bandwidth.

namespace tandem::TANDEM_ISA {

template <class Work>
double seconds_of(Work work) {
    const auto started = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

#ifdef TANDEM_PAIRS
inline double product_of_pairs_gflops(int num_threads) {
    constexpr int kTimes = 20000;
    double operations = 0.0;
    const double seconds = seconds_of([&] {
#pragma omp parallel num_threads(num_threads) reduction(+ : operations)
        operations += busy_pairs(kTimes);
    });
    return 1e-9 * operations / seconds;
}
#endif

// The bodies of parallel regions are functions of their own, because clang compiles the regions
// themselves for any processor.

constexpr int kBusyDepth = 256;

inline float busy_products(int times) {
    alignas(64) float x[kBusyDepth * kTileRows], w[kBusyDepth * kPanel];
    for (float& each : x) each = 1.0f;
    for (float& each : w) each = 1.0f;
    Floats sums[kVectors][kTileRows], all_sums = {};
    for (int i = 0; i < times; ++i) {
        multiply<float, kTileRows, kVectors>(x, w, kBusyDepth, reinterpret_cast<const char*>(w), 0,
                                             sums);
        for (int v = 0; v < kVectors; ++v)
            for (int m = 0; m < kTileRows; ++m) all_sums += sums[v][m];
    }
    return all_sums[0];
}

constexpr size_t kReadAtOnce = 1024;

inline float sum_of_some(const float* from) {
    Floats sums[8] = {};
    for (size_t at = 0; at < kReadAtOnce; at += 8 * kLanes)
        for (int i = 0; i < 8; ++i) sums[i] += load(from + at + i * kLanes);
    for (int i = 1; i < 8; ++i) sums[0] += sums[i];
    return sums[0][0];
}

inline double product_gflops(int num_threads, [[maybe_unused]] Kind kind) {
#ifdef TANDEM_PAIRS
    if (kind == BF16_PAIRS) return product_of_pairs_gflops(num_threads);
#endif
    constexpr int kTimes = 20000;
    volatile float kept = 0.0f;
    const double seconds = seconds_of([&] {
#pragma omp parallel num_threads(num_threads)
        kept = busy_products(kTimes);
    });
    return 2e-9 * kBusyDepth * kPanel * kTileRows * kTimes * num_threads / seconds;
}

inline double read_gb_per_s(const float* data, size_t num, int num_threads) {
    volatile float kept = 0.0f;
    const double seconds = seconds_of([&] {
#pragma omp parallel for num_threads(num_threads) schedule(static)
        for (size_t first = 0; first < num / kReadAtOnce * kReadAtOnce; first += kReadAtOnce)
            if (const float sum = sum_of_some(data + first); sum == -1.0f) kept = sum;
    });
    return 1e-9 * num * sizeof(float) / seconds;
}

}  // namespace tandem::TANDEM_ISA
