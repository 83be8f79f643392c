// The decoder for any processor.

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

#define TANDEM_ISA plain_code
#define TANDEM_LANES 4
#define TANDEM_TILE_ROWS 2
#define TANDEM_SUMS 8
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
const Entry plain = {
    plain_code::to_last_kv, plain_code::to_logits, BF16,
    plain_code::product_gflops, plain_code::read_gb_per_s,
    plain_code::measure, plain_code::draw, plain_code::convolve,
    plain_code::scan_states};
}
