// AVX-512 as the trait that the emulation is written on: 64 columns, the byte of each in one
// register. Included only by emulate_avx512.cc; everything here is local to it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/isa_avx512.h"

namespace jax_fp8 {
namespace {

struct EmulateAvx512 : Avx512 {
  static constexpr int kCols = 64;
  static constexpr int kFloatRows = 3, kDoubleRows = 2;  // that fit the registers
  using Bytes = __m512i;

  // The rounding mode is part of the instructions below.
  template <bool kDown>
  struct Rounds {
    Rounds() {}
  };

  [[gnu::always_inline]] static Bytes LoadBytes(const void* from) {
    return _mm512_load_si512(from);
  }
  [[gnu::always_inline]] static void StoreBytes(void* to, Bytes x) { _mm512_store_si512(to, x); }
  [[gnu::always_inline]] static Bytes ZeroBytes() { return _mm512_setzero_si512(); }
  [[gnu::always_inline]] static Bytes SetByte(int x) {
    return _mm512_set1_epi8(static_cast<char>(x));
  }
  [[gnu::always_inline]] static Bytes RepeatWord(uint32_t word) {
    return _mm512_set1_epi32(static_cast<int>(word));
  }
  [[gnu::always_inline]] static Bytes AddBytes(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
  [[gnu::always_inline]] static Bytes SubBytes(Bytes a, Bytes b) { return _mm512_sub_epi8(a, b); }
  [[gnu::always_inline]] static Bytes MaxBytes(Bytes a, Bytes b) { return _mm512_max_epu8(a, b); }
  [[gnu::always_inline]] static Bytes MinBytes(Bytes a, Bytes b) { return _mm512_min_epu8(a, b); }
  // count + 1 where x > y, as signed bytes.
  [[gnu::always_inline]] static Bytes CountAbove(Bytes count, Bytes x, Bytes y) {
    return _mm512_mask_sub_epi8(count, _mm512_cmpgt_epi8_mask(x, y), count, SetByte(-1));
  }

  // ---- 16 words

  using Ints = __m512i;
  [[gnu::always_inline]] static Ints Bits(Vec x) { return _mm512_castps_si512(x); }
  [[gnu::always_inline]] static Vec FromBits(Ints x) { return _mm512_castsi512_ps(x); }
  [[gnu::always_inline]] static Ints SetInt(int x) { return _mm512_set1_epi32(x); }
  [[gnu::always_inline]] static Ints AddInts(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  [[gnu::always_inline]] static Ints SubInts(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
  [[gnu::always_inline]] static Ints MaxInts(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
  [[gnu::always_inline]] static Ints MinInts(Ints a, Ints b) { return _mm512_min_epi32(a, b); }
  [[gnu::always_inline]] static Ints AndInts(Ints a, Ints b) { return _mm512_and_si512(a, b); }
  [[gnu::always_inline]] static Ints OrInts(Ints a, Ints b) { return _mm512_or_si512(a, b); }
  [[gnu::always_inline]] static Ints ExponentField(Vec x) {
    return _mm512_srli_epi32(_mm512_slli_epi32(Bits(x), 1), 24);
  }
  [[gnu::always_inline]] static Ints OddBit(Ints x, int bit) {
    return _mm512_and_si512(_mm512_srli_epi32(x, bit), SetInt(1));
  }
  // All ones where it holds.
  [[gnu::always_inline]] static Ints IsAbove(Ints a, Ints b) {
    return _mm512_movm_epi32(_mm512_cmpgt_epi32_mask(a, b));
  }
  [[gnu::always_inline]] static Ints DiffersFromZero(Vec x) {  // false for NaN
    return _mm512_movm_epi32(_mm512_cmp_ps_mask(x, Zero(), _CMP_NEQ_OQ));
  }
  [[gnu::always_inline]] static Ints SignMask(Ints x) { return _mm512_srai_epi32(x, 31); }
  [[gnu::always_inline]] static Ints AndNotInts(Ints mask, Ints x) {
    return _mm512_andnot_si512(mask, x);
  }
  [[gnu::always_inline]] static Ints XorInts(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
  // The lowest bytes of words 0 … 255, of `kCols / kLanes` registers.
  [[gnu::always_inline]] static Bytes ToBytes(const Ints (&x)[4]) {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(x[0])),
                                                _mm512_cvtepi32_epi8(x[1]), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(x[2])),
                                                 _mm512_cvtepi32_epi8(x[3]), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }

  [[gnu::always_inline]] static Ints WidenBytes(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(from)));
  }

  // ---- 16 floats

  [[gnu::always_inline]] static Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  [[gnu::always_inline]] static Vec Sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  [[gnu::always_inline]] static Vec Fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  [[gnu::always_inline]] static Vec ReplaceNan(Vec x, Vec nan) {
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
  }
  [[gnu::always_inline]] static Vec RoundToFp16(Vec x) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
constexpr int kUp = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
constexpr int kTowardZero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;

// Lanes of the accumulator's type; see emulate_aligned.h for what they are asked to do.
template <class Isa, class Real>
struct RealLanes;

template <>
struct RealLanes<EmulateAvx512, float> {
  using Vec = __m512;
  static constexpr int kLanes = 16, kMantissa = 23;

  [[gnu::always_inline]] static Vec Load(const float* from) { return _mm512_load_ps(from); }
  [[gnu::always_inline]] static Vec Broadcast(float x) { return _mm512_set1_ps(x); }
  [[gnu::always_inline]] static Vec LoadFloats(const float* from) { return _mm512_load_ps(from); }
  [[gnu::always_inline]] static Vec FmaDown(Vec a, Vec b, Vec c) {
    return _mm512_fmadd_round_ps(a, b, c, kDown);
  }
  [[gnu::always_inline]] static Vec AddDown(Vec a, Vec b) {
    return _mm512_add_round_ps(a, b, kDown);
  }
  // grid + x, x cut toward zero.
  [[gnu::always_inline]] static Vec AddTowardZero(Vec grid, Vec x) {
    const __mmask16 is_negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
    return _mm512_mask_add_round_ps(AddDown(grid, x), is_negative, grid, x, kUp);
  }
  // a - b where that is exact; no difference is +0.
  [[gnu::always_inline]] static Vec SubExact(Vec a, Vec b) {
    return _mm512_sub_round_ps(a, b, kNearest);
  }
  // 1.5 · 2^(exponent + above).
  [[gnu::always_inline]] static Vec Grid(const uint8_t* exponents, int above) {
    const __m512i e =
        _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(exponents)));
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(above << 23 | 0x400000)));
  }
  [[gnu::always_inline]] static Vec AddUnits(Vec x, const uint8_t* counts) {
    const __m512i n =
        _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(counts)));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), n));
  }
  [[gnu::always_inline]] static void StoreRzE8M13(float* to, Vec x) {
    const __m512i bits = _mm512_castps_si512(x);
    _mm512_store_si512(to, _mm512_and_si512(bits, _mm512_set1_epi32(~0x3FF)));
  }
  [[gnu::always_inline]] static void StoreRneFp16(float* to, Vec x) {
    // + 0: what rounds to -0 is +0.
    _mm512_store_ps(to, _mm512_add_ps(EmulateAvx512::RoundToFp16(x), _mm512_setzero_ps()));
  }
};

