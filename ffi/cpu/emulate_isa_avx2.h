// AVX2 as the trait that the emulation is written on: 32 columns, the byte of each in one register.
// Included only by emulate_avx2.cc; everything here is local to it.
//
// AVX2 has no rounding mode in its instructions: the names that say "Down" do as they say while a
// Rounds<true> lives. In that mode x - x is -0, and toward zero takes detours.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/isa_avx2.h"

namespace jax_fp8 {
namespace {

struct EmulateAvx2 : Avx2 {
  static constexpr int kCols = 32;
  static constexpr int kFloatRows = 2, kDoubleRows = 1;  // that fit the registers
  using Bytes = __m256i;

  // Sets the rounding mode: downward or to nearest.
  // NOTE: compilers know nothing of it. Code that depends on it must be a function of its own, that
  // is not inlined and gets its numbers through memory.
  template <bool kDown>
  class Rounds {
   public:
    Rounds() : saved_(_mm_getcsr()) {
      if (kDown) _mm_setcsr((saved_ & ~_MM_ROUND_MASK) | _MM_ROUND_DOWN);
    }
    ~Rounds() {
      if (kDown) _mm_setcsr(saved_);
    }
    Rounds(const Rounds&) = delete;
    Rounds& operator=(const Rounds&) = delete;

   private:
    unsigned saved_;
  };

  [[gnu::always_inline]] static Bytes LoadBytes(const void* from) {
    return _mm256_load_si256(static_cast<const __m256i*>(from));
  }
  [[gnu::always_inline]] static void StoreBytes(void* to, Bytes x) {
    _mm256_store_si256(static_cast<__m256i*>(to), x);
  }
  [[gnu::always_inline]] static Bytes ZeroBytes() { return _mm256_setzero_si256(); }
  [[gnu::always_inline]] static Bytes SetByte(int x) {
    return _mm256_set1_epi8(static_cast<char>(x));
  }
  [[gnu::always_inline]] static Bytes RepeatWord(uint32_t word) {
    return _mm256_set1_epi32(static_cast<int>(word));
  }
  [[gnu::always_inline]] static Bytes AddBytes(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
  [[gnu::always_inline]] static Bytes SubBytes(Bytes a, Bytes b) { return _mm256_sub_epi8(a, b); }
  [[gnu::always_inline]] static Bytes MaxBytes(Bytes a, Bytes b) { return _mm256_max_epu8(a, b); }
  [[gnu::always_inline]] static Bytes MinBytes(Bytes a, Bytes b) { return _mm256_min_epu8(a, b); }
  // count + 1 where x > y, as signed bytes.
  [[gnu::always_inline]] static Bytes CountAbove(Bytes count, Bytes x, Bytes y) {
    return _mm256_sub_epi8(count, _mm256_cmpgt_epi8(x, y));
  }

  // ---- 8 words

  using Ints = __m256i;
  [[gnu::always_inline]] static Ints Bits(Vec x) { return _mm256_castps_si256(x); }
  [[gnu::always_inline]] static Vec FromBits(Ints x) { return _mm256_castsi256_ps(x); }
  [[gnu::always_inline]] static Ints SetInt(int x) { return _mm256_set1_epi32(x); }
  [[gnu::always_inline]] static Ints AddInts(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  [[gnu::always_inline]] static Ints SubInts(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
  [[gnu::always_inline]] static Ints MaxInts(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
  [[gnu::always_inline]] static Ints MinInts(Ints a, Ints b) { return _mm256_min_epi32(a, b); }
  [[gnu::always_inline]] static Ints AndInts(Ints a, Ints b) { return _mm256_and_si256(a, b); }
  [[gnu::always_inline]] static Ints OrInts(Ints a, Ints b) { return _mm256_or_si256(a, b); }
  [[gnu::always_inline]] static Ints XorInts(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
  [[gnu::always_inline]] static Ints AndNotInts(Ints mask, Ints x) {
    return _mm256_andnot_si256(mask, x);
  }
  [[gnu::always_inline]] static Ints ExponentField(Vec x) {
    return _mm256_srli_epi32(_mm256_slli_epi32(Bits(x), 1), 24);
  }
  [[gnu::always_inline]] static Ints OddBit(Ints x, int bit) {
    return _mm256_and_si256(_mm256_srli_epi32(x, bit), SetInt(1));
  }
  // All ones where it holds.
  [[gnu::always_inline]] static Ints IsAbove(Ints a, Ints b) { return _mm256_cmpgt_epi32(a, b); }
  [[gnu::always_inline]] static Ints DiffersFromZero(Vec x) {  // false for NaN
    return Bits(_mm256_cmp_ps(x, Zero(), _CMP_NEQ_OQ));
  }
  [[gnu::always_inline]] static Ints SignMask(Ints x) { return _mm256_srai_epi32(x, 31); }
  [[gnu::always_inline]] static Ints WidenBytes(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  // The lowest bytes of words 0 … 255, of `kCols / kLanes` registers.
  [[gnu::always_inline]] static Bytes ToBytes(const Ints (&x)[4]) {
    const __m256i packed =
        _mm256_packus_epi16(_mm256_packus_epi32(x[0], x[1]), _mm256_packus_epi32(x[2], x[3]));
    // Packing works within 16-byte lanes: words of four bytes are x0 x1 x2 x3 of either lane.
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }

  // ---- 8 floats

  [[gnu::always_inline]] static Vec Add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  [[gnu::always_inline]] static Vec Sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  [[gnu::always_inline]] static Vec Fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  [[gnu::always_inline]] static Vec ReplaceNan(Vec x, Vec nan) {
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  [[gnu::always_inline]] static Vec RoundToFp16(Vec x) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

// Lanes of the accumulator's type; see emulate_aligned.h for what they are asked to do.
template <class Isa, class Real>
struct RealLanes;

template <>
struct RealLanes<EmulateAvx2, float> {
  using Vec = __m256;
  static constexpr int kLanes = 8, kMantissa = 23;

  [[gnu::always_inline]] static Vec Load(const float* from) { return _mm256_load_ps(from); }
  [[gnu::always_inline]] static Vec Broadcast(float x) { return _mm256_set1_ps(x); }
  [[gnu::always_inline]] static Vec LoadFloats(const float* from) { return _mm256_load_ps(from); }
  [[gnu::always_inline]] static Vec FmaDown(Vec a, Vec b, Vec c) {
    return _mm256_fmadd_ps(a, b, c);
  }
  [[gnu::always_inline]] static Vec AddDown(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  // a - b where that is exact; no difference is +0.
  [[gnu::always_inline]] static Vec SubExact(Vec a, Vec b) {
    return PositiveZero(_mm256_sub_ps(a, b));
  }
  // grid + x, x cut toward zero.
  [[gnu::always_inline]] static Vec AddTowardZero(Vec grid, Vec x) {
    const Vec sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
    const Vec magnitude = _mm256_xor_ps(x, sign);
    const Vec cut = _mm256_sub_ps(AddDown(grid, magnitude), grid);
    return _mm256_add_ps(grid, _mm256_xor_ps(cut, sign));
  }
  // 1.5 · 2^(exponent + above).
  [[gnu::always_inline]] static Vec Grid(const uint8_t* exponents, int above) {
    const __m256i e = EmulateAvx2::WidenBytes(exponents);
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(above << 23 | 0x400000)));
  }
  [[gnu::always_inline]] static Vec AddUnits(Vec x, const uint8_t* counts) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(x), EmulateAvx2::WidenBytes(counts)));
  }
  [[gnu::always_inline]] static void StoreRzE8M13(float* to, Vec x) {
    _mm256_store_ps(to, _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(~0x3FF))));
  }
  [[gnu::always_inline]] static void StoreRneFp16(float* to, Vec x) {
    _mm256_store_ps(to, PositiveZero(EmulateAvx2::RoundToFp16(x)));
  }

 private:
  [[gnu::always_inline]] static Vec PositiveZero(Vec x) {
    return _mm256_and_ps(x, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_UQ));
  }
};

template <>
struct RealLanes<EmulateAvx2, double> {
  using Vec = __m256d;
  static constexpr int kLanes = 4, kMantissa = 52;

