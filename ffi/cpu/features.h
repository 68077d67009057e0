// What this CPU and operating system can run, found out once at run time.
#pragma once

namespace jax_fp8 {

struct CpuFeatures {
  bool avx2;         // AVX2, FMA and F16C
  bool avx512;       // F, BW, DQ and VL
  bool avx512_vbmi;  // vpermi2b: table look-ups in 128 bytes
  bool avx512_bf16;  // vdpbf16ps
  bool amx_bf16;     // tdpbf16ps, with the system's permission to use tiles
};

// Every flag includes the operating system's support for the registers.
const CpuFeatures& Features();

}  // namespace jax_fp8
