// The decoder for any processor.

#include <omp.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "decoder.h"
#include "scratch.h"

#define TANDEM_ISA plain_code
#define TANDEM_LANES 4
#define TANDEM_TILE_ROWS 2
#include "simd.h"
// simd.h defines what the others stand on.
#include "linear.h"
#include "attention.h"
#include "forward.h"

namespace tandem {
const Entry plain = {plain_code::to_last_kv, plain_code::to_logits};
}
