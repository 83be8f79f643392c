// Weights [out, in], row by row, into panels of 16 outputs.

#pragma once

#include "decoder.h"

namespace tandem {

// `panels` has room for (out rounded up to 16) * in elements of `kind` (BF16_PAIRS: `in` rounded up
// to 32), which are bf16 for both kinds of bf16; `scales` for `out` floats,
// used for I8 only: the largest weight of an output becomes 127.
void pack(const void* weights, int32_t weights_kind, int64_t out, int64_t in, int32_t kind,
          void* panels, float* scales);

}  // namespace tandem
