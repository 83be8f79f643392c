// The C functions that Python calls with ctypes (library.py). They throw no exceptions. A returned
// status of 0 means success, 1 means that there is not enough memory, 2 that another rank of a
// tensor-parallel engine has ended, and 3 that the processor or the library lacks the instruction set.

#include <omp.h>

#include <cmath>
#include <cstring>
#include <new>

#include "blocks.h"
#include "decoder.h"
#include "fp8.h"
#include "pack.h"
#include "quantized.h"
#include "scratch.h"

namespace {

struct Choice {
    const char* name;
    const tandem::Entry* entry;
};

// The instruction sets with which the kernels were built, best first.
const Choice kBuilt[] = {
#if defined(TANDEM_HAS_AMX) && defined(TANDEM_KNOWS_BF16)
    {"amx", &tandem::amx},
#endif
#if defined(TANDEM_HAS_AVX512_BF16) && defined(TANDEM_KNOWS_BF16)
    {"avx512_bf16", &tandem::avx512_bf16},
#endif
#if defined(TANDEM_HAS_AVX512) && defined(__x86_64__)
    {"avx512", &tandem::avx512},
#endif
#if defined(TANDEM_HAS_AVX2) && defined(__x86_64__)
    {"avx2", &tandem::avx2},
#endif
#if defined(TANDEM_HAS_NEON) && defined(__aarch64__)
    {"neon", &tandem::neon},
#endif
#ifdef TANDEM_HAS_PLAIN
    {"plain", &tandem::plain},
#endif
    {nullptr, nullptr},
};

// Returns the decoder for the instruction set `wanted`. If `wanted` is null, returns the best
// decoder for this processor.
Choice choose(const char* wanted) {
    for (const Choice& built : kBuilt) {
        if (built.name == nullptr) break;
        const bool is_wanted = wanted == nullptr || !std::strcmp(wanted, built.name);
        if (is_wanted && tandem::cpu_has(built.name)) return built;
    }
    return {nullptr, nullptr};
}

constexpr int kNoInstructions = 3;

struct Decoder {
    tandem::Model model;
    tandem::Entry entry;
    tandem::Scratch scratch;
};

template <class Work>
int guarded(Work work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// Computes a part of a step. If this fails in one rank, the others do not wait for it.
int computed(Decoder& decoder, void (*part)(const tandem::Model&, const tandem::Step&,
                                            tandem::Scratch&),
             const tandem::Step& step) {
    const int failed = guarded([&] { part(decoder.model, step, decoder.scratch); });
    if (decoder.scratch.ranks.num == 1) return failed;
    std::atomic<bool>& is_broken = decoder.scratch.meeting().is_broken;
    if (failed) is_broken.store(true);
    return failed ? failed : is_broken.load() ? 2 : 0;
}

// Calls work(team) in each of some threads.
template <class Work>
void by_team(int num_threads, Work work) {
    tandem::Meeting meeting;
#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        work(tandem::Team{thread, threads, thread, threads, meeting, 0});
    }
}

}  // namespace

