// Sums that don't align: FP32 chains, and accumulators of 16 bits that are rounded after every
// product or every chunk. Included only by emulate_<isa>.cc; everything here is local to that file.
#pragma once

#include "common/machine.h"
#include "cpu/emulate_aligned.h"
#include "cpu/emulate_layout.h"
#include "cpu/microkernel.h"

namespace jax_fp8 {
namespace {

// sum + term, rounded once to a 16-bit type.
template <class Isa, Rounding rounding>
[[gnu::always_inline]] inline typename Isa::Vec AddRounded(typename Isa::Vec sum,
                                                           typename Isa::Vec term) {
  // The FP32 sum and its error, which is a float too (Knuth's two-sum).
  const auto rounded = Isa::Add(sum, term);
  const auto from_term = Isa::Sub(rounded, sum);
  const auto error =
      Isa::Add(Isa::Sub(sum, Isa::Sub(rounded, from_term)), Isa::Sub(term, from_term));
  // Toward zero, with an odd last bit, where it is inexact: the 16-bit type then rounds as from the
  // exact sum. One less where the error points toward zero, which its sign against the sum's says.
  const auto bits = Isa::Bits(rounded);
  const auto inexact = Isa::DiffersFromZero(error);
  const auto toward_zero =
      Isa::AndInts(inexact, Isa::SignMask(Isa::XorInts(bits, Isa::Bits(error))));
  const auto odd =
      Isa::OrInts(Isa::AddInts(bits, toward_zero), Isa::AndInts(inexact, Isa::SetInt(1)));
  if constexpr (rounding == Rounding::kRneFp16) {
    return Isa::Add(Isa::RoundToFp16(Isa::FromBits(odd)), Isa::Zero());  // -0 becomes +0
  } else {
    const auto half = Isa::AddInts(Isa::OddBit(odd, 16), Isa::SetInt(0x7FFF));
    return Isa::FromBits(Isa::AndNotInts(Isa::SetInt(0xFFFF), Isa::AddInts(odd, half)));
  }
}

template <class Isa_, Summation kSummation, Rounding kRounding>
struct Chain {
  using Isa = Isa_;
  using Vec = typename Isa::Vec;
  static constexpr bool kIsChunked = kSummation == Summation::kChunked;
  static constexpr int kStep = 32, kCols = Isa::kCols;
  // Chunks start at pieces; single products go on from wherever a block ends.
  static constexpr int kKPerWord = kIsChunked ? kStep : 1, kBlockWords = kStep / kKPerWord;
  static constexpr bool kAsFp16 = false, kScalesInside = false, kRoundsDown = false;
  static constexpr int kRows = 2, kChainFloats = 1;
  using Lhs = LhsValues<kStep>;
  using Rhs = RhsValues<kStep, kCols>;
  static constexpr int kVecs = kCols / Isa::kLanes;

  // A chunk is padded with zeros.
  template <int kNumRows>
  [[gnu::noinline]] static void Step(const Lhs* lhs, const Rhs& rhs, const StepOperands& operands) {
    const int first_k = kIsChunked ? 0 : operands.segment.first_word;
    const int num_k = kIsChunked ? kStep : operands.segment.k_end - operands.segment.k_begin;
    Vec acc[kNumRows][kVecs], sum[kNumRows][kVecs];
    ForEach<kNumRows>([&](auto i) __attribute__((always_inline)) {
      ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
        acc[i][v] = operands.segment.starts_piece
                        ? Isa::Zero()
                        : Isa::Load(operands.chain + i * kCols + v * Isa::kLanes);
        sum[i][v] = Isa::Zero();
      });
    });
    for (int k = first_k; k < first_k + num_k; ++k) {
      ForEach<kNumRows>([&](auto i) __attribute__((always_inline)) {
        const Vec a = Isa::Broadcast(lhs[i].value[k]);
        ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
          const Vec b = Isa::Load(rhs.value[k] + v * Isa::kLanes);
          if constexpr (kIsChunked) {
            sum[i][v] = Isa::Fma(a, b, sum[i][v]);
          } else if constexpr (kRounding == Rounding::kRneFp32) {
            acc[i][v] = Isa::Fma(a, b, acc[i][v]);
          } else {
            acc[i][v] = AddRounded<Isa, kRounding>(acc[i][v], Isa::Mul(a, b));
          }
        });
      });
    }
    ForEach<kNumRows>([&](auto i) __attribute__((always_inline)) {
      ForEach<kVecs>([&](auto v) __attribute__((always_inline)) {
        if constexpr (kIsChunked) acc[i][v] = AddRounded<Isa, kRounding>(acc[i][v], sum[i][v]);
        Isa::Store(operands.chain + i * kCols + v * Isa::kLanes, acc[i][v]);
      });
    });
  }
};

}  // namespace
}  // namespace jax_fp8
