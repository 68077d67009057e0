// One step of the machines that align all their terms, for rows × kCols outputs (emulate_layout.h
// says how). Included only by emulate_<isa>.cc; everything here is local to that file.
#pragma once

#include <cstdint>

#include "common/machine.h"
#include "cpu/emulate_layout.h"
#include "cpu/gemm_packed.h"
#include "cpu/microkernel.h"

namespace jax_fp8 {
namespace {

// What a step of one row group works on. Scales are E8M0 as FP32, one per row and one per column.
struct StepOperands {
  const Segment& segment;
  const float* lhs_scale;
  const float* rhs_scale;
  float* chain;  // [row][kChainFloats][kCols]
};

// Largest exponents between which it depends on a product whether it has bits below the unit. Under
// them no product has; over them every product but a zero has. The limit then fits a signed byte.
constexpr int LowestExponent(int fraction_bits) { return kExponentBias + fraction_bits - 45; }
constexpr int HighestExponent(int fraction_bits) { return kExponentBias + fraction_bits + 32; }

// With which lowest bits' sums below it a product is no multiple of the unit.
template <class Isa, int kFractionBits>
[[gnu::always_inline]] inline typename Isa::Bytes Limit(typename Isa::Bytes largest) {
  const auto low = Isa::SetByte(LowestExponent(kFractionBits));
  const auto high = Isa::SetByte(HighestExponent(kFractionBits));
  return Isa::SubBytes(Isa::MinBytes(Isa::MaxBytes(largest, low), high),
                       Isa::SetByte(kExponentBias + kFractionBits));
}

// Largest exponent bytes of the products of one row, k = first, first + stride, …
template <class Isa, class Lhs, class Rhs>
[[gnu::always_inline]] inline typename Isa::Bytes LargestProduct(const Lhs& lhs, const Rhs& rhs,
                                                                 int first, int stride) {
  typename Isa::Bytes largest = Isa::ZeroBytes();
  constexpr int kStep = sizeof(lhs.value) / sizeof(lhs.value[0]);
#pragma GCC unroll 4
  for (int k = first; k < kStep; k += stride) {
    largest = Isa::MaxBytes(
        largest, Isa::AddBytes(Isa::LoadBytes(rhs.exponent[k]), Isa::RepeatWord(lhs.exponent[k])));
  }
  return largest;
}

// Exponent bytes of the old accumulators of one row; 0 for a zero.
template <class Isa, Rounding rounding>
[[gnu::always_inline]] inline typename Isa::Bytes ChainExponents(const float* chain) {
  constexpr int kVecs = Isa::kCols / Isa::kLanes;
  typename Isa::Ints exponents[kVecs];
  ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
    typename Isa::Ints e = Isa::ExponentField(Isa::Load(chain + v * Isa::kLanes));
    if constexpr (rounding == Rounding::kRneFp16) {
      // Subnormals of FP16 all have the exponent -14.
      const auto is_nonzero = Isa::IsAbove(e, Isa::SetInt(0));
      e = Isa::MaxInts(e, Isa::AndInts(is_nonzero, Isa::SetInt(kExponentBias - 14)));
    }
    exponents[v] = e;
  });
  return Isa::ToBytes(exponents);
}

