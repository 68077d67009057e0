// FP32 FMAs of 16 lanes as the trait of the packed GEMM. Included only by gemm_<isa>.cc; everything
// here is local to that file.
#pragma once

#include <immintrin.h>

#include "cpu/gemm_packed.h"
#include "cpu/isa_avx512.h"

namespace jax_fp8 {
namespace {

struct GemmAvx512Fp32 : Avx512 {
  // 24 of 32 registers hold sums.
  static constexpr PackedShape kShape = {.tile_rows = 12,
                                         .tile_cols = 32,
                                         .k_per_word = 1,
                                         .block_words = 128,
                                         .lhs_row_stride = 144,
                                         .rhs_panel_words = 32 * 128,
                                         .follows_memory = true,
                                         .few_rows = 4};

  [[gnu::always_inline]] static Vec AddProducts(Vec sum, Words lhs, Words rhs) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(lhs), _mm512_castsi512_ps(rhs), sum);
  }
};

}  // namespace
}  // namespace jax_fp8
