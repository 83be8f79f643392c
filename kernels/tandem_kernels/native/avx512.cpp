// The decoder for processors with AVX-512.

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
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#endif

#define TANDEM_ISA avx512_code
#define TANDEM_LANES 16
#define TANDEM_TILE_ROWS 12
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
const Entry avx512 = {
    avx512_code::to_last_kv, avx512_code::to_logits, BF16,
    avx512_code::product_gflops, avx512_code::read_gb_per_s,
    avx512_code::measure, avx512_code::draw, avx512_code::convolve,
    avx512_code::scan_states};
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
