// The request of one scaled GEMM: out(m,n) = sum over k of lhs(m,k)·rhs(n,k), with scales per tile.
// GemmDesc is what a kernel decides on (printed in one line by explain); GemmBuffers is what it
// runs on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/fp8.h"
#include "common/machine.h"

namespace jax_fp8 {

enum class OutType : uint8_t { kF32, kBF16, kF16 };

// What one operand looks like to the contraction: `rows` is m for lhs and n for rhs.
struct OperandDesc {
  Format format;
  bool k_contiguous;       // "mk"/"nk" in memory; false: "km"/"kn"
  int64_t tile_rows;       // rows that one scale covers, 1 … rows
  int64_t tile_k;          // k that one scale covers, 1 … k
  bool in_panels = false;  // a prepared rhs, see OperandBuffer; never k_contiguous
};

struct GemmDesc {
  int64_t m, n, k;
  OperandDesc lhs, rhs;
  OutType out;
  const Machine* machine = nullptr;  // whose accumulator to emulate; null: the kernel's own
  int64_t promotion_interval = 0;    // k after which a sum is added to an FP32 one; 0: none
  int64_t split_k = 1;               // parts of k with sums of their own, added at the end
  bool any_order = false;            // native kernels need not add up in the order of k

  // Whether the request is for the kernels that emulate: FP32 sums in order are every kernel's own.
  bool is_emulated() const {
    return machine != nullptr && (machine != FindMachine("fp32") || split_k > 1);
  }
};

// Columns of a prepared rhs that lie together: a cache line of codes.
inline constexpr int64_t kPanelCols = 64;

// One operand of one matrix product.
//
// The code of (row r, index k) is values[r * leading_stride + k] where k_contiguous, and else
// values[r / kPanelCols * panel_stride + r % kPanelCols + k * leading_stride]: a prepared rhs has
// its panels one after another in memory, any other matrix has panel_stride = kPanelCols.
//
// Scales are addressed by strides, so that no caller has to transpose them: the scale of (r, k) is
// scale[r / tile_rows * scale_row_stride + k / tile_k * scale_k_stride].
struct OperandBuffer {
  const uint8_t* values;
  int64_t leading_stride;  // elements from one row to the next (k_contiguous) or one k to the next
  int64_t panel_stride = kPanelCols;
  const float* scale;
  int64_t scale_row_stride, scale_k_stride;
};

inline const uint8_t* CodeOf(const OperandDesc& desc, const OperandBuffer& buffer, int64_t row,
                             int64_t k) {
  if (desc.k_contiguous) return buffer.values + row * buffer.leading_stride + k;
  return buffer.values + row / kPanelCols * buffer.panel_stride + row % kPanelCols +
         k * buffer.leading_stride;
}

// One product of a batch; `out` is row-major with row stride n.
struct GemmBuffers {
  OperandBuffer lhs, rhs;
  void* out;
};

// "m=17 n=64 k=128 e4m3fn[1x128,mk]·e5m2[128x128,nk]->f32"
std::string ToString(const GemmDesc& desc);

}  // namespace jax_fp8