extern "C" {

// Returns the instruction set for `wanted`: null stands for the best that was built. Returns null if
// the processor does not support `wanted`, or it was not built.
const char* tandem_instructions(const char* wanted) { return choose(wanted).name; }

// Returns the kind to which weights of `kind` are packed for the instruction set `wanted`.
int32_t tandem_packed_kind(const char* wanted, int32_t kind) {
    const Choice choice = choose(wanted);
    if (choice.entry == nullptr || choice.entry->kind_of_bf16 == tandem::BF16) return kind;
    if (kind == tandem::F8_BF16) return tandem::F8_PAIRS;
    return kind == tandem::BF16 ? choice.entry->kind_of_bf16 : kind;
}

void tandem_pack(const void* weights, int32_t weights_kind, int64_t out, int64_t in, int32_t kind,
                 void* panels, float* scales) {
    tandem::pack(weights, weights_kind, out, in, kind, panels, scales);
}

// Packs fp8 weights. Returns 0 if one of them is NaN, otherwise 1.
int32_t tandem_pack_fp8(const uint8_t* numbers, int64_t out, int64_t in, int32_t kind,
                        uint8_t* panels) {
    return tandem::pack_fp8(numbers, out, in, kind, panels);
}

int32_t tandem_pack_blocks(const void* blocks, int32_t type, int64_t rows, int64_t in,
                           int64_t first_output, void* panels) {
    return tandem::pack_blocks(blocks, type, rows, in, first_output, panels);
}

int32_t tandem_widen_blocks(const void* blocks, int32_t type, int64_t rows, int64_t in, float* to) {
    return tandem::widen_blocks(blocks, type, rows, in, to);
}

// Returns the kind to which blocks of a type are packed; -1 if the type is not supported.
int32_t tandem_kind_of_blocks(int32_t type) {
    const tandem::BlockType* known = tandem::block_type(type);
    return known == nullptr ? -1 : known->kind;
}

int64_t tandem_unit_bytes(int32_t kind) {
    return tandem::by_format(kind, [](auto format) -> int64_t { return decltype(format)::kUnitBytes; });
}

// Creates a decoder. The struct `model` is copied, but the arrays to which it points are not.
// Returns null if there is not enough memory or the processor does not support the instruction set.
void* tandem_create(const tandem::Model* model, const char* wanted, const tandem::Ranks* ranks) {
    const Choice choice = choose(wanted);
    if (choice.entry == nullptr) return nullptr;
    Decoder* decoder =
        new (std::nothrow) Decoder{*model, *choice.entry, tandem::Scratch(*ranks)};
    if (decoder == nullptr) return nullptr;
    const int failed = guarded([&] {
        decoder->scratch.expanded_floats = tandem::expanded_floats(*model);
        decoder->scratch.of_thread = std::vector<tandem::Buffer>(model->num_threads);
        decoder->scratch.lora = std::vector<tandem::Buffer>(model->num_threads);
    });
    if (failed) {
        delete decoder;
        return nullptr;
    }
    return decoder;
}

void tandem_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

int tandem_to_last_kv(void* decoder, const tandem::Step* step) {
    Decoder& d = *static_cast<Decoder*>(decoder);
    return computed(d, d.entry.to_last_kv, *step);
}

int tandem_to_logits(void* decoder, const tandem::Step* step) {
    Decoder& d = *static_cast<Decoder*>(decoder);
    return computed(d, d.entry.to_logits, *step);
}

// Returns the size of the ranks' shared memory, without the bytes that Python uses itself.
int64_t tandem_shared_bytes(int64_t buffer_bytes) {
    return tandem::kSharedHeader + tandem::kSharedBuffers * buffer_bytes;
}

// Constructs the header of the ranks' shared memory, which is zero at first.
void tandem_share(void* memory) { new (memory) tandem::Shared; }

int tandem_wait_until_taken(tandem::Shared* shared, int32_t num_others) {
    return shared->wait_until_taken(num_others) ? 0 : 2;
}

void tandem_post(tandem::Shared* shared) { shared->posted.add_one(); }

int tandem_wait_for_message(tandem::Shared* shared, uint32_t seen) {
    return shared->wait_for_message(seen) ? 0 : 2;
}

void tandem_take(tandem::Shared* shared) { shared->taken.add_one(); }

// Tells all ranks that one of them has ended, so that none waits any more.
void tandem_break(tandem::Shared* shared) { shared->meeting.is_broken.store(true); }

void tandem_measure(void* decoder, const float* logits, const tandem::Measure* measure) {
    const Decoder& d = *static_cast<Decoder*>(decoder);
    d.entry.measure(logits, d.model.vocab, *measure, d.model.num_threads);
}

// Samples a token from each row. The members of `draws` are described in decoder.h.
int tandem_draw(const char* wanted, const tandem::Draws* draws, int32_t num_threads) {
    const Choice choice = choose(wanted);
    if (choice.entry == nullptr) return kNoInstructions;
    return guarded([&] { choice.entry->draw(*draws, num_threads); });
}

// Writes the hidden states after the final norm for `rows` of the last step, [num_rows, hidden].
// Each row is computed separately, so the bits do not depend on the batch.
void tandem_final_hidden(void* decoder, const int32_t* rows, int32_t num_rows, float* to) {
    Decoder& d = *static_cast<Decoder*>(decoder);
    const int hidden = d.model.hidden;
    for (int row = 0; row < num_rows; ++row, to += hidden) {
        const float* x = d.scratch.hidden.of(0) + static_cast<size_t>(rows[row]) * hidden;
        double mean = 0, squares = 0;
        if (d.model.centers_norms) {
            for (int i = 0; i < hidden; ++i) mean += x[i];
            mean /= hidden;
        }
        for (int i = 0; i < hidden; ++i) squares += (x[i] - mean) * (x[i] - mean);
        const double scale = 1 / std::sqrt(squares / hidden + d.model.norm_eps);
        for (int i = 0; i < hidden; ++i)
            to[i] = static_cast<float>((x[i] - mean) * scale * d.model.final_norm[i]);
    }
}

// Kernels of layers with a state (state.h), apart from a step.
int tandem_convolve(const char* wanted, const tandem::Convolution* convolution,
                    int32_t num_threads) {
    const Choice choice = choose(wanted);
    if (choice.entry == nullptr) return kNoInstructions;
    by_team(num_threads, [&](const tandem::Team& team) {
        choice.entry->convolve(*convolution, team);
    });
    return 0;
}

int tandem_scan_states(const char* wanted, const tandem::StateScan* scan, int32_t num_threads) {
    const Choice choice = choose(wanted);
    if (choice.entry == nullptr) return kNoInstructions;
    by_team(num_threads,
            [&](const tandem::Team& team) { choice.entry->scan_states(*scan, team); });
    return 0;
}

// Writes the seconds that steps spent in each Stage since the last call.
void tandem_take_stages(void* decoder, double* seconds) {
    static_cast<Decoder*>(decoder)->scratch.laps.take(seconds);
}

// Returns the rate of matrix products with packed weights of `kind`, in GFLOP/s.
double tandem_product_gflops(int32_t num_threads, int32_t kind) {
    return choose(nullptr).entry->product_gflops(num_threads, static_cast<tandem::Kind>(kind));
}

double tandem_read_gb_per_s(const float* data, int64_t num, int32_t num_threads) {
    return choose(nullptr).entry->read_gb_per_s(data, num, num_threads);
}

}  // extern "C"
