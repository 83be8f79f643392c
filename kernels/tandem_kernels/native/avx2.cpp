// The decoder for processors with AVX2.

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

#if defined(__x86_64__)
#include <immintrin.h>

// The pragma follows the standard headers, because their inline functions are shared by all files
// and must run on any processor.
#pragma GCC target("avx2,fma,f16c")
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#endif

#define TANDEM_ISA avx2_code
#define TANDEM_LANES 8
#define TANDEM_TILE_ROWS 6
#define TANDEM_SUMS 12
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
const Entry avx2 = {
    avx2_code::to_last_kv, avx2_code::to_logits, BF16,
    avx2_code::product_gflops, avx2_code::read_gb_per_s,
    avx2_code::measure, avx2_code::draw, avx2_code::convolve,
    avx2_code::scan_states};
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
