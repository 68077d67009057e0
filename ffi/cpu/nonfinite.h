// Where the operands of a product hold NaN or infinity: the vectorised emulation leaves the outputs
// that meet one to the readable code.
#pragma once

#include <cstdint>
#include <vector>

#include "common/gemm_desc.h"
#include "common/parallel.h"

namespace jax_fp8 {

// What a row of an operand holds.
enum NonFinite : uint8_t { kAllFinite = 0, kHasInf = 1, kHasNan = 2 };

struct NonFiniteOutputs {
  // Of lhs, an entry per m, and of rhs, an entry per n: a set of NonFinite.
  std::vector<uint8_t> rows, cols;
  bool any = false;

  NonFiniteOutputs(const GemmDesc& desc, const GemmBuffers& buffers,
                   const ParallelFor& parallel_for);
};

}  // namespace jax_fp8
