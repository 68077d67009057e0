// The readable GEMM: the numbers contract as three loops, for every machine and as the yardstick
// that faster rows are compared with, bit for bit.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/scalar_operand.h"

namespace jax_fp8 {
namespace {

float OutputElement(const ScalarOperand& lhs, const ScalarOperand& rhs, int64_t row, int64_t col,
                    int64_t size_k, bool scales_vary_along_k) {
  float acc = 0;
  for (int64_t begin = 0, end; begin < size_k; begin = end) {
    end = std::min({lhs.NextTile(begin), rhs.NextTile(begin), size_k});
    float partial = 0;
    for (int64_t k = begin; k < end; ++k) {
      partial = std::fma(lhs.Value(row, k), rhs.Value(col, k), partial);
    }
    const float scale = lhs.Scale(row, begin) * rhs.Scale(col, begin);
    if (!scales_vary_along_k) return partial == 0 ? 0 : partial * scale;
    // A zero partial adds nothing even if the scales are, or overflow to, infinity.
    if (partial != 0) acc = std::fma(partial, scale, acc);
  }
  return acc;
}

}  // namespace

bool RunGemmScalar(const GemmDesc& desc, std::span<const GemmBuffers> batch,
                   const ParallelFor& parallel_for) {
  const bool scales_vary_along_k = desc.lhs.tile_k < desc.k || desc.rhs.tile_k < desc.k;
  parallel_for(static_cast<int64_t>(batch.size()) * desc.m, [&](int64_t task) {
    const GemmBuffers& buffers = batch[task / desc.m];
    const int64_t row = task % desc.m;
    const ScalarOperand lhs(desc.lhs, buffers.lhs), rhs(desc.rhs, buffers.rhs);
    for (int64_t col = 0; col < desc.n; ++col) {
      const float value = OutputElement(lhs, rhs, row, col, desc.k, scales_vary_along_k);
      StoreElement(value, desc.out, buffers.out, row * desc.n + col);
    }
  });
  return true;
}

}  // namespace jax_fp8
