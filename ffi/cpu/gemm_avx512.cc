// The avx512 row's code: FP8 is decoded to FP32 while packing, and multiplied by FMAs of 16 lanes.
#include "cpu/gemm_packed.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "cpu/isa_avx512.h"
#include "cpu/microkernel.h"
#include "cpu/pack_fp32.h"

namespace jax_fp8 {
namespace {

struct GemmAvx512 : Avx512 {
  // 24 of 32 registers hold sums.
  static constexpr PackedShape kShape = {.tile_rows = 12,
                                         .tile_cols = 32,
                                         .k_per_word = 1,
                                         .block_words = 128,
                                         .lhs_row_stride = 144,
                                         .rhs_panel_words = 32 * 128};

  [[gnu::always_inline]] static Vec AddProducts(Vec sum, Words lhs, Words rhs) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(lhs), _mm512_castsi512_ps(rhs), sum);
  }
};

constexpr PackedGemmIsa kIsa = {GemmAvx512::kShape, PackLhs<GemmAvx512>, PackRhs<GemmAvx512>,
                                Multiply<GemmAvx512>, Store<GemmAvx512>};

}  // namespace

const PackedGemmIsa* PackedGemmAvx512() { return &kIsa; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PackedGemmIsa* PackedGemmAvx512() { return nullptr; }

}  // namespace jax_fp8

#endif
