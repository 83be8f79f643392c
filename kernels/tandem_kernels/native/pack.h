// Packs row-major weights [out, in] into panels of 16 outputs (decoder.h).

#pragma once

#include "decoder.h"

namespace tandem {

// Packs weights of the kind `weights_kind` as `kind`. `panels` must have room for
// (out rounded up to 16) * in elements; for BF16_PAIRS, `in` is rounded up to 32. For I8, the
// weights of an output are divided by a scale so that the largest becomes 127. The scales are
// written to `scales`, which must have room for `out` floats.
void pack(const void* weights, int32_t weights_kind, int64_t out, int64_t in, int32_t kind,
          void* panels, float* scales);

// Packs fp8 weights as described in fp8.h. Returns false if a weight is NaN.
bool pack_fp8(const uint8_t* weights, int64_t out, int64_t in, int32_t kind, uint8_t* panels);

// Packs a matrix of quantized blocks (blocks.h) into `panels`, which must be zeros at first. Row 0
// becomes output `first_output`. Returns false if the type is not supported.
bool pack_blocks(const void* blocks, int32_t type, int64_t rows, int64_t in, int64_t first_output,
                 void* panels);

// Dequantizes a matrix of quantized blocks. The result is bit-identical to that of the Python
// package gguf. Returns false if the type is not supported.
bool widen_blocks(const void* blocks, int32_t type, int64_t rows, int64_t in, float* to);

}  // namespace tandem
