#include "cpu/kernels.h"

#include <string>

#include "cpu/features.h"
#include "cpu/gemm_packed.h"

namespace jax_fp8 {
namespace {

// Both rows compute the fp32 model, of which promotion_interval is no part: every piece of k is one
// chain of FP32 FMAs whatever its length.
std::string WhyNotFp32Model(const GemmDesc& desc) {
  if (desc.accumulation == "native" || desc.accumulation == "fp32") return "";
  return "accumulation '" + desc.accumulation +
         "' is not what this row computes: it is the fp32 model";
}

std::string WhyNotAvx512Bf16(const GemmDesc& desc) {
  if (kPackedGemmAvx512Bf16 == nullptr) {
    return "this build has no AVX512_BF16 code (the compiler or the target does not know it)";
  }
  if (!Features().avx512_bf16) return "this CPU has no AVX512_BF16";
  if (!Features().avx512_vbmi) return "this CPU has no AVX512_VBMI";
  return WhyNotFp32Model(desc);
}

constexpr GemmKernel kGemmKernels[] = {
    {"avx512bf16", WhyNotAvx512Bf16, RunGemmAvx512Bf16},
    {"scalar", WhyNotFp32Model, RunGemmScalar},
};

}  // namespace

std::span<const GemmKernel> GemmKernels() { return kGemmKernels; }

}  // namespace jax_fp8
