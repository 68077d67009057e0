#include "cpu/features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jax_fp8 {
namespace {

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows F16C.
bool HasF16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}

// NOTE: tile registers are 8 KB of a thread's state, which Linux saves only for processes that
// asked (Documentation/arch/x86/xstate.rst).
bool HasAmxBf16() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

const CpuFeatures& Features() {
  static const CpuFeatures features = [] {
    CpuFeatures found{};
#if defined(__x86_64__)
    // NOTE: these report a feature only if XCR0 says that the system saves its registers (F16C
    // needs those of AVX2).
    __builtin_cpu_init();
    found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c();
    found.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    found.avx512_vbmi = found.avx512 && __builtin_cpu_supports("avx512vbmi");
    found.avx512_bf16 = found.avx512 && __builtin_cpu_supports("avx512bf16");
    found.amx_bf16 = found.avx512_vbmi && HasAmxBf16();
#endif
    return found;
  }();
  return features;
}

}  // namespace jax_fp8
