// Buffers of one decoder. They only grow, so that a step of a size seen before allocates nothing.

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
            // Whole lines, and one more that a last vector may read past the end.
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
        if (huge) madvise(data, bytes, MADV_HUGEPAGE);  // a product touches many rows at once
#endif
        return static_cast<float*>(data);
    }

    float* data_ = nullptr;
    std::size_t size_ = 0;
};

struct Largest {  // of some logits, the first one
    float logit;
    int32_t token;
};

struct Chosen {  // one of a row's experts, its weight, and where it lies among all experts' rows
    int32_t expert, place;
    float share;
};

struct Routing {
    std::vector<Chosen> chosen;    // [rows, top k]
    std::vector<int32_t> choices;  // [rows * top k]: which of `chosen` has a place
    std::vector<int32_t> first;    // [experts + 1]: places
};

struct Scratch {
    Buffer hidden;    // [rows, hidden]: the residual stream
    Buffer input;     // rows in tiles, as a product reads them
    Buffer projected; // [rows, q, k and v side by side], or [rows, gate and up]
    Buffer attended;  // [rows, heads * head_dim], in tiles
    Buffer delta;     // [rows, hidden]: what a product adds to `hidden`, if it cannot at once
    Buffer rounded;   // inputs of a quantized product, as int8; or each thread's panels (fp8.h)
    std::size_t expanded_floats = 0;  // of a thread's panels
    Buffer last;      // [logit rows, hidden]
    Buffer gates;     // [rows with adapters, gate and up]: what these add to gates
    Buffer routed;    // rows of experts in tiles, expert by expert
    Buffer logits;    // of a router [rows, experts], and what they are ranked by [rows, 2 experts]
    Buffer heads, queries, of_heads;  // latent.h
    Buffer block_shares;              // block_sums.h
    std::vector<std::size_t> first_shares;
    Routing routing;
    std::vector<Buffer> of_thread;  // attention's tiles
    std::vector<Buffer> lora;       // of each thread
    std::vector<Largest> largest;   // [threads, logit rows]
    Laps laps;
};

}  // namespace tandem
