#include "cpu/accumulator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace jax_fp8 {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

using Int128 = __int128;

int64_t ShiftTowardZero(int64_t value, int right) {
  if (right <= 0) return value * (int64_t{1} << -right);
  if (right > 62) return 0;
  return value < 0 ? -(-value >> right) : value >> right;
}

int64_t ShiftDown(int64_t value, int right) {  // toward minus infinity
  if (right <= 0) return value * (int64_t{1} << -right);
  return value >> std::min(right, 63);
}

// The type that a sum is rounded to.
struct FloatType {
  int precision;      // significant bits
  int unit_exponent;  // of the smallest subnormal
  int max_exponent;   // of the binade of the largest value
  bool to_nearest;    // to even; else toward zero
};

constexpr FloatType TypeOf(Rounding rounding) {
  switch (rounding) {
    case Rounding::kRzE8M13:
      return {14, -126 - 13, 127, false};
    case Rounding::kRzFp32:
      return {24, -149, 127, false};
    case Rounding::kRneFp32:
      return {24, -149, 127, true};
    case Rounding::kRneFp16:
      return {11, -24, 15, true};
    case Rounding::kRneBf16:
      return {8, -133, 127, true};
  }
  return {};
}

int BitWidth(unsigned __int128 value) {
  const auto high = static_cast<uint64_t>(value >> 64);
  return high != 0 ? 64 + std::bit_width(high) : std::bit_width(static_cast<uint64_t>(value));
}

// sum · 2^unit, rounded once. Zero comes out as +0, what rounds to zero keeps its sign.
float Round(Int128 sum, int unit, Rounding rounding) {
  const FloatType type = TypeOf(rounding);
  unsigned __int128 magnitude = sum < 0 ? -static_cast<unsigned __int128>(sum) : sum;
  const int dropped = std::max(BitWidth(magnitude) - type.precision, type.unit_exponent - unit);
  if (dropped > 0) {
    if (dropped > 126) {
      magnitude = 0;
    } else {
      const unsigned __int128 half = static_cast<unsigned __int128>(1) << (dropped - 1);
      const unsigned __int128 rest = magnitude & (2 * half - 1);
      magnitude >>= dropped;
      if (type.to_nearest && (rest > half || (rest == half && (magnitude & 1)))) ++magnitude;
    }
    unit += dropped;
  }
  const bool overflows = magnitude != 0 && BitWidth(magnitude) - 1 + unit > type.max_exponent;
  const float value =
      overflows ? kInf : static_cast<float>(std::ldexp(static_cast<double>(magnitude), unit));
  return sum < 0 ? -value : value;
}

// A finite float as significand · 2^(exponent - 23).
struct DecodedFloat {
  int64_t significand;
  int exponent;
};

// `min_exponent` is that of the type's subnormals: -126, or -14 for FP16.
DecodedFloat Decode(float value, int min_exponent) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  int exponent = static_cast<int>(bits >> 23 & 0xFF);
  int64_t significand = bits & 0x7FFFFF;
  if (exponent != 0) significand |= 0x800000;
  exponent = std::max(exponent, 1) - 127;
  if (exponent < min_exponent) {
    significand >>= std::min(min_exponent - exponent, 24);  // exact: FP16 has 13 bits less
    exponent = min_exponent;
  }
  return {value < 0 ? -significand : significand, exponent};
}

// What the terms that are not finite make of the sum; 0 if there are none.
float Specials(const DecodedCodes& lhs, const DecodedCodes& rhs, int num_k, float c) {
  float sum = std::isfinite(c) ? 0 : c;
  for (int k = 0; k < num_k; ++k) {
    const Decoded &a = lhs[k], &b = rhs[k];
    if (a.is_nan || b.is_nan) return kMachineNan;
    if (!a.is_inf && !b.is_inf) continue;
    if ((!a.is_inf && a.significand == 0) || (!b.is_inf && b.significand == 0)) return kMachineNan;
    sum += (a.significand < 0) != (b.significand < 0) ? -kInf : kInf;
  }
  return std::isnan(sum) ? kMachineNan : sum;
}

// A product has 6 fraction bits.
struct Product {
  int64_t significand;
  int exponent;
};

Product Multiply(const Decoded& a, const Decoded& b, int scale_exponent, int zero_exponent) {
  const int significand = a.significand * b.significand;
  return {significand, significand != 0 ? a.exponent + b.exponent + scale_exponent : zero_exponent};
}

constexpr int kMaxStep = 32;

