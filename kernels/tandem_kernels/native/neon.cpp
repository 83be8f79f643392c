// The decoder for arm64 processors, all of which have NEON.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "blocks.h"
#include "decoder.h"
#include "fp8.h"
#include "quantized.h"
#include "scratch.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define TANDEM_ISA neon_code
#define TANDEM_LANES 4
#define TANDEM_NEON
#define TANDEM_TILE_ROWS 6
#define TANDEM_SUMS 24
#include "simd.h"
// simd.h comes first, because the other headers use it.
#include "inputs.h"
#include "gated.h"
#include "linear.h"
#include "linear_quantized.h"
#include "linear_fp8.h"
#include "kv_int8.h"
#include "kv_fp8.h"
#include "kv_int4.h"
#include "kv_part.h"
#include "attention.h"
#include "lora.h"
#include "forward.h"
#include "experts.h"
#include "limits.h"
#include "logprobs.h"
#include "draws.h"
#include "state_functions.h"

namespace tandem {
const Entry neon = {
    neon_code::to_last_kv, neon_code::to_logits, BF16,
    neon_code::product_gflops, neon_code::read_gb_per_s,
    neon_code::measure, neon_code::draw, neon_code::convolve,
    neon_code::scan_states};
}
#endif
