// The readable GEMM: the numbers contract as three loops, for every machine and as the yardstick
// that faster rows are compared with, bit for bit.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/rounding.h"
#include "cpu/kernels.h"

namespace jax_fp8 {
namespace {

// Element access to one operand, whatever its layout.
class Operand {
 public:
  Operand(const OperandDesc& desc, const OperandBuffer& buffer)
      : desc_(desc), buffer_(buffer), table_(DecodeTable(desc.format).data()) {}

  float Value(int64_t row, int64_t k) const {
    const int64_t index =
        desc_.k_contiguous ? row * buffer_.leading_stride + k : k * buffer_.leading_stride + row;
    return Bf16BitsToFloat(table_[buffer_.values[index]]);
  }
  float Scale(int64_t row, int64_t k) const {
    return buffer_.scale[row / desc_.tile_rows * buffer_.scale_row_stride +
                         k / desc_.tile_k * buffer_.scale_k_stride];
  }
  // The first k after `k` that has another scale.
  int64_t NextTile(int64_t k) const { return (k / desc_.tile_k + 1) * desc_.tile_k; }

 private:
  const OperandDesc& desc_;
  const OperandBuffer& buffer_;
  const uint16_t* table_;
};

float OutputElement(const Operand& lhs, const Operand& rhs, int64_t row, int64_t col,
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

void Store(float value, OutType type, void* out, int64_t index) {
  switch (type) {
    case OutType::kF32:
      static_cast<float*>(out)[index] = value;
      break;
    case OutType::kBF16:
      static_cast<uint16_t*>(out)[index] = FloatToBf16Bits(value);
      break;
    case OutType::kF16:
      static_cast<uint16_t*>(out)[index] = FloatToF16Bits(value);
      break;
  }
}

}  // namespace

bool RunGemmScalar(const GemmDesc& desc, std::span<const GemmBuffers> batch,
                   const ParallelFor& parallel_for) {
  const bool scales_vary_along_k = desc.lhs.tile_k < desc.k || desc.rhs.tile_k < desc.k;
  parallel_for(static_cast<int64_t>(batch.size()) * desc.m, [&](int64_t task) {
    const GemmBuffers& buffers = batch[task / desc.m];
    const int64_t row = task % desc.m;
    const Operand lhs(desc.lhs, buffers.lhs), rhs(desc.rhs, buffers.rhs);
    for (int64_t col = 0; col < desc.n; ++col) {
      const float value = OutputElement(lhs, rhs, row, col, desc.k, scales_vary_along_k);
      Store(value, desc.out, buffers.out, row * desc.n + col);
    }
  });
  return true;
}

}  // namespace jax_fp8
