// The quantise and dequantise kernels of this CPU, in order of preference. The two tables have the
// same rows.
#pragma once

#include <span>

#include "common/kernel.h"
#include "common/parallel.h"
#include "common/quantize_desc.h"

namespace jax_fp8 {

using RunQuantize = void (*)(const QuantizeDesc& desc, const QuantizeBuffers& buffers,
                             const ParallelFor& parallel_for);
using RunDequantize = void (*)(const DequantizeDesc& desc, const DequantizeBuffers& buffers,
                               const ParallelFor& parallel_for);
using QuantizeKernel = Kernel<QuantizeDesc, RunQuantize>;
using DequantizeKernel = Kernel<DequantizeDesc, RunDequantize>;

std::span<const QuantizeKernel> QuantizeKernels();
std::span<const DequantizeKernel> DequantizeKernels();

}  // namespace jax_fp8
