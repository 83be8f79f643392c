// The instruction sets that this processor and its kernel support.

#include "cpu.h"

#include <cstring>

#if defined(__clang__) && defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tandem {
namespace {

#if defined(__x86_64__)
// Linux gives a process the AMX tiles only on request, which must come before their first use. See
// https://docs.kernel.org/arch/x86/xstate.html.
bool amx_permitted() {
#ifdef __linux__
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return permitted;
#else
    return false;
#endif
}

bool has_amx() {
#ifdef __clang__  // clang 14 does not know the name
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
#else
    return __builtin_cpu_supports("amx-bf16");
#endif
}
#endif

}  // namespace

bool cpu_has(const char* instructions) {
    const auto is = [instructions](const char* name) { return !std::strcmp(instructions, name); };
    if (is("plain")) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    // All processors with AVX2 have F16C, which clang 14 cannot ask for.
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
    if (is("avx2")) return true;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return false;
    if (is("avx512")) return true;
#ifdef TANDEM_KNOWS_BF16
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni"))
        return false;
    if (is("avx512_bf16")) return true;
    if (is("amx")) return has_amx() && amx_permitted();
#endif
#endif
#if defined(__aarch64__)
    if (is("neon")) return true;
#endif
    return false;
}

}  // namespace tandem

// Returns the best instruction set of this processor, whether the kernels have it or not.
extern "C" const char* tandem_best_instructions() {
    for (const char* name : {"amx", "avx512_bf16", "avx512", "avx2", "neon"})
        if (tandem::cpu_has(name)) return name;
    return "plain";
}
