// The kernels of layers with a state for arm64 processors.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "state.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define TANDEM_ISA neon_code
#define TANDEM_LANES 4
#define TANDEM_NEON
#include "simd.h"
// simd.h comes first, because the other headers use it.
#include "state_functions.h"
#include "state_kernels.h"
#endif
