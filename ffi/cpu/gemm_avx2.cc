// The avx2 row's code: FP8 is decoded to FP32 while packing, and multiplied by FMAs of 8 lanes.
#include "cpu/gemm_packed.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "cpu/few_rows.h"
#include "cpu/isa_avx2.h"
#include "cpu/microkernel.h"
#include "cpu/pack_fp32.h"

namespace jax_fp8 {
namespace {

struct GemmAvx2 : Avx2 {
  // 12 of 16 registers hold sums.
  static constexpr PackedShape kShape = {.tile_rows = 6,
                                         .tile_cols = 16,
                                         .k_per_word = 1,
                                         .block_words = 256,
                                         .lhs_row_stride = 272,
                                         .rhs_panel_words = 16 * 256,
                                         .follows_memory = true,
                                         .few_rows = 2};

  [[gnu::always_inline]] static Vec AddProducts(Vec sum, Words lhs, Words rhs) {
    return _mm256_fmadd_ps(_mm256_castsi256_ps(lhs), _mm256_castsi256_ps(rhs), sum);
  }
};

constexpr PackedGemmIsa kIsa = {GemmAvx2::kShape,   PackLhs<GemmAvx2>, PackRhs<GemmAvx2>,
                                Multiply<GemmAvx2>, Store<GemmAvx2>,   MultiplyFp32Codes<GemmAvx2>};

}  // namespace

const PackedGemmIsa* PackedGemmAvx2() { return &kIsa; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PackedGemmIsa* PackedGemmAvx2() { return nullptr; }

}  // namespace jax_fp8

#endif
