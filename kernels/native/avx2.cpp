// The decoder for processors with AVX2.

#include <omp.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "decoder.h"
#include "scratch.h"

#if defined(__x86_64__)
#include <immintrin.h>

// After the standard headers: what others share must run anywhere.
#pragma GCC target("avx2,fma")

#define TANDEM_ISA avx2_code
#define TANDEM_LANES 8
#define TANDEM_TILE_ROWS 6
#include "simd.h"
// simd.h defines what the others stand on.
#include "linear.h"
#include "attention.h"
#include "forward.h"

namespace tandem {
const Entry avx2 = {avx2_code::to_last_kv, avx2_code::to_logits};
}
#endif
