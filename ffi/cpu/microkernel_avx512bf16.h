// The register tile of the avx512bf16 row: up to 12 rows x 32 columns of FP32 sums in 24 registers.
// Included only by gemm_avx512bf16.cc; everything here is local to that file.
#pragma once

#include <immintrin.h>

#include <array>
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

[[gnu::always_inline]] inline __m512 AddProducts(__m512 sum, __m512i lhs, __m512i rhs) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(lhs), reinterpret_cast<__m512bh>(rhs));
}

// acc of one half row after a piece ends, by the numbers contract: a zero partial contributes 0
// whatever the scales, hence the masks.
[[gnu::always_inline]] inline __m512 Promote(__m512 partial, __m512 scale, const float* acc,
                                             bool scales_vary_along_k, bool is_first_piece) {
  const __m512 zero = _mm512_setzero_ps();
  const __mmask16 nonzero = _mm512_cmp_ps_mask(partial, zero, _CMP_NEQ_UQ);
  if (!scales_vary_along_k) return _mm512_maskz_mul_ps(nonzero, partial, scale);
  const __m512 old = is_first_piece ? zero : _mm512_load_ps(acc);
  return _mm512_mask3_fmadd_ps(partial, scale, old, nonzero);
}

// One register tile of kRows rows times one k block.
template <int kRows>
void MultiplyTile(const TileProduct& product) {
  for (int s = 0; s < product.num_segments; ++s) {
    const Segment& segment = product.segments[s];
    const uint32_t* lhs = product.lhs + segment.first_pair;
    const uint32_t* rhs = product.rhs + segment.first_pair * kTileCols;
    __m512 sum[kRows][2];
    if (segment.starts_piece) {
      ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
        sum[i][0] = _mm512_setzero_ps();
        sum[i][1] = _mm512_setzero_ps();
      });
    } else {
      ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
        sum[i][0] = _mm512_load_ps(product.partial + i * kTileCols);
        sum[i][1] = _mm512_load_ps(product.partial + i * kTileCols + 16);
      });
    }

    const int num_pairs = (segment.k_end - segment.k_begin + 1) / 2;
#pragma GCC unroll 4
    for (int pair = 0; pair < num_pairs; ++pair, ++lhs, rhs += kTileCols) {
      const __m512i rhs0 = _mm512_load_si512(rhs), rhs1 = _mm512_load_si512(rhs + 16);
      ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
        const __m512i both = _mm512_set1_epi32(static_cast<int>(lhs[i * kLhsRowStride]));
        sum[i][0] = AddProducts(sum[i][0], both, rhs0);
        sum[i][1] = AddProducts(sum[i][1], both, rhs1);
      });
    }

    if (segment.ends_piece) {
      const float* lhs_scale = product.lhs_scale + s * product.lhs_scale_stride;
      const float* rhs_scale = product.rhs_scale + s * kMaxPackedCols;
      const __m512 rhs_scale0 = _mm512_load_ps(rhs_scale);
      const __m512 rhs_scale1 = _mm512_load_ps(rhs_scale + 16);
      ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
        const __m512 row_scale = _mm512_set1_ps(lhs_scale[i]);
        float* acc = product.acc + i * kTileCols;
        _mm512_store_ps(acc, Promote(sum[i][0], _mm512_mul_ps(row_scale, rhs_scale0), acc,
                                     product.scales_vary_along_k, segment.in_first_piece));
        _mm512_store_ps(acc + 16, Promote(sum[i][1], _mm512_mul_ps(row_scale, rhs_scale1), acc + 16,
                                          product.scales_vary_along_k, segment.in_first_piece));
      });
    } else {
      ForEach<kRows>([&](auto i) __attribute__((always_inline)) {
        _mm512_store_ps(product.partial + i * kTileCols, sum[i][0]);
        _mm512_store_ps(product.partial + i * kTileCols + 16, sum[i][1]);
      });
    }
  }
}

void Multiply(const TileProduct& product) {
  using MultiplyFn = void (*)(const TileProduct&);
  static constexpr auto kByRows = []<int... i>(std::integer_sequence<int, i...>) {
    return std::array<MultiplyFn, kTileRows>{MultiplyTile<i + 1>...};
  }(std::make_integer_sequence<int, kTileRows>{});
  kByRows[product.num_rows - 1](product);
}

}  // namespace
}  // namespace jax_fp8
