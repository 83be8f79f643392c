// The decoder for processors with AMX for bf16. It uses AVX-512 for everything else.

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

#ifdef TANDEM_KNOWS_BF16
#include <immintrin.h>

// The pragma follows the standard headers, because their inline functions are shared by all files
// and must run on any processor.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,avx512bf16,avx512vnni")
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,avx512bf16,avx512vnni"))), apply_to = function)
#endif

#define TANDEM_ISA amx_code
#define TANDEM_LANES 16
#define TANDEM_TILE_ROWS 12
#define TANDEM_SUMS 12
#define TANDEM_PAIRS
#define TANDEM_VNNI
#define TANDEM_AMX
#include "simd.h"
// simd.h comes first, because the other headers use it.
#include "amx.h"
#include "inputs.h"
#include "gated.h"
#include "linear.h"
#include "linear_amx.h"
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

const Entry amx = {
    amx_code::to_last_kv, amx_code::to_logits, BF16_PAIRS,
    amx_code::product_gflops, amx_code::read_gb_per_s,
    amx_code::measure, amx_code::draw, amx_code::convolve,
    amx_code::scan_states};
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