template <>
struct RealLanes<EmulateAvx512, double> {
  using Vec = __m512d;
  static constexpr int kLanes = 8, kMantissa = 52;

  [[gnu::always_inline]] static Vec Load(const double* from) { return _mm512_load_pd(from); }
  [[gnu::always_inline]] static Vec Broadcast(double x) { return _mm512_set1_pd(x); }
  [[gnu::always_inline]] static void Store(double* to, Vec x) { _mm512_store_pd(to, x); }
  [[gnu::always_inline]] static Vec LoadFloats(const float* from) {
    return _mm512_cvtps_pd(_mm256_load_ps(from));
  }
  // 1 / x of powers of two.
  [[gnu::always_inline]] static Vec Inverse(const float* from) {
    const __m512i bits = _mm512_castpd_si512(LoadFloats(from));
    return _mm512_castsi512_pd(_mm512_sub_epi64(_mm512_set1_epi64(int64_t{2046} << 52), bits));
  }
  [[gnu::always_inline]] static Vec Mul(Vec a, Vec b) { return _mm512_mul_pd(a, b); }
  [[gnu::always_inline]] static Vec FmaDown(Vec a, Vec b, Vec c) {
    return _mm512_fmadd_round_pd(a, b, c, kDown);
  }
  [[gnu::always_inline]] static Vec AddDown(Vec a, Vec b) {
    return _mm512_add_round_pd(a, b, kDown);
  }
  [[gnu::always_inline]] static Vec AddTowardZero(Vec grid, Vec x) {
    const __mmask8 is_negative = _mm512_movepi64_mask(_mm512_castpd_si512(x));
    return _mm512_mask_add_round_pd(AddDown(grid, x), is_negative, grid, x, kUp);
  }
  [[gnu::always_inline]] static Vec SubExact(Vec a, Vec b) {
    return _mm512_sub_round_pd(a, b, kNearest);
  }
  [[gnu::always_inline]] static Vec Grid(const uint8_t* exponents, int above) {
    const __m512i e =
        _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents)));
    const int64_t start = static_cast<int64_t>(1023 - 127 + above) << 52 | int64_t{1} << 51;
    return _mm512_castsi512_pd(
        _mm512_add_epi64(_mm512_slli_epi64(e, 52), _mm512_set1_epi64(start)));
  }
  [[gnu::always_inline]] static Vec AddUnits(Vec x, const uint8_t* counts) {
    const __m512i n =
        _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(counts)));
    return _mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(x), n));
  }
  // x where its exponent is at most `below` less than the largest, else 0.
  [[gnu::always_inline]] static Vec ZeroUnlessNear(Vec x, const uint8_t* exponents,
                                                   const uint8_t* largest, int below) {
    auto load = [](const uint8_t* from) __attribute__((always_inline)) {
      return _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    };
    const __m512i reach = _mm512_add_epi64(load(exponents), _mm512_set1_epi64(below));
    return _mm512_maskz_mov_pd(_mm512_cmpge_epi64_mask(reach, load(largest)), x);
  }
  // Rounded down to `bits` fraction bits of its own binade.
  [[gnu::always_inline]] static Vec FloorTo(Vec x, int bits) {
    const __m512i low = _mm512_set1_epi64((int64_t{1} << (52 - bits)) - 1);
    const __m512i i = _mm512_castpd_si512(x);
    const __mmask8 is_negative = _mm512_movepi64_mask(i);
    return _mm512_castsi512_pd(
        _mm512_andnot_si512(low, _mm512_mask_add_epi64(i, is_negative, i, low)));
  }
  [[gnu::always_inline]] static void StoreRzFp32(float* to, Vec x) {
    // Toward zero the largest float would stand for what the machine makes infinity.
    const __m256 rounded = _mm512_cvt_roundpd_ps(x, kTowardZero);
    const Vec too_large = _mm512_set1_pd(0x1p128);
    const __mmask8 overflows = _mm512_cmp_pd_mask(_mm512_abs_pd(x), too_large, _CMP_GE_OQ);
    const __m256 infinity = _mm512_cvt_roundpd_ps(_mm512_mul_pd(x, too_large), kNearest);
    _mm256_store_ps(to, _mm256_mask_mov_ps(rounded, overflows, infinity));
  }
  [[gnu::always_inline]] static void StoreRneFp32(float* to, Vec x) {
    _mm256_store_ps(to, _mm512_cvt_roundpd_ps(x, kNearest));
  }
  [[gnu::always_inline]] static void StoreRneFp16(float* to, Vec x) {
    // To FP32 first, with an odd last bit where that is inexact: then FP16 rounds as from x itself.
    const __m512i bits = _mm512_castpd_si512(x);
    const __m512i dropped = _mm512_set1_epi64((int64_t{1} << 29) - 1);
    const __mmask8 inexact = _mm512_test_epi64_mask(bits, dropped);
    const __m512i cut = _mm512_andnot_si512(dropped, bits);
    const __m512i odd =
        _mm512_mask_or_epi64(cut, inexact, cut, _mm512_set1_epi64(int64_t{1} << 29));
    const __m256 narrow = _mm512_cvtpd_ps(_mm512_castsi512_pd(odd));
    const __m256 rounded =
        _mm256_maskz_cvtph_ps(0xFF, _mm256_maskz_cvtps_ph(0xFF, narrow, kNearest));
    _mm256_store_ps(to, _mm256_add_ps(rounded, _mm256_setzero_ps()));
  }
};

}  // namespace
}  // namespace jax_fp8