  [[gnu::always_inline]] static Vec Load(const double* from) { return _mm256_load_pd(from); }
  [[gnu::always_inline]] static void Store(double* to, Vec x) { _mm256_store_pd(to, x); }
  [[gnu::always_inline]] static Vec Broadcast(double x) { return _mm256_set1_pd(x); }
  [[gnu::always_inline]] static Vec LoadFloats(const float* from) {
    return _mm256_cvtps_pd(_mm_load_ps(from));
  }
  // 1 / x of powers of two.
  [[gnu::always_inline]] static Vec Inverse(const float* from) {
    const __m256i bits = _mm256_castpd_si256(LoadFloats(from));
    return _mm256_castsi256_pd(_mm256_sub_epi64(_mm256_set1_epi64x(int64_t{2046} << 52), bits));
  }
  [[gnu::always_inline]] static Vec Mul(Vec a, Vec b) { return _mm256_mul_pd(a, b); }
  [[gnu::always_inline]] static Vec FmaDown(Vec a, Vec b, Vec c) {
    return _mm256_fmadd_pd(a, b, c);
  }
  [[gnu::always_inline]] static Vec AddDown(Vec a, Vec b) { return _mm256_add_pd(a, b); }
  [[gnu::always_inline]] static Vec SubExact(Vec a, Vec b) {
    const Vec x = _mm256_sub_pd(a, b);
    return _mm256_and_pd(x, _mm256_cmp_pd(x, _mm256_setzero_pd(), _CMP_NEQ_UQ));
  }
  [[gnu::always_inline]] static Vec AddTowardZero(Vec grid, Vec x) {
    const Vec sign = Sign(x);
    const Vec cut = _mm256_sub_pd(AddDown(grid, _mm256_xor_pd(x, sign)), grid);
    return _mm256_add_pd(grid, _mm256_xor_pd(cut, sign));
  }
  [[gnu::always_inline]] static Vec Grid(const uint8_t* exponents, int above) {
    const int64_t start = static_cast<int64_t>(1023 - 127 + above) << 52 | int64_t{1} << 51;
    return _mm256_castsi256_pd(
        _mm256_add_epi64(_mm256_slli_epi64(Widen(exponents), 52), _mm256_set1_epi64x(start)));
  }
  [[gnu::always_inline]] static Vec AddUnits(Vec x, const uint8_t* counts) {
    return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(x), Widen(counts)));
  }
  // x where its exponent is at most `below` less than the largest, else 0.
  [[gnu::always_inline]] static Vec ZeroUnlessNear(Vec x, const uint8_t* exponents,
                                                   const uint8_t* largest, int below) {
    const __m256i reach = _mm256_add_epi64(Widen(exponents), _mm256_set1_epi64x(below));
    const __m256i is_far = _mm256_cmpgt_epi64(Widen(largest), reach);
    return _mm256_andnot_pd(_mm256_castsi256_pd(is_far), x);
  }
  // Rounded down to `bits` fraction bits of its own binade.
  [[gnu::always_inline]] static Vec FloorTo(Vec x, int bits) {
    const __m256i low = _mm256_set1_epi64x((int64_t{1} << (52 - bits)) - 1);
    const __m256i i = _mm256_castpd_si256(x);
    const __m256i is_negative = _mm256_cmpgt_epi64(_mm256_setzero_si256(), i);
    return _mm256_castsi256_pd(
        _mm256_andnot_si256(low, _mm256_add_epi64(i, _mm256_and_si256(is_negative, low))));
  }
  [[gnu::always_inline]] static void StoreRzFp32(float* to, Vec x) {
    // Of a magnitude, down is toward zero; there the largest float would stand for what the machine
    // makes infinity.
    const Vec sign = Sign(x), magnitude = _mm256_xor_pd(x, sign);
    const Vec overflows = _mm256_cmp_pd(magnitude, _mm256_set1_pd(0x1p128), _CMP_GE_OQ);
    const __m128 rounded =
        _mm_blendv_ps(_mm256_cvtpd_ps(magnitude), _mm_castsi128_ps(_mm_set1_epi32(0x7F800000)),
                      Narrow(overflows));
    const __m128 signs = _mm_and_ps(Narrow(sign), _mm_set1_ps(-0.0f));
    _mm_store_ps(to, _mm_or_ps(rounded, signs));
  }
  [[gnu::always_inline]] static void StoreRneFp32(float* to, Vec x) {
    // By integer steps: 29 bits are dropped.
    const __m256i bits = _mm256_castpd_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi64(bits, 29), _mm256_set1_epi64x(1));
    const __m256i half = _mm256_add_epi64(odd, _mm256_set1_epi64x((int64_t{1} << 28) - 1));
    const __m256i rounded = _mm256_andnot_si256(DroppedBits(), _mm256_add_epi64(bits, half));
    _mm_store_ps(to, _mm256_cvtpd_ps(_mm256_castsi256_pd(rounded)));
  }
  [[gnu::always_inline]] static void StoreRneFp16(float* to, Vec x) {
    // To FP32 first, with an odd last bit where that is inexact: then FP16 rounds as from x itself.
    const __m256i bits = _mm256_castpd_si256(x);
    const __m256i is_exact =
        _mm256_cmpeq_epi64(_mm256_and_si256(bits, DroppedBits()), _mm256_setzero_si256());
    const __m256i last = _mm256_andnot_si256(is_exact, _mm256_set1_epi64x(int64_t{1} << 29));
    const __m256i odd = _mm256_or_si256(_mm256_andnot_si256(DroppedBits(), bits), last);
    const __m128 narrow = _mm256_cvtpd_ps(_mm256_castsi256_pd(odd));
    const __m128 rounded =
        _mm_cvtph_ps(_mm_cvtps_ph(narrow, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_store_ps(to, _mm_and_ps(rounded, _mm_cmpneq_ps(rounded, _mm_setzero_ps())));
  }

 private:
  [[gnu::always_inline]] static __m256i DroppedBits() {
    return _mm256_set1_epi64x((int64_t{1} << 29) - 1);
  }
  [[gnu::always_inline]] static Vec Sign(Vec x) { return _mm256_and_pd(x, _mm256_set1_pd(-0.0)); }
  [[gnu::always_inline]] static __m256i Widen(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof(four));
    return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
  }
  // The upper words of four.
  [[gnu::always_inline]] static __m128 Narrow(Vec x) {
    const __m256i words = _mm256_permutevar8x32_epi32(_mm256_castpd_si256(x),
                                                      _mm256_setr_epi32(1, 3, 5, 7, 1, 3, 5, 7));
    return _mm_castsi128_ps(_mm256_castsi256_si128(words));
  }
};

}  // namespace
}  // namespace jax_fp8
