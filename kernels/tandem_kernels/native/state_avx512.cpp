// The kernels of layers with a state for processors with AVX-512.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "state.h"

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
#include "simd.h"
// simd.h comes first, because the other headers use it.
#include "state_functions.h"
#include "state_kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
