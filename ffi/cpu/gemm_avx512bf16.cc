// The avx512bf16 row's code: FP8 is decoded to BF16 (exact: every FP8 value is a normal BF16
// number) by table while packing, and multiplied by vdpbf16ps.
//
// vdpbf16ps flushes subnormals, which FP8 operands never meet: the products of two decoded values,
// and so all their sums, are multiples of 2^-32 (E5M2·E5M2; the smallest code is 2^-16).
#include "cpu/gemm_packed.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && \
    defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "cpu/microkernel_avx512bf16.h"
#include "cpu/pack_avx512bf16.h"

namespace jax_fp8 {
namespace {

void PackLhs(const PackSource& source, uint32_t* packed) {
  source.k_contiguous ? PackLhsMk(source, packed) : PackLhsKm(source, packed);
}

void PackRhs(const PackSource& source, uint32_t* packed) {
  source.k_contiguous ? PackRhsNk(source, packed) : PackRhsKn(source, packed);
}

// To nearest even by integer steps: vcvtneps2bf16 would flush subnormals.
[[gnu::always_inline]] inline __m256i ToBf16(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i top = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __m512i quiet_nan = _mm512_or_si512(top, _mm512_set1_epi32(0x0040));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, quiet_nan));
}

[[gnu::always_inline]] inline __m256i ToF16(__m512 values) {
  return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

void Store(const TileStore& store) {
  for (int col = 0; col < store.num_cols; col += 16) {
    const __mmask16 cols = MaskOfFirst16(store.num_cols - col);
    for (int row = 0; row < store.num_rows; ++row) {
      const __m512 values = _mm512_load_ps(store.acc + row * kTileCols + col);
      const int64_t index = row * store.out_stride + col;
      uint16_t* out16 = static_cast<uint16_t*>(store.out) + index;
      switch (store.type) {
        case OutType::kF32:
          _mm512_mask_storeu_ps(static_cast<float*>(store.out) + index, cols, values);
          break;
        case OutType::kBF16:
          _mm256_mask_storeu_epi16(out16, cols, ToBf16(values));
          break;
        case OutType::kF16:
          _mm256_mask_storeu_epi16(out16, cols, ToF16(values));
          break;
      }
    }
  }
}

constexpr PackedGemmIsa kIsa = {PackLhs, PackRhs, Multiply, Store};

}  // namespace

const PackedGemmIsa* const kPackedGemmAvx512Bf16 = &kIsa;

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PackedGemmIsa* const kPackedGemmAvx512Bf16 = nullptr;

}  // namespace jax_fp8

#endif
