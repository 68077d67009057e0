// The GEMM kernels of this CPU, in order of preference.
#pragma once

#include <span>

#include "common/gemm_desc.h"
#include "common/kernel.h"
#include "common/parallel.h"

namespace jax_fp8 {

// Runs one product per element of `batch`, all of `desc`'s sizes, each >= 1. Returns false, with
// the outputs undefined, only if scratch memory cannot be had.
using RunGemm = bool (*)(const GemmDesc& desc, std::span<const GemmBuffers> batch,
                         const ParallelFor& parallel_for);
using GemmKernel = Kernel<GemmDesc, RunGemm>;

std::span<const GemmKernel> GemmKernels();

// The rows' entry points, each in its own file.
bool RunGemmScalar(const GemmDesc&, std::span<const GemmBuffers>, const ParallelFor&);
bool RunGemmAvx512Bf16(const GemmDesc&, std::span<const GemmBuffers>, const ParallelFor&);

}  // namespace jax_fp8
