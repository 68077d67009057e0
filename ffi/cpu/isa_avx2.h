// AVX2, FMA and F16C as the trait that kernel templates are written on: 8 FP32 lanes, and a count
// of the lanes that exist. Included only by files compiled for them; everything here is local to
// such a file.
//
// AVX2 masks 32-bit lanes only. Fewer than 16 bytes of codes, or than 8 of 16-bit values, go
// through a buffer on the stack.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "common/fp8.h"
#include "common/gemm_desc.h"
#include "common/quantize_desc.h"

namespace jax_fp8 {
namespace {

struct Avx2 {
  using Vec = __m256;
  using Words = __m256i;  // one packed word per lane, see gemm_packed.h
  using Lanes = int;      // the first so many
  static constexpr int kLanes = 8;
  static constexpr Lanes kAllLanes = 8;

  // The lanes i, i + 1, … that lie below n.
  [[gnu::always_inline]] static Lanes LanesBelow(int64_t n, int64_t i) {
    return n - i >= 8 ? kAllLanes : n <= i ? 0 : static_cast<Lanes>(n - i);
  }

  [[gnu::always_inline]] static Vec Zero() { return _mm256_setzero_ps(); }
  [[gnu::always_inline]] static Vec Broadcast(float value) { return _mm256_set1_ps(value); }
  [[gnu::always_inline]] static Vec Mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  [[gnu::always_inline]] static Vec Max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  [[gnu::always_inline]] static Vec Min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  [[gnu::always_inline]] static Vec Div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  [[gnu::always_inline]] static Vec Abs(Vec a) { return _mm256_andnot_ps(Broadcast(-0.0f), a); }

  // ---- whole registers of aligned scratch

  [[gnu::always_inline]] static Vec Load(const float* from) { return _mm256_load_ps(from); }
  [[gnu::always_inline]] static void Store(float* to, Vec value) { _mm256_store_ps(to, value); }
  [[gnu::always_inline]] static Words LoadWords(const uint32_t* from) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  }
  [[gnu::always_inline]] static Words BroadcastWord(uint32_t word) {
    return _mm256_set1_epi32(static_cast<int>(word));
  }

  [[gnu::always_inline]] static Words AsWords(Vec values) { return _mm256_castps_si256(values); }

  // ---- the contract's scaling: a zero partial contributes 0 whatever the scale

  [[gnu::always_inline]] static Vec NonZero(Vec partial) {
    return _mm256_cmp_ps(partial, Zero(), _CMP_NEQ_UQ);
  }
  [[gnu::always_inline]] static Vec ScaleNonZero(Vec partial, Vec scale) {
    return _mm256_and_ps(_mm256_mul_ps(partial, scale), NonZero(partial));
  }
  [[gnu::always_inline]] static Vec AddScaledNonZero(Vec partial, Vec scale, Vec acc) {
    return _mm256_blendv_ps(acc, _mm256_fmadd_ps(partial, scale, acc), NonZero(partial));
  }

  // ---- users' arrays: lanes that do not exist touch no memory

  template <InType type>
  [[gnu::always_inline]] static Vec LoadFrom(const void* array, int64_t i, Lanes lanes) {
    if constexpr (type == InType::kF32) {
      const float* from = static_cast<const float*>(array) + i;
      return lanes == kAllLanes ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, Mask(lanes));
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(array) + i;
      alignas(16) uint16_t buffer[kLanes] = {};
      if (lanes != kAllLanes) from = Copy(buffer, from, lanes);
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      if constexpr (type == InType::kF16) return _mm256_cvtph_ps(bits);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
  }

  [[gnu::always_inline]] static Words LoadWordsFrom(const uint32_t* array, int64_t i, Lanes lanes) {
    return _mm256_castps_si256(LoadFrom<InType::kF32>(array, i, lanes));
  }

  template <OutType type>
  [[gnu::always_inline]] static void StoreTo(void* array, int64_t i, Lanes lanes, Vec value) {
    if constexpr (type == OutType::kF32) {
      float* to = static_cast<float*>(array) + i;
      lanes == kAllLanes ? _mm256_storeu_ps(to, value)
                         : _mm256_maskstore_ps(to, Mask(lanes), value);
    } else {
      uint16_t* to = static_cast<uint16_t*>(array) + i;
      const __m128i bits = type == OutType::kBF16 ? ToBf16(value) : ToF16(value);
      if (lanes == kAllLanes) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits);
      } else {
        alignas(16) uint16_t buffer[kLanes];
        _mm_store_si128(reinterpret_cast<__m128i*>(buffer), bits);
        Copy(to, buffer, lanes);
      }
    }
  }

  // ---- FP8

  // `count` codes, at most 16, as bytes; zeros follow.
  [[gnu::always_inline]] static __m128i LoadCodes(const uint8_t* codes, int64_t count) {
    alignas(16) uint8_t buffer[16] = {};
    if (count < 16) codes = Copy(buffer, codes, count);
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  }

  // The values of 16 codes. E5M2 is the upper byte of F16. E4M3FN shifted to F16's mantissa is 2^-8
  // of its value, since the biases are 7 and 15. F16 converts subnormals without a detour.
  template <Format format>
  [[gnu::always_inline]] static void Decode(__m128i codes, Vec (&values)[2]) {
    if constexpr (format == Format::kE5M2) {
      const __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
      values[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
      values[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    } else {
      const __m256i sign_twice = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
      const __m256i half = _mm256_and_si256(sign_twice, _mm256_set1_epi16(~0x4000));
      // NaN, the code of all ones, is the only one that carries into the bit left free; with that
      // bit it is a NaN of F16.
      const __m256i carried = _mm256_add_epi16(half, _mm256_set1_epi16(0x0080));
      const __m256i with_nan =
          _mm256_or_si256(half, _mm256_and_si256(carried, _mm256_set1_epi16(0x4000)));
      const Vec bias_difference = _mm256_set1_ps(256.0f);
      values[0] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(with_nan)), bias_difference);
      values[1] =
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(with_nan, 1)), bias_difference);
    }
  }

  // `count` entries to where they go; returns that place.
  template <class T>
  [[gnu::always_inline]] static T* Copy(T* to, const T* from, int64_t count) {
    if (count > 0) std::memcpy(to, from, count * sizeof(T));
    return to;
  }

 private:
  [[gnu::always_inline]] static __m256i Mask(Lanes lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  // To nearest even by integer steps.
  [[gnu::always_inline]] static __m128i ToBf16(Vec value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i top = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i quiet_nan = _mm256_or_si256(top, _mm256_set1_epi32(0x0040));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i result = _mm256_blendv_epi8(rounded, quiet_nan, is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
  }

  [[gnu::always_inline]] static __m128i ToF16(Vec value) {
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

}  // namespace
}  // namespace jax_fp8
