// The decoder for processors with AVX-512.

#include <omp.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "decoder.h"
#include "scratch.h"

#if defined(__x86_64__)
#include <immintrin.h>

// After the standard headers: what others share must run anywhere.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

#define TANDEM_ISA avx512_code
#define TANDEM_LANES 16
#define TANDEM_TILE_ROWS 12
#include "simd.h"
// simd.h defines what the others stand on.
#include "linear.h"
#include "attention.h"
#include "forward.h"

namespace tandem {
const Entry avx512 = {avx512_code::to_last_kv, avx512_code::to_logits};
}
#endif
