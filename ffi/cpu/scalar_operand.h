// Element access for the readable kernels.
#pragma once

#include <cstdint>

#include "common/gemm_desc.h"
#include "common/rounding.h"

namespace jax_fp8 {

// One operand, whatever its layout.
class ScalarOperand {
 public:
  ScalarOperand(const OperandDesc& desc, const OperandBuffer& buffer)
      : desc_(desc), buffer_(buffer), table_(DecodeTable(desc.format).data()) {}

  Format format() const { return desc_.format; }
  int64_t k_stride() const { return desc_.k_contiguous ? 1 : buffer_.leading_stride; }
  const uint8_t* Codes(int64_t row, int64_t k) const { return CodeOf(desc_, buffer_, row, k); }
  float Value(int64_t row, int64_t k) const { return Bf16BitsToFloat(table_[*Codes(row, k)]); }
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

inline void StoreElement(float value, OutType type, void* out, int64_t index) {
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

}  // namespace jax_fp8
