// The readable emulation of a whole GEMM, for every accumulator.
#include <cmath>

#include "cpu/accumulator.h"
#include "cpu/emulate.h"
#include "cpu/k_pieces.h"
#include "cpu/scalar_operand.h"

namespace jax_fp8 {
namespace {

// Exponent of an E8M0 scale that was converted to FP32: a power of two down to 2^-127, or NaN.
int ScaleExponent(float scale) { return std::ilogb(scale); }

float SumOfPiece(const GemmDesc& desc, const GemmBuffers& buffers, const KPiece& piece, int64_t row,
                 int64_t col) {
  const Machine& machine = *desc.machine;
  const ScalarOperand lhs(desc.lhs, buffers.lhs), rhs(desc.rhs, buffers.rhs);
  auto codes = [&](const ScalarOperand& operand, int64_t r) {
    return DecodedCodes{operand.Codes(r, piece.begin), operand.k_stride(),
                        &DecodedTable(machine, operand.format())};
  };
  bool nan_scale = false;
  auto scale_exponent = [&](int64_t k) {
    if (!machine.scales_inside) return 0;
    const float a = lhs.Scale(row, piece.begin + k), b = rhs.Scale(col, piece.begin + k);
    nan_scale |= std::isnan(a) || std::isnan(b);
    return nan_scale ? 0 : ScaleExponent(a) + ScaleExponent(b);
  };
  const float sum =
      SumPiece(machine, codes(lhs, row), codes(rhs, col), piece.end - piece.begin, scale_exponent);
  return nan_scale ? kMachineNan : sum;
}

}  // namespace

float EmulateElement(const GemmDesc& desc, const GemmBuffers& buffers, int64_t row, int64_t col) {
  const ScalarOperand lhs(desc.lhs, buffers.lhs), rhs(desc.rhs, buffers.rhs);
  const bool scales_inside = desc.machine->scales_inside;
  const bool scales_vary_along_k =
      !scales_inside && (desc.lhs.tile_k < desc.k || desc.rhs.tile_k < desc.k);
  const KPieces pieces(desc);
  float total = 0, acc = 0;
  for (int64_t k = 0; k < desc.k;) {
    const KPiece piece = pieces.From(k);
    const float partial = SumOfPiece(desc, buffers, piece, row, col);
    if (piece.starts_part) acc = 0;
    if (!scales_vary_along_k) {
      acc += partial;
    } else if (partial != 0) {
      acc = std::fma(partial, lhs.Scale(row, k) * rhs.Scale(col, k), acc);
    }
    if (piece.ends_part) total = piece.in_first_part ? acc : total + acc;
    k = piece.end;
  }
  const bool scales_at_the_end = !scales_vary_along_k && !scales_inside && total != 0;
  if (scales_at_the_end) total *= lhs.Scale(row, 0) * rhs.Scale(col, 0);
  return std::isnan(total) ? kMachineNan : total;
}

bool RunEmulateScalar(const GemmDesc& desc, std::span<const GemmBuffers> batch,
                      const ParallelFor& parallel_for) {
  parallel_for(static_cast<int64_t>(batch.size()) * desc.m, [&](int64_t task) {
    const GemmBuffers& buffers = batch[task / desc.m];
    const int64_t row = task % desc.m;
    for (int64_t col = 0; col < desc.n; ++col) {
      StoreElement(EmulateElement(desc, buffers, row, col), desc.out, buffers.out,
                   row * desc.n + col);
    }
  });
  return true;
}

}  // namespace jax_fp8
