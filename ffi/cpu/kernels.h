// The GEMM kernels of this CPU, in order of preference.
#pragma once

#include <span>
#include <string_view>

#include "common/gemm_desc.h"
#include "common/kernel.h"
#include "common/parallel.h"

namespace jax_fp8 {

struct PackedGemmIsa;

// Runs one product per element of `batch`, all of `desc`'s sizes, each >= 1. Returns false, with
// the outputs undefined, only if scratch memory cannot be had.
using RunGemm = bool (*)(const GemmDesc& desc, std::span<const GemmBuffers> batch,
                         const ParallelFor& parallel_for);
using GemmKernel = Kernel<GemmDesc, RunGemm>;

// `any_order`: with the rows that add up in an order of their own, which refuse other requests.
std::span<const GemmKernel> GemmKernels(bool any_order = true);

// GemmDesc::any_order of a call that asks for it, or for the row `forced`. For few rows of lhs
// memory is the limit, and the rows that add up in order are the ones that are made for it.
inline bool MayReorder(bool asked, std::string_view forced, int64_t m) {
  constexpr int64_t kFewRows = 4;
  return !forced.empty() || (asked && m > kFewRows);
}

bool RunGemmScalar(const GemmDesc&, std::span<const GemmBuffers>, const ParallelFor&);
// The driver of every other row, whose code for one ISA is `isa` (see gemm_packed.h).
bool RunPackedGemm(const PackedGemmIsa& isa, const GemmDesc&, std::span<const GemmBuffers>,
                   const ParallelFor&);

}  // namespace jax_fp8
