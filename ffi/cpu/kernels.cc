#include "cpu/kernels.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <utility>

#include "cpu/features.h"
#include "cpu/gemm_packed.h"
#include "cpu/peak_loops.h"

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
constexpr size_t kRowsOfOtherOrder = 1;  // the first ones
constexpr size_t kPairsRow = 1, kFmaRow = 2;

// The most FLOP a second in a few microseconds of an instruction.
double Rate(const PeakLoops& loops) {
  constexpr int kRepeats = 10, kRounds = 400;
  double best = 0;
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const auto flops = static_cast<double>(loops.multiply(kRounds));
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::max(best, flops / elapsed.count());
  }
  return best;
}

// Whether FP32 FMAs multiply faster than vdpbf16ps: Sapphire Rapids does two FMAs a cycle and half
// a vdpbf16ps, Zen 4 one of each. It is measured, since no flag of the CPU tells; both rows have
// the same bits. At about the same rate pairs are better: packed, they take half the memory.
bool FmasAreFaster() {
  constexpr double kMargin = 1.2;
  const bool runs_both = PeakLoopsAvx512Bf16() != nullptr && PeakLoopsAvx512() != nullptr &&
                         Features().avx512_bf16 && Features().avx512_vbmi;
  return runs_both && Rate(*PeakLoopsAvx512()) > kMargin * Rate(*PeakLoopsAvx512Bf16());
}

}  // namespace

std::span<const GemmKernel> GemmKernels(bool any_order) {
  static const auto rows = [] {
    auto ordered = std::to_array(kGemmKernels);
    if (FmasAreFaster()) std::swap(ordered[kPairsRow], ordered[kFmaRow]);
    return ordered;
  }();
  return std::span(rows).subspan(any_order ? 0 : kRowsOfOtherOrder);
}

}  // namespace jax_fp8
