#include "cpu/quantize_kernels.h"

#include <string>

#include "cpu/features.h"
#include "cpu/quantize_blocks.h"
#include "cpu/quantize_row_ops.h"

namespace jax_fp8 {
namespace {

using RowOps = const QuantizeRowOps* (*)();

// A row takes every request or none: what decides is the machine and the build.
template <class Desc>
std::string WhyNotAvx512(const Desc&) {
  if (Avx512QuantizeRowOps() == nullptr) {
    return "this build has no AVX-512 code (the compiler or the target does not know it)";
  }
  if (!Features().avx512) return "this CPU has no AVX-512 F, BW, DQ and VL";
  return "";
}

template <class Desc>
std::string WhyNotAvx2(const Desc&) {
  if (Avx2QuantizeRowOps() == nullptr) {
    return "this build has no AVX2 code (the compiler or the target does not know it)";
  }
  if (!Features().avx2) return "this CPU has no AVX2, FMA and F16C";
  return "";
}

template <class Desc>
std::string Always(const Desc&) {
  return "";
}

template <RowOps row_ops>
void RunQuantizeWith(const QuantizeDesc& desc, const QuantizeBuffers& buffers,
                     const ParallelFor& parallel_for) {
  QuantizeBlocks(*row_ops(), desc, buffers, parallel_for);
}

template <RowOps row_ops>
void RunDequantizeWith(const DequantizeDesc& desc, const DequantizeBuffers& buffers,
                       const ParallelFor& parallel_for) {
  DequantizeBlocks(*row_ops(), desc, buffers, parallel_for);
}

constexpr QuantizeKernel kQuantizeKernels[] = {
    {"avx512", WhyNotAvx512, RunQuantizeWith<Avx512QuantizeRowOps>},
    {"avx2", WhyNotAvx2, RunQuantizeWith<Avx2QuantizeRowOps>},
    {"scalar", Always, RunQuantizeWith<ScalarQuantizeRowOps>},
};

constexpr DequantizeKernel kDequantizeKernels[] = {
    {"avx512", WhyNotAvx512, RunDequantizeWith<Avx512QuantizeRowOps>},
    {"avx2", WhyNotAvx2, RunDequantizeWith<Avx2QuantizeRowOps>},
    {"scalar", Always, RunDequantizeWith<ScalarQuantizeRowOps>},
};

}  // namespace

std::span<const QuantizeKernel> QuantizeKernels() { return kQuantizeKernels; }

std::span<const DequantizeKernel> DequantizeKernels() { return kDequantizeKernels; }

}  // namespace jax_fp8
