// Weights [out, in], row by row, into panels of 16 outputs.

#pragma once

#include "decoder.h"

namespace tandem {

// `panels` has room for (out rounded up to 16) * in elements of `kind` (BF16_PAIRS: `in` rounded up
// to 32), which are bf16 for both kinds of bf16; `scales` for `out` floats,
// used for I8 only: the largest weight of an output becomes 127.
void pack(const void* weights, int32_t weights_kind, int64_t out, int64_t in, int32_t kind,
          void* panels, float* scales);

// Weights in fp8 (fp8.h), into panels with room for all inputs up to a multiple of 32. False: one of
// them is NaN.
bool pack_fp8(const uint8_t* weights, int64_t out, int64_t in, int32_t kind, uint8_t* panels);

// Rows of blocks (blocks.h) become the outputs first_output.. of panels that begin as zeros. False:
// there is no such type.
bool pack_blocks(const void* blocks, int32_t type, int64_t rows, int64_t in, int64_t first_output,
                 void* panels);

// The same rows as numbers, to the bit as gguf's own package has them.
bool widen_blocks(const void* blocks, int32_t type, int64_t rows, int64_t in, float* to);

}  // namespace tandem