// The same with scales inside: all is divided by the scale of the products, 2^s. Where the products
// can't change the accumulator, keep[v] is all ones.
template <class Isa>
[[gnu::always_inline]] inline typename Isa::Bytes ScaledChainExponents(
    const float* chain, const uint8_t* largest_product, float lhs_scale, const float* rhs_scale,
    int zero_exponent, bool is_first, typename Isa::Ints (&keep)[Isa::kCols / Isa::kLanes]) {
  constexpr int kVecs = Isa::kCols / Isa::kLanes;
  // Products reach 2^32; above this the accumulator's unit is larger.
  constexpr int kFarAbove = 200;
  // Exponent byte of the smallest product that is not zero; those of zeros are less.
  constexpr int kLeastProduct = 2 * -14 + kExponentBias;
  typename Isa::Ints exponents[kVecs];
  ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
    auto exponent_of = [](typename Isa::Vec scale) __attribute__((always_inline)) {
      return Isa::SubInts(Isa::ExponentField(scale), Isa::SetInt(kExponentBias));
    };
    const auto s = Isa::AddInts(exponent_of(Isa::Broadcast(lhs_scale)),
                                exponent_of(Isa::Load(rhs_scale + v * Isa::kLanes)));
    const auto lowest = Isa::SubInts(Isa::SetInt(kExponentBias + zero_exponent), s);
    keep[v] = Isa::SetInt(0);
    auto e = Isa::SetInt(0);
    if (!is_first) {
      const auto c = Isa::Load(chain + v * Isa::kLanes);
      const auto field = Isa::ExponentField(c);
      const auto scaled = Isa::SubInts(Isa::MaxInts(field, Isa::SetInt(1)), s);
      e = Isa::AndInts(Isa::DiffersFromZero(c), scaled);
      const auto product = Isa::WidenBytes(largest_product + v * Isa::kLanes);
      const auto is_far_above = Isa::OrInts(Isa::IsAbove(e, Isa::SetInt(kFarAbove)),
                                            Isa::IsAbove(field, Isa::SetInt(254)));
      keep[v] = Isa::OrInts(is_far_above, Isa::IsAbove(Isa::SetInt(kLeastProduct), product));
    }
    e = Isa::MaxInts(Isa::MaxInts(e, lowest), Isa::SetInt(0));
    exponents[v] = Isa::MinInts(e, Isa::SetInt(kFarAbove + 1));
  });
  return Isa::ToBytes(exponents);
}

template <class Isa_, class Real_, int kStep_, int kFractionBits_, Rounding kRounding_,
          int kZeroExponent_ = -133, bool kAsFp16_ = false, bool kScalesInside_ = false>
struct Aligned {
  using Isa = Isa_;
  using Real = Real_;
  static constexpr int kStep = kStep_, kCols = Isa::kCols, kFractionBits = kFractionBits_;
  static constexpr int kKPerWord = kStep, kBlockWords = 1;
  static constexpr Rounding kRounding = kRounding_;
  static constexpr bool kAsFp16 = kAsFp16_, kScalesInside = kScalesInside_;
  static constexpr bool kRoundsDown = true;
  static constexpr int kChainFloats = 1;
  static constexpr int kRows = sizeof(Real) == 4 ? Isa::kFloatRows : Isa::kDoubleRows;
  using Lhs = LhsStep<Real, kStep, kCols>;
  using Rhs = RhsStep<Real, kStep, kCols>;
  using Lanes = RealLanes<Isa, Real>;
  static constexpr int kVecs = kCols / Lanes::kLanes;
  static constexpr int kAbove = Lanes::kMantissa - kFractionBits;  // of the grid, over the largest

  // Advances the chains of kNumRows rows by one step.
  template <int kNumRows>
  [[gnu::noinline]] static void Step(const Lhs* lhs, const Rhs& rhs, const StepOperands& operands) {
    using Bytes = typename Isa::Bytes;
    using Vec = typename Lanes::Vec;
    alignas(64) uint8_t largest[kNumRows][kCols], counts[kNumRows][kCols];
    typename Isa::Ints keep[kNumRows][kCols / Isa::kLanes];
    Bytes limit[kNumRows];
    const bool is_first = operands.segment.starts_piece;
    ForEach<kNumRows>([&](auto i) __attribute__((always_inline)) {
      Bytes e = LargestProduct<Isa>(lhs[i], rhs, 0, 1);
      const float* chain = operands.chain + i * kCols;
      if constexpr (kScalesInside) {
        Isa::StoreBytes(largest[i], e);
        e = Isa::MaxBytes(
            e, ScaledChainExponents<Isa>(chain, largest[i], operands.lhs_scale[i],
                                         operands.rhs_scale, kZeroExponent_, is_first, keep[i]));
      } else if (!is_first) {
        e = Isa::MaxBytes(e, ChainExponents<Isa, kRounding>(chain));
      }
      Isa::StoreBytes(largest[i], e);
      limit[i] = Limit<Isa, kFractionBits>(e);
    });

    Vec acc[kNumRows][kVecs];
    ForEach<kNumRows>([&](auto i) __attribute__((always_inline)) {
      ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
        const Vec grid = Lanes::Grid(largest[i] + v * Lanes::kLanes, kAbove);
        acc[i][v] =
            is_first ? grid : Lanes::AddTowardZero(grid, OldChain(operands, i, v * Lanes::kLanes));
      });
    });
    Bytes count[kNumRows];
    ForEach<kNumRows>([&](auto i) __attribute__((always_inline)) { count[i] = Isa::ZeroBytes(); });

    const int8_t* lowest = rhs.lowest[0][0];
