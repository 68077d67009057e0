// AVX-512 F, BW, DQ and VL as the trait that kernel templates are written on: 16 FP32 lanes, and a
// mask for the lanes that exist. Included only by files compiled for them; everything here is local
// to such a file.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/fp8.h"
#include "common/gemm_desc.h"
#include "common/quantize_desc.h"

namespace jax_fp8 {
namespace {

struct Avx512 {
  using Vec = __m512;
  using Words = __m512i;  // one packed word per lane, see gemm_packed.h
  using Lanes = __mmask16;
  static constexpr int kLanes = 16;
  static constexpr Lanes kAllLanes = 0xFFFF;

  // The lanes i, i + 1, … that lie below n.
  [[gnu::always_inline]] static Lanes LanesBelow(int64_t n, int64_t i) {
    return n - i >= 16 ? kAllLanes : n <= i ? 0 : static_cast<Lanes>((1u << (n - i)) - 1);
  }

  [[gnu::always_inline]] static Vec Zero() { return _mm512_setzero_ps(); }
  [[gnu::always_inline]] static Vec Broadcast(float value) { return _mm512_set1_ps(value); }
  [[gnu::always_inline]] static Vec Mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  [[gnu::always_inline]] static Vec Max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  [[gnu::always_inline]] static Vec Min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  [[gnu::always_inline]] static Vec Div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  [[gnu::always_inline]] static Vec Abs(Vec a) { return _mm512_abs_ps(a); }

  // ---- whole registers of aligned scratch

  [[gnu::always_inline]] static Vec Load(const float* from) { return _mm512_load_ps(from); }
  [[gnu::always_inline]] static void Store(float* to, Vec value) { _mm512_store_ps(to, value); }
  [[gnu::always_inline]] static Words LoadWords(const uint32_t* from) {
    return _mm512_load_si512(from);
  }
  [[gnu::always_inline]] static Words BroadcastWord(uint32_t word) {
    return _mm512_set1_epi32(static_cast<int>(word));
  }

  [[gnu::always_inline]] static Words AsWords(Vec values) { return _mm512_castps_si512(values); }

  // ---- the contract's scaling: a zero partial contributes 0 whatever the scale

  [[gnu::always_inline]] static Lanes NonZero(Vec partial) {
    return _mm512_cmp_ps_mask(partial, Zero(), _CMP_NEQ_UQ);
  }
  [[gnu::always_inline]] static Vec ScaleNonZero(Vec partial, Vec scale) {
    return _mm512_maskz_mul_ps(NonZero(partial), partial, scale);
  }
  [[gnu::always_inline]] static Vec AddScaledNonZero(Vec partial, Vec scale, Vec acc) {
    return _mm512_mask3_fmadd_ps(partial, scale, acc, NonZero(partial));
  }

  // ---- users' arrays: lanes that do not exist touch no memory

  template <InType type>
  [[gnu::always_inline]] static Vec LoadFrom(const void* array, int64_t i, Lanes lanes) {
    if constexpr (type == InType::kF32) {
      return _mm512_maskz_loadu_ps(lanes, static_cast<const float*>(array) + i);
    } else {
      const __m256i bits = _mm256_maskz_loadu_epi16(lanes, static_cast<const uint16_t*>(array) + i);
      if constexpr (type == InType::kF16) return _mm512_cvtph_ps(bits);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
  }

  [[gnu::always_inline]] static Words LoadWordsFrom(const uint32_t* array, int64_t i, Lanes lanes) {
    return _mm512_maskz_loadu_epi32(lanes, array + i);
  }

  template <OutType type>
  [[gnu::always_inline]] static void StoreTo(void* array, int64_t i, Lanes lanes, Vec value) {
    if constexpr (type == OutType::kF32) {
      _mm512_mask_storeu_ps(static_cast<float*>(array) + i, lanes, value);
    } else {
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(array) + i, lanes,
                               type == OutType::kBF16 ? ToBf16(value) : ToF16(value));
    }
  }

  // ---- FP8

  // `count` codes, at most 16, as bytes; zeros follow.
  [[gnu::always_inline]] static __m128i LoadCodes(const uint8_t* codes, int64_t count) {
    if (count >= 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return _mm_maskz_loadu_epi8(LanesBelow(count, 0), codes);
  }

  // The values of 16 codes. E5M2 is the upper byte of F16. E4M3FN shifted to F16's mantissa is 2^-8
  // of its value, since the biases are 7 and 15. F16 converts subnormals without a detour.
  template <Format format>
  [[gnu::always_inline]] static void Decode(__m128i codes, Vec (&values)[1]) {
    if constexpr (format == Format::kE5M2) {
      values[0] = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
    } else {
      const __m256i sign_twice = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
      const __m256i half = _mm256_and_si256(sign_twice, _mm256_set1_epi16(~0x4000));
      // NaN, the code of all ones, is the only one that carries into the bit left free; with that
      // bit it is a NaN of F16.
      const __m256i carried = _mm256_add_epi16(half, _mm256_set1_epi16(0x0080));
      constexpr int kAOrBAndC = 0xF8;
      const __m256i with_nan =
          _mm256_ternarylogic_epi32(half, carried, _mm256_set1_epi16(0x4000), kAOrBAndC);
      values[0] = _mm512_mul_ps(_mm512_cvtph_ps(with_nan), _mm512_set1_ps(256.0f));
    }
  }

 private:
  // To nearest even by integer steps: vcvtneps2bf16 would flush subnormals, and need another ISA.
  [[gnu::always_inline]] static __m256i ToBf16(Vec value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i top = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const Lanes is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_or_epi32(rounded, is_nan, top, _mm512_set1_epi32(0x0040)));
  }

  [[gnu::always_inline]] static __m256i ToF16(Vec value) {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

}  // namespace
}  // namespace jax_fp8
