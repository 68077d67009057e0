// A few rows of lhs times rhs codes that are decoded in registers, once for every ISA: each code is
// read once and never stored. Included only by gemm_<isa>.cc; everything here is local to that
// file.
//
// `Isa` is the trait that microkernel.h takes, with a class Codes(format) whose
// Load(codes, leading_stride, num_k, num_cols, words) decodes one word along k of 4 * kLanes
// columns; only the first `num_cols` of them, and the first `num_k` k of the word, exist.
#pragma once

#include <cstdint>

#include "cpu/gemm_packed.h"
#include "cpu/microkernel.h"

namespace jax_fp8 {
namespace {

template <class Isa, class Codes, int kRows>
[[gnu::always_inline]] inline void MultiplyCodesOfCols(const CodesProduct& product,
                                                       const Codes& decoder, int first_col,
                                                       int num_cols) {
  using Vec = typename Isa::Vec;
  using Words = typename Isa::Words;
  constexpr PackedShape kShape = Isa::kShape;
  constexpr int kVecs = 4, kVecsPerTile = kShape.tile_cols / Isa::kLanes;
  auto sum_at = [&](int row, int vec) __attribute__((always_inline)) {
    const int tile = first_col / kShape.tile_cols + vec / kVecsPerTile;
    return product.sums + tile * product.tile_stride + row * kShape.tile_cols +
           vec % kVecsPerTile * Isa::kLanes;
  };
  Vec sum[kRows][kVecs];
  ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
    ForEach<kVecs>([&](auto j) __attribute__((always_inline)) {
      sum[i][j] = product.starts_piece ? Isa::Zero() : Isa::Load(sum_at(i, j));
    });
  });
  // Not into L1, from which they would be gone before their turn.
  constexpr int kIntoL2 = 2;
  const uint8_t* codes = product.codes + first_col;
  for (int k = 0, word = 0; k < product.num_k; k += kShape.k_per_word, ++word) {
    ForEach<kShape.k_per_word>([&](auto i) __attribute__((always_inline)) {
      __builtin_prefetch(codes + product.prefetch_distance + i * product.leading_stride, /*rw=*/0,
                         kIntoL2);
    });
    Words rhs[kVecs];
    decoder.Load(codes, product.leading_stride, product.num_k - k, num_cols, rhs);
    codes += kShape.k_per_word * product.leading_stride;
    ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
      const Words both = Isa::BroadcastWord(product.lhs[i * kShape.lhs_row_stride + word]);
      ForEach<kVecs>([&](auto j) __attribute__((always_inline)) {
        sum[i][j] = Isa::AddProducts(sum[i][j], both, rhs[j]);
      });
    });
  }
  ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
    ForEach<kVecs>([&](auto j)
                       __attribute__((always_inline)) { Isa::Store(sum_at(i, j), sum[i][j]); });
  });
}

template <class Isa, class Codes, int kRows>
void MultiplyCodesOf(const CodesProduct& product) {
  constexpr int kGroup = 4 * Isa::kLanes;
  const Codes decoder(product.format);
  for (int col = 0; col < product.num_cols; col += kGroup) {
    // Two copies of the loop, so that whole groups have no masks.
    if (product.num_cols - col >= kGroup) {
      MultiplyCodesOfCols<Isa, Codes, kRows>(product, decoder, col, kGroup);
    } else {
      MultiplyCodesOfCols<Isa, Codes, kRows>(product, decoder, col, product.num_cols - col);
    }
  }
}

template <class Isa, class Codes>
void MultiplyCodesBy(const CodesProduct& product) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr void (*kByRows[])(const CodesProduct&) = {
        MultiplyCodesOf<Isa, Codes, i + 1>...};
    kByRows[product.num_rows - 1](product);
  }(std::make_integer_sequence<int, Isa::kShape.few_rows>{});
}

template <class Isa>
void MultiplyCodes(const CodesProduct& product) {
  MultiplyCodesBy<Isa, typename Isa::Codes>(product);
}

// Codes for the ISAs whose Decode is arithmetic on 16 codes of a format known to the compiler.
template <class Isa, Format format>
struct Fp32Codes {
  explicit Fp32Codes(Format) {}

  [[gnu::always_inline]] void Load(const uint8_t* codes, int64_t, int, int num_cols,
                                   typename Isa::Words (&words)[4]) const {
    constexpr int kDecodedAtOnce = 16, kVecs = kDecodedAtOnce / Isa::kLanes;
    ForEach<4 / kVecs>([&](auto i) __attribute__((always_inline)) {
      const int first = i * kDecodedAtOnce;
      typename Isa::Vec values[kVecs];
      Isa::template Decode<format>(Isa::LoadCodes(codes + first, num_cols - first), values);
      ForEach<kVecs>([&](auto j) __attribute__((always_inline)) {
        words[i * kVecs + j] = Isa::AsWords(values[j]);
      });
    });
  }
};

template <class Isa>
void MultiplyFp32Codes(const CodesProduct& product) {
  product.format == Format::kE4M3FN ? MultiplyCodesBy<Isa, Fp32Codes<Isa, Format::kE4M3FN>>(product)
                                    : MultiplyCodesBy<Isa, Fp32Codes<Isa, Format::kE5M2>>(product);
}

}  // namespace
}  // namespace jax_fp8
