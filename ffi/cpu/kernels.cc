#include "cpu/kernels.h"

#include <string>

#include "cpu/features.h"
#include "cpu/gemm_packed.h"

namespace jax_fp8 {
namespace {

using PackedIsa = const PackedGemmIsa* (*)();

// Every row computes the fp32 model, of which promotion_interval is no part: every piece of k is
// one chain of FP32 FMAs whatever its length.
std::string WhyNotFp32Model(const GemmDesc& desc) {
  for (Format format : {desc.lhs.format, desc.rhs.format}) {
    if (Info(format).is_fnuz) return std::string(Info(format).name) + " is not an OCP format";
  }
  if (desc.machine == nullptr && desc.split_k > 1) {
    return "this row adds all k in order; split_k needs accumulation='fp32' or another model";
  }
  return "";
}

std::string NotBuilt(const std::string& isa) {
  return "this build has no " + isa + " code (the compiler or the target does not know it)";
}

std::string WhyNotAmx(const GemmDesc& desc) {
  if (PackedGemmAmx() == nullptr) return NotBuilt("AMX-BF16");
  if (!Features().amx_bf16) return "this CPU, or its system, has no AMX-BF16";
  if (!Features().avx512_vbmi) return "this CPU has no AVX512_VBMI";
  if (!desc.any_order) {
    return "it adds up in another order: runs where forced, or under deterministic(False)";
  }
  return WhyNotFp32Model(desc);
}

std::string WhyNotAvx512Bf16(const GemmDesc& desc) {
  if (PackedGemmAvx512Bf16() == nullptr) return NotBuilt("AVX512_BF16");
  if (!Features().avx512_bf16) return "this CPU has no AVX512_BF16";
  if (!Features().avx512_vbmi) return "this CPU has no AVX512_VBMI";
  return WhyNotFp32Model(desc);
}

std::string WhyNotAvx512Vbmi(const GemmDesc& desc) {
  if (PackedGemmAvx512Vbmi() == nullptr) return NotBuilt("AVX512_VBMI");
  if (!Features().avx512_vbmi) return "this CPU has no AVX512_VBMI";
  return WhyNotFp32Model(desc);
}

std::string WhyNotAvx512(const GemmDesc& desc) {
  if (PackedGemmAvx512() == nullptr) return NotBuilt("AVX-512");
  if (!Features().avx512) return "this CPU has no AVX-512 F, BW, DQ and VL";
  return WhyNotFp32Model(desc);
}

std::string WhyNotAvx2(const GemmDesc& desc) {
  if (PackedGemmAvx2() == nullptr) return NotBuilt("AVX2");
  if (!Features().avx2) return "this CPU has no AVX2, FMA and F16C";
  return WhyNotFp32Model(desc);
}

template <PackedIsa isa>
bool RunPacked(const GemmDesc& desc, std::span<const GemmBuffers> batch,
               const ParallelFor& parallel_for) {
  return RunPackedGemm(*isa(), desc, batch, parallel_for);
}

constexpr GemmKernel kGemmKernels[] = {
    {"amx", WhyNotAmx, RunPacked<PackedGemmAmx>},
    {"avx512bf16", WhyNotAvx512Bf16, RunPacked<PackedGemmAvx512Bf16>},
    {"avx512vbmi", WhyNotAvx512Vbmi, RunPacked<PackedGemmAvx512Vbmi>},
    {"avx512", WhyNotAvx512, RunPacked<PackedGemmAvx512>},
    {"avx2", WhyNotAvx2, RunPacked<PackedGemmAvx2>},
    {"scalar", WhyNotFp32Model, RunGemmScalar},
};

}  // namespace

std::span<const GemmKernel> GemmKernels() { return kGemmKernels; }

}  // namespace jax_fp8
