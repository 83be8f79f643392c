// Packs row-major weights [out, in] into panels of 16 outputs.

#pragma once

#include "decoder.h"

namespace tandem {

// `panels` has room for (out rounded up to 16) * in elements of `kind` (BF16_PAIRS: `in` rounded up
// to 32). `scales` has room for `out` floats and is used for I8 only. For I8, the largest weight of
// an output becomes 127.
void pack(const void* weights, int32_t weights_kind, int64_t out, int64_t in, int32_t kind,
          void* panels, float* scales);

// Packs fp8 weights (fp8.h) into panels with room for all inputs, rounded up to a multiple of 32.
// Returns false if a weight is NaN.
bool pack_fp8(const uint8_t* weights, int64_t out, int64_t in, int32_t kind, uint8_t* panels);

// Packs rows of blocks (blocks.h) as the outputs from first_output on of zero-initialized panels.
// Returns false if the type is not supported.
bool pack_blocks(const void* blocks, int32_t type, int64_t rows, int64_t in, int64_t first_output,
                 void* panels);

// Dequantizes the same rows, bit-identical to the gguf package. Returns false if the type is not
// supported.
bool widen_blocks(const void* blocks, int32_t type, int64_t rows, int64_t in, float* to);

}  // namespace tandem
