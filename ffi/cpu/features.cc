#include "cpu/features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace jax_fp8 {
namespace {

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows F16C.
bool HasF16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}

// AMX tiles and tdpbf16ps. Linux hands out the registers of the tiles (8 KB a thread) on demand:
// a process that did not ask is killed by its first tile instruction.
bool HasAmxBf16() {
#if defined(__linux__)
  constexpr unsigned kOsxsave = 1u << 27;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  constexpr unsigned kTileState = 3u << 17;  // of XCR0: configuration and data
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & kOsxsave) == 0) return false;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  unsigned xcr0_low, xcr0_high;
  asm volatile("xgetbv" : "=a"(xcr0_low), "=d"(xcr0_high) : "c"(0));
  if ((xcr0_low & kTileState) != kTileState) return false;
  constexpr long kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
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
    found.amx_bf16 = HasAmxBf16();
#endif
    return found;
  }();
  return features;
}

}  // namespace jax_fp8
