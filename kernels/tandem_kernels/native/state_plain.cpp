// The kernels of layers with a state for any processor.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "state.h"

#define TANDEM_ISA plain_code
#define TANDEM_LANES 4
#include "simd.h"
// simd.h comes first, because the other headers use it.
#include "state_functions.h"
#include "state_kernels.h"