// T-FDPA and ST-FDPA of MMA-Sim (arXiv 2511.10909, section 4).
float AlignedStep(const Machine& machine, const DecodedCodes& lhs, const DecodedCodes& rhs,
                  int num_k, int scale_exponent, float c) {
  Product products[kMaxStep];
  const bool is_fp16 = machine.rounding == Rounding::kRneFp16;
  const DecodedFloat old = Decode(c, is_fp16 ? -14 : -126);
  int largest = old.significand != 0 ? old.exponent : machine.zero_exponent;
  for (int k = 0; k < num_k; ++k) {
    products[k] = Multiply(lhs[k], rhs[k], scale_exponent, machine.zero_exponent);
    largest = std::max(largest, products[k].exponent);
  }
  // Hardware pads a short step with zeros.
  if (num_k < machine.step) largest = std::max(largest, machine.zero_exponent);
  const int unit = largest - machine.fraction_bits;
  int64_t sum = 0;
  for (int k = 0; k < num_k; ++k) {
    sum += ShiftTowardZero(products[k].significand, unit - (products[k].exponent - 6));
  }
  if (old.significand != 0) sum += ShiftTowardZero(old.significand, unit - (old.exponent - 23));
  return Round(sum, unit, machine.rounding) + 0.0f;  // -0 becomes +0
}

// GTR-FDPA of MMA-Sim (arXiv 2511.10909): CDNA3's FP8 matrix core.
float GroupedStep(const Machine& machine, const DecodedCodes& lhs, const DecodedCodes& rhs,
                  int num_k, float c) {
  const int fraction_bits = machine.fraction_bits;                   // F
  constexpr int kWideBits = 31;                                      // F2
  int exponent[2] = {machine.zero_exponent, machine.zero_exponent};  // of the even, the odd k
  for (int k = 0; k < num_k; ++k) {
    const Product p = Multiply(lhs[k], rhs[k], 0, machine.zero_exponent);
    exponent[k % 2] = std::max(exponent[k % 2], p.exponent);
  }
  int64_t group[2] = {0, 0};
  for (int k = 0; k < num_k; ++k) {
    const Product p = Multiply(lhs[k], rhs[k], 0, machine.zero_exponent);
    const int unit = exponent[k % 2] - fraction_bits;
    if (p.significand != 0) group[k % 2] += ShiftTowardZero(p.significand, unit - (p.exponent - 6));
  }
  const int dot_exponent = std::max(exponent[0], exponent[1]);
  int64_t dot = 0;
  for (int i = 0; i < 2; ++i) {
    if (group[i] != 0) dot += ShiftDown(group[i], dot_exponent - exponent[i]);
  }
  const DecodedFloat old = Decode(c, -126);
  const int largest = std::max(dot_exponent, old.exponent);
  const int unit = largest - (kWideBits + 1);
  int64_t sum = 0;
  if (dot != 0) sum += ShiftDown(dot, unit - (dot_exponent - fraction_bits));
  // An accumulator so far below the products that rounding down would leave it -1 or 0 is dropped.
  if (old.exponent >= largest - fraction_bits - 1) {
    const int old_unit = largest - fraction_bits;
    sum += ShiftDown(old.significand, old_unit - (old.exponent - 23)) *
           (int64_t{1} << (kWideBits + 1 - fraction_bits));
  }
  // Down to F2 fraction bits of the sum's own binade, then to nearest even.
  const int binade = std::max(unit + BitWidth(std::abs(sum)) - 1, -126);
  const int dropped = binade - kWideBits - unit;
  if (dropped > 0) return Round(ShiftDown(sum, dropped), unit + dropped, machine.rounding);
  return Round(sum, unit, machine.rounding);
}

float ToFloat(const Decoded& x) {
  return std::ldexp(static_cast<float>(x.significand), x.exponent - 3);
}

// sum + term, rounded once. Both are multiples of 2^kUnit and below 2^80.
float AddRounded(float sum, float term, Rounding rounding) {
  constexpr int kUnit = -40;
  auto fixed_point = [](float x) {
    return static_cast<Int128>(std::ldexp(static_cast<double>(x), -kUnit));
  };
  return Round(fixed_point(sum) + fixed_point(term), kUnit, rounding);
}

}  // namespace

