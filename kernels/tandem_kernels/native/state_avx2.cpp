// The kernels of layers with a state for processors with AVX2.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "state.h"

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
#include "simd.h"
// simd.h comes first, because the other headers use it.
#include "state_functions.h"
#include "state_kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
