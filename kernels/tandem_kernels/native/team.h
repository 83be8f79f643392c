// The threads that compute a step together, and how they wait for each other.
//
// All threads run the same code. Each of them takes a part of every loop over rows, panels or
// attention items, and waits at the end of the loop until the others have finished theirs. The
// threads of a team may belong to several processes: the ranks of a tensor-parallel engine. The
// buffers of a step are then in memory that all ranks share (scratch.h), so a result that one rank
// has written is an input of the others without a copy. The bits of a result do not depend on the
// number of threads, and therefore not on the number of ranks.

#pragma once

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <sched.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace tandem {

// A thread that waits first spins for this time, and then sleeps until another thread wakes it.
constexpr std::chrono::microseconds kSpin{20};

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A number on which threads of several processes wait, until it changes.
class Signal {
public:
    uint32_t now() const { return value_.load(std::memory_order_acquire); }

    void add_one() {
        value_.fetch_add(1);
        if (sleepers_.load() != 0) wake();
    }

    // Returns when the number is no longer `seen`, or after at most a tenth of a second.
    void wait(uint32_t seen) {
        const auto end = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 32; ++i) {
                if (now() != seen) return;
                pause_briefly();
            }
        } while (std::chrono::steady_clock::now() < end);
        sleepers_.fetch_add(1);
        sleep(seen);
        sleepers_.fetch_sub(1);
    }

private:
#ifdef __linux__
    void sleep(uint32_t seen) {
        const timespec most{0, 100'000'000};
        syscall(SYS_futex, &value_, FUTEX_WAIT, seen, &most, nullptr, 0);
    }

    void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { sched_yield(); }
    void wake() {}
#endif

    std::atomic<uint32_t> value_{0}, sleepers_{0};
};

// Where the threads of a team meet. All ranks share it.
struct Meeting {
    alignas(64) std::atomic<uint32_t> arrived{0};
    alignas(64) Signal generation;  // changes when all threads have arrived
    alignas(64) std::atomic<uint32_t> tickets{0};  // see Team::each_in_turn()
    // True: a rank has ended, so nobody waits any more, and the results of the step are undefined.
    alignas(64) std::atomic<bool> is_broken{false};

    // Waits until `threads` threads have called this function.
    void wait(int threads) {
        if (threads == 1) return;
        const uint32_t before = generation.now();
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads)) {
            arrived.store(0, std::memory_order_relaxed);
            generation.add_one();
            return;
        }
        while (generation.now() == before && !is_broken.load(std::memory_order_relaxed))
            generation.wait(before);
    }
};

// A thread's view of its team.
struct Team {
    int thread, threads;              // the number of this thread, and the number of all threads
    int own_thread, own_threads;      // the same, counted in this process only
    Meeting& meeting;
    mutable uint32_t next_ticket;     // the first ticket of the next loop in turn

    bool is_first() const { return thread == 0; }

    // Returns a team of this thread only, for a product that one thread computes.
    Team alone() const { return {0, 1, own_thread, own_threads, meeting, 0}; }

    void wait() const { meeting.wait(threads); }

    // Calls work(i) for this thread's part of 0 <= i < num, and does not wait for the others.
    template <class Work>
    void share(int num, Work work) const {
        const int end = static_cast<int>(static_cast<int64_t>(num) * (thread + 1) / threads);
        for (int i = static_cast<int>(static_cast<int64_t>(num) * thread / threads); i < end; ++i)
            work(i);
    }

    template <class Work>
    void each(int num, Work work) const {
        share(num, work);
        wait();
    }

    // Calls work(i) for 0 <= i < num. A thread takes the next i when it has finished one, because
    // some take longer than others. The tickets of all loops have ascending numbers: a loop uses
    // num, and one more with which each thread notices the end.
    template <class Work>
    void each_in_turn(size_t num, Work work) const {
        if (threads == 1) {
            for (size_t i = 0; i < num; ++i) work(i);
            return;
        }
        for (;;) {
            const uint32_t ticket = meeting.tickets.fetch_add(1, std::memory_order_relaxed);
            const size_t i = ticket - next_ticket;
            if (i >= num) break;
            work(i);
        }
        next_ticket += static_cast<uint32_t>(num) + threads;
        wait();
    }
};

// The beginning of the memory that all ranks share. The first rank posts a message for each step,
// and the other ranks take it. A new message is written when all of them have taken the last one.
struct Shared {
    Meeting meeting;
    alignas(64) Signal posted;  // number of messages that the first rank has posted
    alignas(64) Signal taken;   // number of times that a rank has taken a message

    // Waits until all other ranks have taken all messages. Returns false if a rank has ended.
    bool wait_until_taken(int num_others) {
        for (;;) {
            const uint32_t now = taken.now();
            if (now == posted.now() * static_cast<uint32_t>(num_others)) return true;
            if (meeting.is_broken.load()) return false;
            taken.wait(now);
        }
    }

    // Waits for a message after the number `seen`. Returns false if a rank has ended.
    bool wait_for_message(uint32_t seen) {
        while (posted.now() == seen) {
            if (meeting.is_broken.load()) return false;
            posted.wait(seen);
        }
        return true;
    }
};

constexpr size_t kSharedHeader = 4096;  // bytes before the first shared buffer
static_assert(sizeof(Shared) <= kSharedHeader);

// The ranks that compute together, as one of them sees them (library.py mirrors this struct).
struct Ranks {
    int32_t rank = 0, num = 1;
    Shared* shared = nullptr;  // null: the only rank
    size_t buffer_bytes = 0;   // room for each shared buffer; they follow the header
};

}  // namespace tandem