const std::array<Decoded, 256>& DecodedTable(const Machine& machine, Format format) {
  using Table = std::array<Decoded, 256>;
  static const auto kTables = [] {
    std::array<std::array<Table, kFormats.size()>, 2> tables{};
    for (int as_fp16 = 0; as_fp16 < 2; ++as_fp16) {
      for (size_t f = 0; f < kFormats.size(); ++f) {
        const FormatInfo& info = kFormats[f];
        const int min_exponent = as_fp16 ? -14 : info.min_normal_exponent;
        for (int code = 0; code < 256; ++code) {
          const float value =
              Bf16BitsToFloat(DecodeToBf16Bits(static_cast<uint8_t>(code), static_cast<Format>(f)));
          Decoded& decoded = tables[as_fp16][f][code];
          decoded.is_nan = std::isnan(value);
          decoded.is_inf = std::isinf(value);
          // An infinity keeps a sign, and a significand that is not 0.
          const float finite = decoded.is_inf ? std::copysign(1.0f, value) : value;
          if (decoded.is_nan || finite == 0) continue;
          decoded.exponent = static_cast<int8_t>(std::max(std::ilogb(finite), min_exponent));
          decoded.significand = static_cast<int8_t>(std::ldexp(finite, 3 - decoded.exponent));
        }
      }
    }
    return tables;
  }();
  return kTables[machine.fp16_operands][static_cast<int>(format)];
}

float Step(const Machine& machine, const DecodedCodes& lhs, const DecodedCodes& rhs, int num_k,
           int scale_exponent, float c) {
  if (const float special = Specials(lhs, rhs, num_k, c); special != 0) return special;
  switch (machine.summation) {
    case Summation::kAligned:
      return AlignedStep(machine, lhs, rhs, num_k, scale_exponent, c);
    case Summation::kGrouped:
      return GroupedStep(machine, lhs, rhs, num_k, c);
    case Summation::kSequential:
      for (int k = 0; k < num_k; ++k) {
        const float a = ToFloat(lhs[k]), b = ToFloat(rhs[k]);
        c = machine.rounding == Rounding::kRneFp32 ? std::fma(a, b, c)
                                                   : AddRounded(c, a * b, machine.rounding);
      }
      return c;
    case Summation::kChunked: {
      float chunk = 0;
      for (int k = 0; k < num_k; ++k) chunk = std::fma(ToFloat(lhs[k]), ToFloat(rhs[k]), chunk);
      return AddRounded(c, chunk, machine.rounding);
    }
    case Summation::kPairwise:
    case Summation::kExact:
      break;  // no steps
  }
  return kMachineNan;
}

float RoundSum(const double (&terms)[3]) {
  constexpr int kUnit = -40;
  Int128 sum = 0;
  for (double term : terms) sum += static_cast<Int128>(std::ldexp(term, -kUnit));
  return Round(sum, kUnit, Rounding::kRneFp32);
}

float SumPairwise(const DecodedCodes& lhs, const DecodedCodes& rhs, int64_t num_k) {
  // sums[i] is the sum of 2^i neighbours, where bit i of the count is set.
  float sums[64];
  float special = 0;
  for (int64_t k = 0; k < num_k; ++k) {
    const float at_k = Specials(lhs.From(k), rhs.From(k), 1, 0);
    if (at_k != 0) special += at_k;
    float sum = ToFloat(lhs[k]) * ToFloat(rhs[k]);
    int level = 0;
    for (; k >> level & 1; ++level) sum = sums[level] + sum;
    sums[level] = sum;
  }
  if (special != 0) return std::isnan(special) ? kMachineNan : special;
  float total = 0;
  for (int level = 0; num_k >> level; ++level) {
    if (num_k >> level & 1) total = sums[level] + total;
  }
  return total;
}

float SumExactly(const DecodedCodes& lhs, const DecodedCodes& rhs, int64_t num_k) {
  // Every product is a multiple of 2^kUnit and below 2^34: 2^61 of them fit.
  constexpr int kUnit = -40;
  Int128 sum = 0;
  float special = 0;
  for (int64_t k = 0; k < num_k; ++k) {
    const Decoded &a = lhs[k], &b = rhs[k];
    if (a.is_nan || b.is_nan || a.is_inf || b.is_inf) {
      special += Specials(lhs.From(k), rhs.From(k), 1, 0);
      continue;
    }
    const int significand = a.significand * b.significand;
    sum += static_cast<Int128>(significand) * (Int128{1} << (a.exponent + b.exponent - 6 - kUnit));
  }
  if (special != 0) return std::isnan(special) ? kMachineNan : special;
  return Round(sum, kUnit, Rounding::kRneFp32);
}

}  // namespace jax_fp8