#pragma GCC unroll 2
    for (int k = 0; k < kStep; ++k, lowest += kCols) {
      Vec a[kNumRows];
      ForEach<kNumRows>(
          [&](auto i) __attribute__((always_inline)) { a[i] = Lanes::Broadcast(lhs[i].value[k]); });
      ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
        const Vec b = Lanes::Load(rhs.value[k] + v * Lanes::kLanes);
        ForEach<kNumRows>([&](auto i) __attribute__((always_inline)) {
          acc[i][v] = Lanes::FmaDown(a[i], b, acc[i][v]);
        });
      });
      ForEach<kNumRows>([&](auto i) __attribute__((always_inline)) {
        const Bytes above = Isa::SubBytes(limit[i], Isa::RepeatWord(lhs[i].lowest[k]));
        count[i] = Isa::CountAbove(count[i], above, Isa::LoadBytes(lowest + lhs[i].plane[k]));
      });
    }

    ForEach<kNumRows>([&](auto i)
                          __attribute__((always_inline)) { Isa::StoreBytes(counts[i], count[i]); });
    ForEach<kNumRows>([&](auto i) __attribute__((always_inline)) {
      alignas(64) float old[kCols];
      float* chain = operands.chain + i * kCols;
      constexpr bool kMayKeep = kScalesInside || kRounding == Rounding::kRneFp16;
      if constexpr (kMayKeep) {
        ForEach<kCols / Isa::kLanes>([&](auto v) __attribute__((always_inline)) {
          Isa::Store(old + v * Isa::kLanes, Isa::Load(chain + v * Isa::kLanes));
        });
      }
      ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
        const int at = v * Lanes::kLanes;
        const Vec grid = Lanes::Grid(largest[i] + at, kAbove);
        Finish(operands, i, at, Lanes::SubExact(Lanes::AddUnits(acc[i][v], counts[i] + at), grid));
      });
      if constexpr (kMayKeep) {
        if (is_first) return;
        ForEach<kCols / Isa::kLanes>([&](auto v) __attribute__((always_inline)) {
          const auto c = Isa::Bits(Isa::Load(old + v * Isa::kLanes));
          const auto is_infinite =
              Isa::IsAbove(Isa::AndInts(c, Isa::SetInt(0x7FFFFFFF)), Isa::SetInt(0x7F7FFFFF));
          auto mask = is_infinite;
          if constexpr (kScalesInside) mask = keep[i][v];
          const auto fresh = Isa::Bits(Isa::Load(chain + v * Isa::kLanes));
          Isa::Store(
              chain + v * Isa::kLanes,
              Isa::FromBits(Isa::OrInts(Isa::AndInts(mask, c), Isa::AndNotInts(mask, fresh))));
        });
      }
    });
  }

 private:
  // The old accumulators, in units in which the products have no scale.
  [[gnu::always_inline]] static typename Lanes::Vec OldChain(const StepOperands& operands, int row,
                                                             int col) {
    const auto c = Lanes::LoadFloats(operands.chain + row * kCols + col);
    if constexpr (!kScalesInside) {
      return c;
    } else {
      const auto by_row = Lanes::Broadcast(1.0 / static_cast<double>(operands.lhs_scale[row]));
      return Lanes::Mul(Lanes::Mul(c, by_row), Lanes::Inverse(operands.rhs_scale + col));
    }
  }

  [[gnu::always_inline]] static void Finish(const StepOperands& operands, int row, int col,
                                            typename Lanes::Vec sum) {
    float* to = operands.chain + row * kCols + col;
    if constexpr (kScalesInside) {
      const auto by_row = Lanes::Broadcast(static_cast<double>(operands.lhs_scale[row]));
      sum = Lanes::Mul(Lanes::Mul(sum, by_row), Lanes::LoadFloats(operands.rhs_scale + col));
    }
    if constexpr (kRounding == Rounding::kRzE8M13) Lanes::StoreRzE8M13(to, sum);
    if constexpr (kRounding == Rounding::kRzFp32) Lanes::StoreRzFp32(to, sum);
    if constexpr (kRounding == Rounding::kRneFp16) Lanes::StoreRneFp16(to, sum);
  }
};

}  // namespace
}  // namespace jax_fp8
