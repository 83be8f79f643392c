// The kernels of layers with a state for processors with AMX for bf16.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu.h"
#include "state.h"

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
#define TANDEM_PAIRS
#include "simd.h"
// simd.h comes first, because the other headers use it.
#include "state_functions.h"
#include "state_kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
