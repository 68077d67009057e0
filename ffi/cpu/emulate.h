// The kernels that emulate an accumulator, in order of preference.
#pragma once

#include <cstdint>
#include <span>

#include "common/gemm_desc.h"
#include "cpu/kernels.h"

namespace jax_fp8 {

// Rows for requests with is_emulated().
std::span<const GemmKernel> EmulateKernels();

// Runs `row` and counts the overflows of an FP16 accumulator.
bool RunEmulate(const GemmKernel& row, const GemmDesc&, std::span<const GemmBuffers>,
                const ParallelFor&);

// The packed GEMM with the code of one ISA that emulates `machine`; null where this build or the
// ISA has none.
const PackedGemmIsa* EmulationAvx512(const Machine& machine);
const PackedGemmIsa* EmulationAvx2(const Machine& machine);

bool RunEmulateScalar(const GemmDesc&, std::span<const GemmBuffers>, const ParallelFor&);

// One output before it is rounded to its type.
float EmulateElement(const GemmDesc& desc, const GemmBuffers& buffers, int64_t row, int64_t col);

// Results of FP16 accumulators that were not finite although their operands were, in this process.
int64_t Fp16OverflowCount();

}  // namespace jax_fp8
