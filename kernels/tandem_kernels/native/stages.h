// Measures the time of each stage of a step. The first thread reads the clock when all threads have
// finished a stage.

#pragma once

#include <chrono>
#include <cstdint>

namespace tandem {

enum Stage : int32_t {
    EMBED, NORM, QKV, PLACE, ATTENTION, ATTENTION_OUT, GATE_UP, SILU, DOWN, OUTPUT, NUM_STAGES
};

class Laps {
public:
    void start() { before_ = Clock::now(); }

    void end(Stage stage, int thread) {
        if (thread != 0) return;
        const Clock::time_point now = Clock::now();
        seconds_[stage] += std::chrono::duration<double>(now - before_).count();
        before_ = now;
    }

    void take(double* seconds) {
        for (double& stage : seconds_) {
            *seconds++ = stage;
            stage = 0.0;
        }
    }

private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point before_;
    double seconds_[NUM_STAGES] = {};
};

}  // namespace tandem
