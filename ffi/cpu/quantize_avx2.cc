// The quantiser in AVX2 and F16C: 8 entries at a time in FP32 lanes, 32 codes a store. Same bits as
// quantize_scalar.cc.
#include "cpu/quantize_row_ops.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "cpu/isa_avx2.h"
#include "cpu/quantize_vector.h"

namespace jax_fp8 {
namespace {

struct QuantizeAvx2 : Avx2 {
  static Vec Abs(Vec x) { return _mm256_andnot_ps(Broadcast(-0.0f), x); }

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

  // The steps are those of EncodeOne in quantize_scalar.cc.
  template <Format format>
  static Words EncodeLanes(Vec x, Vec scale, Vec ceiling) {
    constexpr FormatInfo kInfo = kFormats[static_cast<int>(format)];
    constexpr int kDroppedBits = 23 - kInfo.mantissa_bits;
    const Words lowest_binade = _mm256_set1_epi32((kInfo.min_normal_exponent + 127) << 23);
    const Words exponent_mask = _mm256_set1_epi32(0x7F800000);

    // Divide and clip.
    const Vec y = _mm256_div_ps(x, scale);
    const Vec magnitude = _mm256_min_ps(Abs(y), ceiling);

    // Round at the ulp of the magnitude's binade, or of the lowest one.
    const Words exponent_bits = _mm256_and_si256(_mm256_castps_si256(magnitude), exponent_mask);
    const Words binade = _mm256_max_epi32(exponent_bits, lowest_binade);
    const Words rounder = _mm256_add_epi32(binade, _mm256_set1_epi32(kDroppedBits << 23));
    const Vec rounded = _mm256_add_ps(magnitude, _mm256_castsi256_ps(rounder));
    const Words multiple = _mm256_sub_epi32(_mm256_castps_si256(rounded), rounder);
    const Words exponent_code =
        _mm256_srli_epi32(_mm256_sub_epi32(binade, lowest_binade), kDroppedBits);
    Words codes = _mm256_add_epi32(multiple, exponent_code);

    // Put the special values over the nonsense that they gave above.
    // NOTE: infinity is decided on x: the quotient of a finite x may overflow, and must then
    // saturate.
    const Words is_inf = _mm256_cmpeq_epi32(_mm256_castps_si256(Abs(x)), exponent_mask);
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
