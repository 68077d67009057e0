#include "cpu/features.h"

namespace jax_fp8 {

const CpuFeatures& Features() {
  static const CpuFeatures features = [] {
    CpuFeatures found{};
#if defined(__x86_64__)
    // NOTE: these report an AVX-512 feature only if XCR0 says that the system saves its registers.
    __builtin_cpu_init();
    found.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    found.avx512_vbmi = found.avx512 && __builtin_cpu_supports("avx512vbmi");
    found.avx512_bf16 = found.avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return found;
  }();
  return features;
}

}  // namespace jax_fp8
