// Sums that keep more than one number per output while they grow: exact ones, and the pairwise
// tree. Included only by emulate_<isa>.cc; everything here is local to that file.
#pragma once

#include <cstdint>

#include "cpu/accumulator.h"
#include "cpu/emulate_aligned.h"
#include "cpu/emulate_layout.h"
#include "cpu/microkernel.h"

namespace jax_fp8 {
namespace {

// Values of E5M2 are split at 1. Products of two large, of a large and a small, and of two small
// ones then are multiples of 2^-18 (E4M3) or more below 2^36 of them: doubles add 2^17 of them
// exactly.
template <class Isa_>
struct Exact {
  using Isa = Isa_;
  using Lanes = RealLanes<Isa, double>;
  using Vec = typename Lanes::Vec;
  static constexpr int kStep = 16, kCols = Isa::kCols, kKPerWord = 1, kBlockWords = kStep;
  static constexpr bool kAsFp16 = false, kScalesInside = false, kRoundsDown = false;
  static constexpr int kRows = 1, kSums = 3, kChainFloats = 2 * kSums;
  using Lhs = LhsHalves<kStep>;
  using Rhs = RhsHalves<kStep, kCols>;

  template <int kNumRows>
  [[gnu::noinline]] static void Step(const Lhs* lhs, const Rhs& rhs, const StepOperands& operands) {
    static_assert(kNumRows == 1);
    auto* sums = reinterpret_cast<double*>(operands.chain);  // [kSums][kCols]
    const Segment& segment = operands.segment;
    constexpr int kVecs = 4;  // at a time
    for (int col = 0; col < kCols; col += kVecs * Lanes::kLanes) {
      Vec acc[kSums][kVecs];
      ForEach<kSums>([&](auto s) __attribute__((always_inline)) {
        ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
          acc[s][v] = segment.starts_piece
                          ? Lanes::Broadcast(0)
                          : Lanes::Load(sums + s * kCols + col + v * Lanes::kLanes);
        });
      });
      const int end = segment.first_word + segment.k_end - segment.k_begin;
      for (int k = segment.first_word; k < end; ++k) {
        auto add = [&](Vec(&sum)[kVecs], double a, const double* b) __attribute__((always_inline)) {
          const Vec both = Lanes::Broadcast(a);
          ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
            sum[v] = Lanes::FmaDown(both, Lanes::Load(b + col + v * Lanes::kLanes), sum[v]);
          });
        };
        add(acc[0], lhs->value[k], rhs.value[k]);
        if (lhs->has_low) add(acc[1], lhs->low[k], rhs.value[k]);
        if (rhs.has_low) add(acc[1], lhs->value[k], rhs.low[k]);
        if (lhs->has_low && rhs.has_low) add(acc[2], lhs->low[k], rhs.low[k]);
      }
      ForEach<kSums>([&](auto s) __attribute__((always_inline)) {
        ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
          Lanes::Store(sums + s * kCols + col + v * Lanes::kLanes, acc[s][v]);
        });
      });
    }
    if (segment.ends_piece) Close(sums, operands.chain);
  }

 private:
  static void Close(const double* sums, float* result) {
    alignas(64) float rounded[kCols];
    for (int col = 0; col < kCols; ++col) {
      rounded[col] = RoundSum({sums[col], sums[kCols + col], sums[2 * kCols + col]});
    }
    for (int col = 0; col < kCols; col += Isa::kLanes) {
      Isa::Store(result + col, Isa::Load(rounded + col));
    }
  }
};

// A balanced binary tree of FP32 additions over neighbouring products, padded with zeros. Each
// block is a subtree; subtrees wait in slots, one for each height, for their neighbour.
template <class Isa_>
struct Pairwise {
  using Isa = Isa_;
  using Vec = typename Isa::Vec;
  static constexpr int kStep = 32, kCols = Isa::kCols, kKPerWord = kStep, kBlockWords = 1;
  static constexpr bool kAsFp16 = false, kScalesInside = false, kRoundsDown = false;
  // The result, and subtrees of 2^0 … 2^12 blocks.
  static constexpr int kRows = 1, kHeights = 13, kChainFloats = 1 + kHeights;
  using Lhs = LhsValues<kStep>;
  using Rhs = RhsValues<kStep, kCols>;

  template <int kNumRows>
  [[gnu::noinline]] static void Step(const Lhs* lhs, const Rhs& rhs, const StepOperands& operands) {
    static_assert(kNumRows == 1);
    const int num_before = operands.segment.words_before;
    auto slot = [&](int height) { return operands.chain + (1 + height) * kCols; };
    for (int col = 0; col < kCols; col += Isa::kLanes) {
      Vec sum = SumOfBlock<kStep>(lhs->value, rhs.value[0] + col);
      int height = 0;
      for (; num_before >> height & 1; ++height) {
        sum = Isa::Add(Isa::Load(slot(height) + col), sum);
      }
      Isa::Store(slot(height) + col, sum);
      if (!operands.segment.ends_piece) continue;
      Vec total = Isa::Zero();
      for (int h = 0; (num_before + 1) >> h; ++h) {
        if ((num_before + 1) >> h & 1) total = Isa::Add(Isa::Load(slot(h) + col), total);
      }
      Isa::Store(operands.chain + col, total);
    }
  }

 private:
  template <int kCount>
  [[gnu::always_inline]] static Vec SumOfBlock(const float* a, const float* b) {
    if constexpr (kCount == 1) {
      return Isa::Mul(Isa::Broadcast(*a), Isa::Load(b));
    } else {
      constexpr int kHalf = kCount / 2;
      const Vec first = SumOfBlock<kHalf>(a, b);
      return Isa::Add(first, SumOfBlock<kHalf>(a + kHalf, b + kHalf * kCols));
    }
  }
};

}  // namespace
}  // namespace jax_fp8
