// One step of CDNA3's FP8 matrix core (GTR-FDPA of MMA-Sim, arXiv 2511.10909): products of even and
// of odd k are aligned apart from each other. Included only by emulate_<isa>.cc; everything here is
// local to that file.
#pragma once

#include <cstdint>

#include "cpu/emulate_aligned.h"

namespace jax_fp8 {
namespace {

template <class Isa_>
struct Grouped {
  using Isa = Isa_;
  using Real = double;
  static constexpr int kStep = 16, kCols = Isa::kCols;
  static constexpr int kKPerWord = kStep, kBlockWords = 1;
  static constexpr int kFractionBits = 24, kWideBits = 31;
  static constexpr bool kAsFp16 = false, kScalesInside = false, kRoundsDown = true;
  static constexpr int kRows = 1, kChainFloats = 1;
  using Lhs = LhsStep<Real, kStep, kCols>;
  using Rhs = RhsStep<Real, kStep, kCols>;
  using Lanes = RealLanes<Isa, Real>;
  using Bytes = typename Isa::Bytes;
  using Vec = typename Lanes::Vec;
  static constexpr int kVecs = kCols / Lanes::kLanes;
  // Of grids whose unit is F, or F2 + 1, bits below an exponent.
  static constexpr int kAbove = Lanes::kMantissa - kFractionBits;
  static constexpr int kAboveWide = Lanes::kMantissa - (kWideBits + 1);

  template <int kNumRows>
  [[gnu::noinline]] static void Step(const Lhs* lhs, const Rhs& rhs, const StepOperands& operands) {
    for (int i = 0; i < kNumRows; ++i) {
      StepRow(lhs[i], rhs, operands.segment.starts_piece, operands.chain + i * kCols);
    }
  }

 private:
  // The exact sum of the cut products k = first, first + 2, …, and their largest exponents.
  static void SumGroup(const Lhs& lhs, const Rhs& rhs, int first, uint8_t* largest, double* sums) {
    const Bytes e = LargestProduct<Isa>(lhs, rhs, first, 2);
    Isa::StoreBytes(largest, e);
    const Bytes limit = Limit<Isa, kFractionBits>(e);
    Bytes count = Isa::ZeroBytes();
    Vec acc[kVecs];
    ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
      acc[v] = Lanes::Grid(largest + v * Lanes::kLanes, kAbove);
    });
    for (int k = first; k < kStep; k += 2) {
      const Vec a = Lanes::Broadcast(lhs.value[k]);
      ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
        acc[v] = Lanes::FmaDown(a, Lanes::Load(rhs.value[k] + v * Lanes::kLanes), acc[v]);
      });
      const Bytes above = Isa::SubBytes(limit, Isa::RepeatWord(lhs.lowest[k]));
      count = Isa::CountAbove(count, above, Isa::LoadBytes(rhs.lowest[0][k] + lhs.plane[k]));
    }
    alignas(64) uint8_t counts[kCols];
    Isa::StoreBytes(counts, count);
    ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
      const int at = v * Lanes::kLanes;
      Lanes::Store(sums + at, Lanes::SubExact(Lanes::AddUnits(acc[v], counts + at),
                                              Lanes::Grid(largest + at, kAbove)));
    });
  }

  static void StepRow(const Lhs& lhs, const Rhs& rhs, bool is_first, float* chain) {
    alignas(64) double sums[2][kCols];
    alignas(64) uint8_t group[2][kCols], dot[kCols], old[kCols], largest[kCols];
    for (int parity = 0; parity < 2; ++parity) {
      SumGroup(lhs, rhs, parity, group[parity], sums[parity]);
    }
    const Bytes dot_exponent = Isa::MaxBytes(Isa::LoadBytes(group[0]), Isa::LoadBytes(group[1]));
    // Of zero, the exponent is that of the subnormals.
    const Bytes smallest = Isa::SetByte(kExponentBias - 126);
    const Bytes old_exponent =
        is_first ? smallest
                 : Isa::MaxBytes(ChainExponents<Isa, Rounding::kRneFp32>(chain), smallest);
    Isa::StoreBytes(dot, dot_exponent);
    Isa::StoreBytes(old, old_exponent);
    Isa::StoreBytes(largest, Isa::MaxBytes(dot_exponent, old_exponent));
    ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
      const int at = v * Lanes::kLanes;
      const Vec dot_grid = Lanes::Grid(dot + at, kAbove);
      Vec sum = Lanes::AddDown(dot_grid, Lanes::Load(sums[0] + at));
      sum = Lanes::AddDown(sum, Lanes::Load(sums[1] + at));
      sum = Lanes::SubExact(sum, dot_grid);

      const Vec wide_grid = Lanes::Grid(largest + at, kAboveWide);
      sum = Lanes::AddDown(wide_grid, sum);
      if (!is_first) {
        const Vec old_grid = Lanes::Grid(largest + at, kAbove);
        const Vec cut =
            Lanes::SubExact(Lanes::AddDown(old_grid, Lanes::LoadFloats(chain + at)), old_grid);
        // So far below the products that it would be -1 or 0 units, the accumulator is dropped.
        sum = Lanes::AddDown(sum,
                             Lanes::ZeroUnlessNear(cut, old + at, largest + at, kFractionBits + 1));
      }
      sum = Lanes::FloorTo(Lanes::SubExact(sum, wide_grid), kWideBits);
      Lanes::StoreRneFp32(chain + at, sum);
    });
  }
};

}  // namespace
}  // namespace jax_fp8
