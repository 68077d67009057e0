// The quantiser in AVX2 and F16C: 8 entries at a time in FP32 lanes, 32 codes a store. Same bits as
// quantize_scalar.cc.
#include "cpu/quantize_row_ops.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "cpu/isa_avx2.h"
#include "cpu/quantize_vector.h"

namespace jax_fp8 {
namespace {

struct QuantizeAvx2 : Avx2 {
  static constexpr int kInfinityBits = 0x7F800000;

  static Vec RaiseTo(Vec x, Vec amax) {
    constexpr float kLargestFinite = 0x1.FFFFFEp127f;
    const Vec magnitude = Abs(x);
    const Vec finite = _mm256_cmp_ps(magnitude, Broadcast(kLargestFinite), _CMP_LE_OQ);
    return _mm256_max_ps(amax, _mm256_and_ps(magnitude, finite));
  }

  static float MaxOfLanes(Vec x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  // Rounds at the ulp of the magnitude's binade, or of the lowest one.
  template <Format format>
  static Words Nearest(Vec magnitude) {
    constexpr FormatInfo kInfo = kFormats[static_cast<int>(format)];
    constexpr int kDroppedBits = 23 - kInfo.mantissa_bits;
    const Words lowest_binade = _mm256_set1_epi32((kInfo.min_normal_exponent + 127) << 23);
    const Words exponent_bits =
        _mm256_and_si256(_mm256_castps_si256(magnitude), _mm256_set1_epi32(kInfinityBits));
    const Words binade = _mm256_max_epi32(exponent_bits, lowest_binade);
    const Words rounder = _mm256_add_epi32(binade, _mm256_set1_epi32(kDroppedBits << 23));
    const Vec rounded = _mm256_add_ps(magnitude, _mm256_castsi256_ps(rounder));
    const Words multiple = _mm256_sub_epi32(_mm256_castps_si256(rounded), rounder);
    const Words exponent_code =
        _mm256_srli_epi32(_mm256_sub_epi32(binade, lowest_binade), kDroppedBits);
    return _mm256_add_epi32(multiple, exponent_code);
  }

  template <Format format>
  static Words Stochastic(Vec magnitude, Words bits) {
    constexpr FormatInfo kInfo = kFormats[static_cast<int>(format)];
    const Words one = _mm256_set1_epi32(1);
    const Words lowest_exponent = _mm256_set1_epi32(kInfo.min_normal_exponent + 127);

    // Take apart.
    const Words float_bits = _mm256_castps_si256(magnitude);
    const Words own_exponent = _mm256_max_epi32(_mm256_srli_epi32(float_bits, 23), one);
    const Words significand =
        _mm256_sub_epi32(float_bits, _mm256_slli_epi32(_mm256_sub_epi32(own_exponent, one), 23));
    const Words exponent = _mm256_max_epi32(own_exponent, lowest_exponent);

    // Whole ulps, and the fraction of one in units of 2^-32.
    // NOTE: a shift by 32 or more gives 0, and so does one by a negative count: of the two shifts
    // that make the fraction one counts, or both agree.
    const Words fraction_shift = _mm256_add_epi32(_mm256_sub_epi32(exponent, own_exponent),
                                                  _mm256_set1_epi32(23 - kInfo.mantissa_bits - 32));
    const Words whole =
        _mm256_srlv_epi32(significand, _mm256_add_epi32(fraction_shift, _mm256_set1_epi32(32)));
    const Words fraction = _mm256_or_si256(
        _mm256_srlv_epi32(significand, fraction_shift),
        _mm256_sllv_epi32(significand, _mm256_sub_epi32(_mm256_setzero_si256(), fraction_shift)));

    // Round up by chance.
    const Words exponent_code =
        _mm256_slli_epi32(_mm256_sub_epi32(exponent, lowest_exponent), kInfo.mantissa_bits);
    const Words codes = _mm256_add_epi32(whole, exponent_code);
    // AVX2 compares signed words only: with the upper bit turned the order is the unsigned one.
    const Words turn = _mm256_set1_epi32(INT32_MIN);
    const Words goes_up =
        _mm256_cmpgt_epi32(_mm256_xor_si256(fraction, turn), _mm256_xor_si256(bits, turn));
    return _mm256_sub_epi32(codes, goes_up);
  }

  // NOTE: infinity is decided on x: the quotient of a finite x may overflow, and must then
  // saturate.
  template <Format format>
  static Words WithSpecials(Words codes, Vec x, Vec y) {
    constexpr FormatInfo kInfo = kFormats[static_cast<int>(format)];
    const Words is_inf =
        _mm256_cmpeq_epi32(_mm256_castps_si256(Abs(x)), _mm256_set1_epi32(kInfinityBits));
    codes = _mm256_blendv_epi8(codes, _mm256_set1_epi32(kInfo.inf_code), is_inf);
    const Words is_nan = _mm256_castps_si256(_mm256_cmp_ps(y, y, _CMP_UNORD_Q));
    codes = _mm256_blendv_epi8(codes, _mm256_set1_epi32(kInfo.nan_code), is_nan);
    const Words sign =
        _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(y), 24), _mm256_set1_epi32(0x80));
    return _mm256_or_si256(codes, sign);
  }

  static void StoreCodes(const Words (&lanes)[4], uint8_t* codes) {
    // The packs interleave 128-bit lanes; the last step undoes it.
    const Words interleaved = _mm256_packus_epi16(_mm256_packus_epi32(lanes[0], lanes[1]),
                                                  _mm256_packus_epi32(lanes[2], lanes[3]));
    const Words order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes),
                        _mm256_permutevar8x32_epi32(interleaved, order));
  }

  static void StoreCodes(Words lanes, uint8_t* codes, Lanes count) {
    const __m128i shorts =
        _mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    alignas(8) uint8_t buffer[kLanes];
    _mm_storel_epi64(reinterpret_cast<__m128i*>(buffer), _mm_packus_epi16(shorts, shorts));
    Copy(codes, buffer, count);
  }
};

constexpr QuantizeRowOps kRowOps = MakeRowOps<QuantizeAvx2>();

}  // namespace

const QuantizeRowOps* Avx2QuantizeRowOps() { return &kRowOps; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const QuantizeRowOps* Avx2QuantizeRowOps() { return nullptr; }

}  // namespace jax_fp8

#endif
