// The readable accumulators: one output element, one step at a time, in integers. The faster rows
// are compared with these bit for bit, and hand them what they leave out: NaN, infinity and extreme
// scales.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "common/fp8.h"
#include "common/machine.h"

namespace jax_fp8 {

// A number as the alignment sees it: significand · 2^(exponent - 3).
struct Decoded {
  int8_t significand;  // with its sign; at most 15 in magnitude
  int8_t exponent;     // of the binade, or of the subnormals
  bool is_nan, is_inf;
};

// The NaN that machines return (MMA-Sim, arXiv 2511.10909). Every row returns it, whatever made it.
inline constexpr float kMachineNan = std::bit_cast<float>(0x7FFFFFFFu);

// What `machine` makes of the 256 codes of `format`.
const std::array<Decoded, 256>& DecodedTable(const Machine& machine, Format format);

// One operand of one chain: element k is table[codes[k * stride]].
struct DecodedCodes {
  const uint8_t* codes;
  int64_t stride;
  const std::array<Decoded, 256>* table;

  const Decoded& operator[](int64_t k) const { return (*table)[codes[k * stride]]; }
  DecodedCodes From(int64_t k) const { return {codes + k * stride, stride, table}; }
};

// The accumulator `c` after the products of `num_k` elements, at most machine.step. `scale` is the
// product of their two E8M0 scales' exponents where the machine has scales inside, else 0. FP16 and
// BF16 accumulators are passed as FP32 values. Not for pairwise and exact sums, which have no
// steps.
float Step(const Machine& machine, const DecodedCodes& lhs, const DecodedCodes& rhs, int num_k,
           int scale_exponent, float c);

// The sum of a whole piece of k, for every machine. `scale_exponent(k)` is asked once a step.
template <class ScaleExponent>
float SumPiece(const Machine& machine, const DecodedCodes& lhs, const DecodedCodes& rhs,
               int64_t num_k, const ScaleExponent& scale_exponent);

// The sum of numbers that are multiples of 2^-40 and below 2^80, rounded once to FP32.
float RoundSum(const double (&terms)[3]);

float SumPairwise(const DecodedCodes& lhs, const DecodedCodes& rhs, int64_t num_k);
float SumExactly(const DecodedCodes& lhs, const DecodedCodes& rhs, int64_t num_k);

template <class ScaleExponent>
float SumPiece(const Machine& machine, const DecodedCodes& lhs, const DecodedCodes& rhs,
               int64_t num_k, const ScaleExponent& scale_exponent) {
  if (machine.summation == Summation::kPairwise) return SumPairwise(lhs, rhs, num_k);
  if (machine.summation == Summation::kExact) return SumExactly(lhs, rhs, num_k);
  float c = 0;
  for (int64_t k = 0; k < num_k; k += machine.step) {
    const int n = static_cast<int>(num_k - k < machine.step ? num_k - k : machine.step);
    c = Step(machine, lhs.From(k), rhs.From(k), n, scale_exponent(k), c);
  }
  return c;
}

}  // namespace jax_fp8
