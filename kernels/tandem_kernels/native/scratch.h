// The buffers of one decoder. They only grow, so a step that is no larger than an earlier one
// allocates nothing.

#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <new>
#include <vector>

#include "stages.h"

namespace tandem {

constexpr std::size_t kAlignment = 64, kHugePage = 2 << 20;

class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    float* of(std::size_t num_floats) {
        if (num_floats > size_) {
            std::free(data_);
            data_ = nullptr;
            size_ = 0;
            // Whole cache lines, plus one because the last vector may read past the end.
            const std::size_t bytes =
                (num_floats * sizeof(float) / kAlignment + 2) * kAlignment;
            data_ = allocated(bytes);
            size_ = num_floats;
        }
        return data_;
    }

private:
    static float* allocated(std::size_t bytes) {
        const bool huge = bytes >= kHugePage / 4;
        if (huge) bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
        void* data = std::aligned_alloc(huge ? kHugePage : kAlignment, bytes);
        if (data == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        if (huge) madvise(data, bytes, MADV_HUGEPAGE);  // Products access many rows at a time.
#endif
        return static_cast<float*>(data);
    }

    float* data_ = nullptr;
    std::size_t size_ = 0;
};

struct Largest {  // the largest of some logits and its lowest token id
    float logit;
    int32_t token;
};

// an expert of a row, its weight, and the pair's place among the rows of all experts
struct Chosen {
    int32_t expert, place;
    float share;
};

struct Routing {
    std::vector<Chosen> chosen;    // [rows, top k]
    std::vector<int32_t> choices;  // [rows * top k]: index into `chosen` for each place
    std::vector<int32_t> first;    // [experts + 1]: first place of each expert
};

struct Scratch {
    Buffer hidden;    // [rows, hidden]: the residual stream
    Buffer input;     // rows in tiles, the input of a product
    Buffer projected; // [rows, q, k and v side by side], or [rows, gate and up]
    Buffer attended;  // [rows, heads * head_dim], in tiles
    // [rows, hidden]: products that cannot be added to `hidden` directly
    Buffer delta;
    // the int8 inputs of a quantized product, or each thread's expanded panels (fp8.h)
    Buffer rounded;
    std::size_t expanded_floats = 0;  // size of a thread's expanded panels
    Buffer last;      // [logit rows, hidden]
    Buffer gates;     // [rows with adapters, gate and up]: LoRA deltas of gates and ups
    Buffer routed;    // rows of experts in tiles, sorted by expert
    Buffer logits;    // router logits [rows, experts], and ranks [rows, 2 * experts]
    Buffer heads, queries, of_heads;  // see latent.h
    Buffer block_shares;              // see block_sums.h
    std::vector<std::size_t> first_shares;
    Routing routing;
    std::vector<Buffer> of_thread;  // for each thread: the tiles of attention
    std::vector<Buffer> lora;       // for each thread: see lora.h
    std::vector<Largest> largest;   // [threads, logit rows]
    Laps laps;
};

}  // namespace tandem
