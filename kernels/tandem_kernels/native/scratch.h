// The buffers of one decoder. Steps reuse them. A buffer never becomes smaller, so memory is
// allocated only when a step is larger than all before.
//
// The ranks of a tensor-parallel engine share the buffers that one thread writes and another reads.
// Each of these buffers then has a fixed place in the ranks' shared memory.

#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <new>
#include <vector>

#include "stages.h"
#include "team.h"

namespace tandem {

constexpr std::size_t kAlignment = 64, kHugePage = 2 << 20;

class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (!is_shared_) std::free(data_);
    }

    // Uses shared memory from now on. The system allocates its pages when they are first written.
    void share(char* memory, std::size_t bytes) {
        data_ = reinterpret_cast<float*>(memory);
        size_ = bytes / sizeof(float) - kAlignment;
        is_shared_ = true;
    }

    float* of(std::size_t num_floats) {
        if (num_floats > size_) {
            if (is_shared_) throw std::bad_alloc();
            std::free(data_);
            data_ = nullptr;
            size_ = 0;
            // Rounded up to cache lines, plus one line, because a vector may read past the end.
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
        // With huge pages, fewer address translations are needed when a product reads many rows.
        if (huge) madvise(data, bytes, MADV_HUGEPAGE);
#endif
        return static_cast<float*>(data);
    }

    float* data_ = nullptr;
    std::size_t size_ = 0;
    bool is_shared_ = false;
};

constexpr std::size_t kPieceFloats = 4 << 20;  // size of Scratch::piece_sums (16 MiB)

struct Largest {  // the largest logit of a part of the vocabulary, and its lowest token id
    float logit;
    int32_t token;
};

// An expert that a row has chosen, the expert's weight, and the place of the pair (experts.h).
struct Chosen {
    int32_t expert, place;
    float share;
};

struct Routing {
    Chosen* chosen;    // [rows, top k]
    int32_t* choices;  // [rows * top k]: index into `chosen` for each place
    int32_t* first;    // [experts + 1]: first place of each expert
};

struct Scratch {
    Buffer hidden;    // [rows, hidden]: the residual stream
    Buffer input;     // rows in tiles, the input of a product
    Buffer projected; // [rows, q, k and v side by side], or [rows, gate and up]
    Buffer attended;  // [rows, heads * head_dim], in tiles
    // [rows, hidden]: output of a product that cannot be added to `hidden` directly
    Buffer delta;
    // The int8 inputs of a product with quantized weights, or each thread's panels of fp8 weights
    // after expansion (fp8.h).
    Buffer rounded;
    std::size_t expanded_floats = 0;  // size of a thread's expanded panels
    Buffer last;      // [logit rows, hidden]
    Buffer gates;     // [rows with adapters, gate and up]: LoRA deltas of gates and ups
    Buffer routed;    // the inputs of all experts in tiles, sorted by expert
    Buffer logits;    // router logits [rows, experts], and ranks [rows, 2 * experts]
    Buffer heads, queries, of_heads;  // see latent.h
    Buffer block_shares;              // see block_sums.h
    Buffer layer_inputs;              // see layer_inputs.h
    Buffer index, scores, choice;     // see indexer.h
    Buffer copies;                    // see alt_up.h and streams.h
    Buffer mixtures;                  // see streams.h
    Buffer piece_sums;                // see Item::sums
    std::vector<std::size_t> first_shares;
    Buffer chosen, choices, first;  // the arrays of Routing
    Buffer largest;                 // Largest, [threads, logit rows]
    std::vector<Buffer> of_thread;  // for each thread of this rank: the tiles of attention
    std::vector<Buffer> lora;       // for each thread of this rank: see lora.h
    Laps laps;
    Ranks ranks;
    Meeting own_meeting;       // of the only rank
    uint32_t next_ticket = 0;  // see Team::each_in_turn()

    explicit Scratch(const Ranks& of_ranks) : ranks(of_ranks) {
        if (ranks.shared == nullptr) return;
        char* at = reinterpret_cast<char*>(ranks.shared) + kSharedHeader;
        for (Buffer* buffer :
             {&hidden, &input, &projected, &attended, &delta, &rounded, &last, &gates, &routed,
              &logits, &heads, &queries, &of_heads, &block_shares, &chosen, &choices, &first,
              &largest, &layer_inputs, &index, &scores, &choice, &copies,
              &mixtures, &piece_sums}) {
            buffer->share(at, ranks.buffer_bytes);
            at += ranks.buffer_bytes;
        }
    }

    Meeting& meeting() { return ranks.shared != nullptr ? ranks.shared->meeting : own_meeting; }

    // Returns the team for a thread of a parallel region. Must be left with leave().
    Team team(int own_thread, int own_threads) {
        return {ranks.rank * own_threads + own_thread, ranks.num * own_threads, own_thread,
                own_threads, meeting(), next_ticket};
    }

    // Called by each thread at the end of a parallel region.
    void leave(const Team& team) {
        team.wait();
        if (team.own_thread == 0) next_ticket = team.next_ticket;
    }
};

constexpr int kSharedBuffers = 25;

}  // namespace tandem
