// Finds the instruction sets that the processor supports.

#pragma once

#include <initializer_list>

// Older compilers do not support AVX512_BF16 and AMX.
#if defined(__x86_64__) && (__GNUC__ >= 11 || __clang_major__ >= 14)
#define TANDEM_KNOWS_BF16
#endif

namespace tandem {

// Returns whether this processor supports an instruction set: amx, avx512_bf16, avx512, avx2, neon
// or plain, which each processor supports.
bool cpu_has(const char* instructions);

}  // namespace tandem
