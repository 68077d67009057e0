// The quantiser in AVX-512 F, BW, DQ and VL: 16 entries at a time in FP32 lanes, 64 codes a store.
// Same bits as quantize_scalar.cc. Tails are masked: a masked lane touches no memory.
#include "cpu/quantize_row_ops.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "cpu/isa_avx512.h"
#include "cpu/quantize_vector.h"

namespace jax_fp8 {
namespace {

struct QuantizeAvx512 : Avx512 {
  static constexpr int kQuietNaN = 0x01, kPositiveInf = 0x08, kNegativeInf = 0x10;
  static constexpr int kSignalingNaN = 0x80;
  static constexpr int kInfClass = kPositiveInf | kNegativeInf;
  static constexpr int kNaNClass = kQuietNaN | kSignalingNaN;

  static Vec RaiseTo(Vec x, Vec amax) {
    const Lanes finite = _knot_mask16(_mm512_fpclass_ps_mask(x, kInfClass | kNaNClass));
    return _mm512_mask_max_ps(amax, finite, amax, _mm512_abs_ps(x));
  }

  static float MaxOfLanes(Vec x) { return _mm512_reduce_max_ps(x); }

  // Rounds at the ulp of the magnitude's binade, or of the lowest one.
  template <Format format>
  static Words Nearest(Vec magnitude) {
    constexpr FormatInfo kInfo = kFormats[static_cast<int>(format)];
    constexpr int kDroppedBits = 23 - kInfo.mantissa_bits;
    const Words lowest_binade = _mm512_set1_epi32((kInfo.min_normal_exponent + 127) << 23);
    const Words exponent_bits =
        _mm512_and_si512(_mm512_castps_si512(magnitude), _mm512_set1_epi32(0x7F800000));
    const Words binade = _mm512_max_epi32(exponent_bits, lowest_binade);
    const Words rounder = _mm512_add_epi32(binade, _mm512_set1_epi32(kDroppedBits << 23));
    const Vec rounded = _mm512_add_ps(magnitude, _mm512_castsi512_ps(rounder));
    const Words multiple = _mm512_sub_epi32(_mm512_castps_si512(rounded), rounder);
    const Words exponent_code =
        _mm512_srli_epi32(_mm512_sub_epi32(binade, lowest_binade), kDroppedBits);
    return _mm512_add_epi32(multiple, exponent_code);
  }

  template <Format format>
  static Words Stochastic(Vec magnitude, Words bits) {
    constexpr FormatInfo kInfo = kFormats[static_cast<int>(format)];
    const Words one = _mm512_set1_epi32(1);
    const Words lowest_exponent = _mm512_set1_epi32(kInfo.min_normal_exponent + 127);

    // Take apart.
    const Words float_bits = _mm512_castps_si512(magnitude);
    const Words own_exponent = _mm512_max_epi32(_mm512_srli_epi32(float_bits, 23), one);
    const Words significand =
        _mm512_sub_epi32(float_bits, _mm512_slli_epi32(_mm512_sub_epi32(own_exponent, one), 23));
    const Words exponent = _mm512_max_epi32(own_exponent, lowest_exponent);

    // Whole ulps, and the fraction of one in units of 2^-32.
    // NOTE: a shift by 32 or more gives 0, and so does one by a negative count: of the two shifts
    // that make the fraction one counts, or both agree.
    const Words fraction_shift = _mm512_add_epi32(_mm512_sub_epi32(exponent, own_exponent),
                                                  _mm512_set1_epi32(23 - kInfo.mantissa_bits - 32));
    const Words whole =
        _mm512_srlv_epi32(significand, _mm512_add_epi32(fraction_shift, _mm512_set1_epi32(32)));
    const Words fraction = _mm512_or_si512(
        _mm512_srlv_epi32(significand, fraction_shift),
        _mm512_sllv_epi32(significand, _mm512_sub_epi32(_mm512_setzero_si512(), fraction_shift)));

    // Round up by chance.
    const Words exponent_code =
        _mm512_slli_epi32(_mm512_sub_epi32(exponent, lowest_exponent), kInfo.mantissa_bits);
    const Words codes = _mm512_add_epi32(whole, exponent_code);
    return _mm512_mask_add_epi32(codes, _mm512_cmpgt_epu32_mask(fraction, bits), codes, one);
  }

  // NOTE: infinity is decided on x: the quotient of a finite x may overflow, and must then
  // saturate.
  template <Format format>
  static Words WithSpecials(Words codes, Vec x, Vec y) {
    constexpr FormatInfo kInfo = kFormats[static_cast<int>(format)];
    codes = _mm512_mask_mov_epi32(codes, _mm512_fpclass_ps_mask(x, kInfClass),
                                  _mm512_set1_epi32(kInfo.inf_code));
    codes = _mm512_mask_mov_epi32(codes, _mm512_fpclass_ps_mask(y, kNaNClass),
                                  _mm512_set1_epi32(kInfo.nan_code));
    constexpr int kAOrBAndC = 0xF8;
    return _mm512_ternarylogic_epi32(codes, _mm512_srli_epi32(_mm512_castps_si512(y), 24),
                                     _mm512_set1_epi32(0x80), kAOrBAndC);
  }

  static void StoreCodes(const Words (&lanes)[4], uint8_t* codes) {
    // The packs interleave 128-bit lanes; the last step undoes it.
    const Words interleaved = _mm512_packus_epi16(_mm512_packus_epi32(lanes[0], lanes[1]),
                                                  _mm512_packus_epi32(lanes[2], lanes[3]));
    const Words order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(codes, _mm512_permutexvar_epi32(order, interleaved));
  }

  static void StoreCodes(Words lanes, uint8_t* codes, Lanes mask) {
    _mm_mask_storeu_epi8(codes, mask, _mm512_cvtepi32_epi8(lanes));
  }
};

constexpr QuantizeRowOps kRowOps = MakeRowOps<QuantizeAvx512>();

}  // namespace

const QuantizeRowOps* Avx512QuantizeRowOps() { return &kRowOps; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const QuantizeRowOps* Avx512QuantizeRowOps() { return nullptr; }

}  // namespace jax_fp8

#endif
