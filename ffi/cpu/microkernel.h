// The register tile of the packed GEMM, once for every ISA: up to tile_rows x tile_cols FP32 sums
// in registers, two of them to a row. Included only by gemm_<isa>.cc; everything here is local to
// that file.
//
// `Isa` is the trait of isa_<isa>.h with PackedShape kShape and AddProducts(sum, lhs, rhs), which
// adds the products of k_per_word k to each lane.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/gemm_packed.h"

namespace jax_fp8 {
namespace {

// Calls f(std::integral_constant<int, i>) for i in [0, kCount).
// NOTE: not a loop: with indices known from the start, compilers keep an array of sums in
// registers.
template <int kCount, class F>
[[gnu::always_inline]] inline void ForEach(F f) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// acc of half a row after a piece ends, by the numbers contract.
template <class Isa>
[[gnu::always_inline]] inline void Promote(typename Isa::Vec partial, typename Isa::Vec scale,
                                           bool scales_vary_along_k, bool is_first_piece,
                                           float* acc) {
  if (!scales_vary_along_k) {
    Isa::Store(acc, Isa::ScaleNonZero(partial, scale));
  } else {
    const typename Isa::Vec old = is_first_piece ? Isa::Zero() : Isa::Load(acc);
    Isa::Store(acc, Isa::AddScaledNonZero(partial, scale, old));
  }
}

// One register tile of kRows rows times one k block.
template <class Isa, int kRows>
void MultiplyTile(const TileProduct& product) {
  using Vec = typename Isa::Vec;
  using Words = typename Isa::Words;
  constexpr PackedShape kShape = Isa::kShape;
  constexpr int kHalf = Isa::kLanes;
  constexpr int kWordsPerLine = 16;
  static_assert(kShape.tile_cols == 2 * kHalf);

  for (int s = 0; s < product.num_segments; ++s) {
    const Segment& segment = product.segments[s];
    const uint32_t* lhs = product.lhs + segment.first_word;
    const uint32_t* rhs = product.rhs + segment.first_word * kShape.tile_cols;
    Vec sum[kRows][2];
    if (segment.starts_piece) {
      ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
        sum[i][0] = Isa::Zero();
        sum[i][1] = Isa::Zero();
      });
    } else {
      ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
        sum[i][0] = Isa::Load(product.partial + i * kShape.tile_cols);
        sum[i][1] = Isa::Load(product.partial + i * kShape.tile_cols + kHalf);
      });
    }

    const int num_words =
        (segment.k_end - segment.k_begin + kShape.k_per_word - 1) / kShape.k_per_word;
    for (int word = 0; word < num_words; word += kWordsPerLine) {
      // The next tile's rows: one line of each, from L2.
      ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
        __builtin_prefetch(lhs + (kShape.tile_rows + i) * kShape.lhs_row_stride);
      });
      const uint32_t* const line_end = lhs + std::min(kWordsPerLine, num_words - word);
#pragma GCC unroll 4
      for (; lhs < line_end; ++lhs, rhs += kShape.tile_cols) {
        const Words rhs0 = Isa::LoadWords(rhs), rhs1 = Isa::LoadWords(rhs + kHalf);
        ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
          const Words both = Isa::BroadcastWord(lhs[i * kShape.lhs_row_stride]);
          sum[i][0] = Isa::AddProducts(sum[i][0], both, rhs0);
          sum[i][1] = Isa::AddProducts(sum[i][1], both, rhs1);
        });
      }
    }

    if (segment.ends_piece) {
      const float* lhs_scale = product.lhs_scale + s * product.lhs_scale_stride;
      const float* rhs_scale = product.rhs_scale + s * kMaxPackedCols;
      const Vec rhs_scale0 = Isa::Load(rhs_scale), rhs_scale1 = Isa::Load(rhs_scale + kHalf);
      ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
        const Vec row_scale = Isa::Broadcast(lhs_scale[i]);
        float* acc = product.acc + i * kShape.tile_cols;
        Promote<Isa>(sum[i][0], Isa::Mul(row_scale, rhs_scale0), product.scales_vary_along_k,
                     segment.in_first_piece, acc);
        Promote<Isa>(sum[i][1], Isa::Mul(row_scale, rhs_scale1), product.scales_vary_along_k,
                     segment.in_first_piece, acc + kHalf);
      });
    } else {
      ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
        Isa::Store(product.partial + i * kShape.tile_cols, sum[i][0]);
        Isa::Store(product.partial + i * kShape.tile_cols + kHalf, sum[i][1]);
      });
    }
  }
}

template <class Isa>
void Multiply(const TileProduct& product) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    static constexpr void (*kByRows[])(const TileProduct&) = {MultiplyTile<Isa, i + 1>...};
    kByRows[product.num_rows - 1](product);
  }(std::make_integer_sequence<int, Isa::kShape.tile_rows>{});
}

template <class Isa, OutType type>
void StoreTile(const TileStore& store) {
  for (int col = 0; col < store.num_cols; col += Isa::kLanes) {
    const typename Isa::Lanes cols = Isa::LanesBelow(store.num_cols, col);
    for (int row = 0; row < store.num_rows; ++row) {
      Isa::template StoreTo<type>(store.out, row * store.out_stride + col, cols,
                                  Isa::Load(store.total + row * Isa::kShape.tile_cols + col));
    }
  }
}

template <class Isa>
void Store(const TileStore& store) {
  switch (store.type) {
    case OutType::kF32:
      return StoreTile<Isa, OutType::kF32>(store);
    case OutType::kBF16:
      return StoreTile<Isa, OutType::kBF16>(store);
    case OutType::kF16:
      return StoreTile<Isa, OutType::kF16>(store);
  }
}

}  // namespace
}  // namespace jax_fp8
