// Packed operands of the vectorised emulation: plain data, one step of k at a time.
//
// How the arithmetic works. The alignment of a step needs, for each output, the largest exponent of
// its terms; then every term is cut toward zero at the same bit, and the cut terms are added
// exactly.
// - Exponents are bytes, biased so that those of two operands add up to the biased exponent of
// their
//   product, and 0 for a zero, which then never is the largest.
// - The accumulator lane starts at 1.5 · 2^x with x such that one unit in its last place is the bit
//   to cut at. A fused multiply-add that rounds down then adds floor(product) on that grid,
//   exactly.
// - Toward zero is one more than floor where a product is negative and not a multiple of the grid's
//   unit. Those are counted per output, in bytes: a product is no multiple if the exponents of the
//   lowest set bits of its operands add up to less than that of the unit. The count is added to the
//   integer that the lane's bits are, which lies within one binade.
#pragma once

#include <cstdint>

namespace jax_fp8 {

inline constexpr int kExponentBias = 127;
// The bias of a product's exponent is shared by its operands.
inline constexpr int kLhsBias = 63, kRhsBias = 64;
// Lowest set bit of a zero, or of an operand whose product cannot be negative: above every unit.
inline constexpr int kNoLowestBit = 50;

// One row of lhs. Bytes are repeated four times, for a broadcast of words.
template <class Real, int kStep, int kCols>
struct alignas(64) LhsStep {
  static constexpr int kPlaneBytes = kStep * kCols;

  Real value[kStep];
  uint32_t exponent[kStep];
  uint32_t lowest[kStep];  // exponent of the lowest set bit
  uint32_t plane[kStep];   // byte offset from RhsStep::lowest[0] to the plane for this sign
};

// kCols columns of rhs.
template <class Real, int kStep, int kCols>
struct alignas(64) RhsStep {
  Real value[kStep][kCols];
  uint8_t exponent[kStep][kCols];
  // [0] is for a positive lhs, and has the lowest bit of negative rhs only; [1] the other way
  // round.
  int8_t lowest[2][kStep][kCols];
};

// For sums that are exact: values as double, those of E5M2 below 1 apart from the others.
template <int kStep>
struct alignas(64) LhsHalves {
  double value[kStep];
  double low[kStep];
  bool has_low;
};
template <int kStep, int kCols>
struct alignas(64) RhsHalves {
  double value[kStep][kCols];
  double low[kStep][kCols];
  bool has_low;
};

// For other sums: only the values.
template <int kStep>
struct alignas(64) LhsValues {
  float value[kStep];
};
template <int kStep, int kCols>
struct alignas(64) RhsValues {
  float value[kStep][kCols];
};

}  // namespace jax_fp8
