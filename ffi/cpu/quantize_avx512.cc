// The quantiser in AVX-512 F, BW, DQ and VL: 16 entries at a time in FP32 lanes, 64 codes a store.
// Same bits as quantize_scalar.cc. Tails are masked: a masked lane touches no memory.
#include "cpu/quantize_row_ops.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

namespace jax_fp8 {
namespace {

constexpr __mmask16 kAllLanes = 0xFFFF;
constexpr int kQuietNaN = 0x01, kPositiveInf = 0x08, kNegativeInf = 0x10, kSignalingNaN = 0x80;
constexpr int kInfClass = kPositiveInf | kNegativeInf;
constexpr int kNaNClass = kQuietNaN | kSignalingNaN;

// The mask of the lanes i, i + 1, … that lie below n.
__mmask16 LanesBelow(int64_t n, int64_t i) {
  return n - i >= 16 ? kAllLanes : n <= i ? 0 : static_cast<__mmask16>((1u << (n - i)) - 1);
}

template <InType in>
__m512 Load(const void* x, int64_t i, __mmask16 lanes) {
  if constexpr (in == InType::kF32) {
    return _mm512_maskz_loadu_ps(lanes, static_cast<const float*>(x) + i);
  } else {
    const __m256i bits = _mm256_maskz_loadu_epi16(lanes, static_cast<const uint16_t*>(x) + i);
    if constexpr (in == InType::kF16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
}

// --- amax ---

__m512 RaiseTo(__m512 x, __m512 amax) {
  const __mmask16 finite = _knot_mask16(_mm512_fpclass_ps_mask(x, kInfClass | kNaNClass));
  return _mm512_mask_max_ps(amax, finite, amax, _mm512_abs_ps(x));
}

template <InType in>
void AmaxDown(const void* x, int64_t num_rows, int64_t leading_stride, int64_t n, float* amax) {
  // Four rows at a time, so that amax moves to and from L1 once for four loads of x.
  for (int64_t row = 0; row < num_rows; row += 4) {
    const int64_t rows = num_rows - row < 4 ? num_rows - row : 4;
    for (int64_t c = 0; c < n; c += 16) {
      const __mmask16 lanes = LanesBelow(n, c);
      __m512 running = _mm512_maskz_loadu_ps(lanes, amax + c);
      for (int64_t r = row; r < row + rows; ++r) {
        running = RaiseTo(Load<in>(x, r * leading_stride + c, lanes), running);
      }
      _mm512_mask_storeu_ps(amax + c, lanes, running);
    }
  }
}

template <InType in>
float AmaxOf(const void* x, int64_t begin, int64_t end) {
  __m512 running[4] = {};
  int64_t i = begin;
  for (; i + 64 <= end; i += 64) {
    for (int v = 0; v < 4; ++v) {
      running[v] = RaiseTo(Load<in>(x, i + 16 * v, kAllLanes), running[v]);
    }
  }
  for (; i < end; i += 16) running[0] = RaiseTo(Load<in>(x, i, LanesBelow(end, i)), running[0]);
  return _mm512_reduce_max_ps(
      _mm512_max_ps(_mm512_max_ps(running[0], running[1]), _mm512_max_ps(running[2], running[3])));
}

template <InType in>
void AmaxAcross(const void* x, int64_t n, int64_t segment, float* amax) {
  for (int64_t begin = 0; begin < n; begin += segment, ++amax) {
    const float found = AmaxOf<in>(x, begin, n - begin < segment ? n : begin + segment);
    if (found > *amax) *amax = found;
  }
}

// --- to codes ---

// Codes lie one in each 32-bit lane. The steps are those of quantize_scalar.cc.

// Rounds at the ulp of the magnitude's binade, or of the lowest one.
template <Format format>
__m512i NearestCodes(__m512 magnitude) {
  constexpr FormatInfo kInfo = kFormats[static_cast<int>(format)];
  constexpr int kDroppedBits = 23 - kInfo.mantissa_bits;
  const __m512i lowest_binade = _mm512_set1_epi32((kInfo.min_normal_exponent + 127) << 23);
  const __m512i exponent_bits =
      _mm512_and_si512(_mm512_castps_si512(magnitude), _mm512_set1_epi32(0x7F800000));
  const __m512i binade = _mm512_max_epi32(exponent_bits, lowest_binade);
  const __m512i rounder = _mm512_add_epi32(binade, _mm512_set1_epi32(kDroppedBits << 23));
  const __m512 rounded = _mm512_add_ps(magnitude, _mm512_castsi512_ps(rounder));
  const __m512i multiple = _mm512_sub_epi32(_mm512_castps_si512(rounded), rounder);
  const __m512i exponent_code =
      _mm512_srli_epi32(_mm512_sub_epi32(binade, lowest_binade), kDroppedBits);
  return _mm512_add_epi32(multiple, exponent_code);
}

template <Format format>
__m512i StochasticCodes(__m512 magnitude, __m512i bits) {
  constexpr FormatInfo kInfo = kFormats[static_cast<int>(format)];
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i lowest_exponent = _mm512_set1_epi32(kInfo.min_normal_exponent + 127);

  // Take apart.
  const __m512i float_bits = _mm512_castps_si512(magnitude);
  const __m512i own_exponent = _mm512_max_epi32(_mm512_srli_epi32(float_bits, 23), one);
  const __m512i significand =
      _mm512_sub_epi32(float_bits, _mm512_slli_epi32(_mm512_sub_epi32(own_exponent, one), 23));
  const __m512i exponent = _mm512_max_epi32(own_exponent, lowest_exponent);

  // Whole ulps, and the fraction of one in units of 2^-32.
  // NOTE: a shift by 32 or more gives 0, and so does one by a negative count: of the two shifts
  // that make the fraction one counts, or both agree.
  const __m512i fraction_shift = _mm512_add_epi32(_mm512_sub_epi32(exponent, own_exponent),
                                                  _mm512_set1_epi32(23 - kInfo.mantissa_bits - 32));
  const __m512i whole =
      _mm512_srlv_epi32(significand, _mm512_add_epi32(fraction_shift, _mm512_set1_epi32(32)));
  const __m512i fraction = _mm512_or_si512(
      _mm512_srlv_epi32(significand, fraction_shift),
      _mm512_sllv_epi32(significand, _mm512_sub_epi32(_mm512_setzero_si512(), fraction_shift)));

  // Round up by chance.
  const __m512i exponent_code =
      _mm512_slli_epi32(_mm512_sub_epi32(exponent, lowest_exponent), kInfo.mantissa_bits);
  const __m512i codes = _mm512_add_epi32(whole, exponent_code);
  return _mm512_mask_add_epi32(codes, _mm512_cmpgt_epu32_mask(fraction, bits), codes, one);
}

// round(magnitude) is the codes of magnitudes <= ceiling.
template <Format format, class Round>
__m512i EncodeLanes(__m512 x, __m512 scale, __m512 ceiling, Round round) {
  constexpr FormatInfo kInfo = kFormats[static_cast<int>(format)];
  const __m512 y = _mm512_div_ps(x, scale);
  __m512i codes = round(_mm512_min_ps(_mm512_abs_ps(y), ceiling));

  // Put the special values over the nonsense that they gave above.
  // NOTE: infinity is decided on x: the quotient of a finite x may overflow, and must then
  // saturate.
  codes = _mm512_mask_mov_epi32(codes, _mm512_fpclass_ps_mask(x, kInfClass),
                                _mm512_set1_epi32(kInfo.inf_code));
  codes = _mm512_mask_mov_epi32(codes, _mm512_fpclass_ps_mask(y, kNaNClass),
                                _mm512_set1_epi32(kInfo.nan_code));
  constexpr int kOrWithAnd = 0xF8;  // a | (b & c)
  return _mm512_ternarylogic_epi32(codes, _mm512_srli_epi32(_mm512_castps_si512(y), 24),
                                   _mm512_set1_epi32(0x80), kOrWithAnd);
}

// The low bytes of 4 x 16 lanes in order. The packs interleave 128-bit lanes; the last step undoes
// it.
__m512i PackBytes(const __m512i lanes[4]) {
  const __m512i interleaved = _mm512_packus_epi16(_mm512_packus_epi32(lanes[0], lanes[1]),
                                                  _mm512_packus_epi32(lanes[2], lanes[3]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, interleaved);
}

// codes_at(i, lanes) is the codes of the entries i … i + 15, one in each 32-bit lane.
template <class CodesAt>
void EncodeRun(int64_t begin, int64_t end, uint8_t* codes, CodesAt codes_at) {
  int64_t i = begin;
  for (; i + 64 <= end; i += 64) {
    __m512i lanes[4];
    for (int v = 0; v < 4; ++v) {
      lanes[v] = codes_at(i + 16 * v, kAllLanes);
    }
    _mm512_storeu_si512(codes + i, PackBytes(lanes));
  }
  for (; i < end; i += 16) {
    const __mmask16 mask = LanesBelow(end, i);
    _mm_mask_storeu_epi8(codes + i, mask, _mm512_cvtepi32_epi8(codes_at(i, mask)));
  }
}

// round_at(i, lanes) is the rounding of the entries i … i + 15, as in EncodeLanes.
template <InType in, Format format, class RoundAt>
void EncodeSegments(const void* x, int64_t n, const float* scale, int64_t segment, bool saturate,
                    uint8_t* codes, RoundAt round_at) {
  constexpr int kIndex = static_cast<int>(format);
  const __m512 ceiling = _mm512_set1_ps(saturate ? kFormats[kIndex].max : kFirstOverflow[kIndex]);
  if (segment == 1) {
    EncodeRun(0, n, codes, [=](int64_t i, __mmask16 lanes) {
      return EncodeLanes<format>(Load<in>(x, i, lanes), _mm512_maskz_loadu_ps(lanes, scale + i),
                                 ceiling, round_at(i, lanes));
    });
    return;
  }
  for (int64_t begin = 0; begin < n; begin += segment, ++scale) {
    const __m512 whole_segment = _mm512_set1_ps(*scale);
    EncodeRun(begin, n - begin < segment ? n : begin + segment, codes,
              [=](int64_t i, __mmask16 lanes) {
                return EncodeLanes<format>(Load<in>(x, i, lanes), whole_segment, ceiling,
                                           round_at(i, lanes));
              });
  }
}

template <InType in, Format format>
void Encode(const void* x, int64_t n, const float* scale, int64_t segment, bool saturate,
            uint8_t* codes) {
  EncodeSegments<in, format>(x, n, scale, segment, saturate, codes, [](int64_t, __mmask16) {
    return [](__m512 magnitude) { return NearestCodes<format>(magnitude); };
  });
}

template <InType in, Format format>
void EncodeStochastic(const void* x, const uint32_t* bits, int64_t n, const float* scale,
                      int64_t segment, bool saturate, uint8_t* codes) {
  EncodeSegments<in, format>(
      x, n, scale, segment, saturate, codes, [bits](int64_t i, __mmask16 lanes) {
        const __m512i lane_bits = _mm512_maskz_loadu_epi32(lanes, bits + i);
        return
            [lane_bits](__m512 magnitude) { return StochasticCodes<format>(magnitude, lane_bits); };
      });
}

// --- from codes ---

// E5M2 is the upper byte of F16. E4M3FN shifted to F16's mantissa is 2^-8 of its value, since the
// biases are 7 and 15.
template <Format format>
__m512 DecodeLanes(__m128i codes) {
  const __m256i wide = _mm256_cvtepu8_epi16(codes);
  if constexpr (format == Format::kE5M2) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
  } else {
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
    const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(wide, magnitude), 8);
    const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
    const __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F));
    return _mm512_mask_or_ps(value, nan, value, _mm512_castsi512_ps(_mm512_set1_epi32(0x7FF00000)));
  }
}

template <OutType out_type>
void Store(__m512 value, void* out, int64_t i, __mmask16 lanes) {
  if constexpr (out_type == OutType::kF32) {
    _mm512_mask_storeu_ps(static_cast<float*>(out) + i, lanes, value);
  } else if constexpr (out_type == OutType::kF16) {
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(out) + i, lanes,
                             _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  } else {
    // To nearest even by integer steps, as FloatToBf16Bits.
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i upper = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    rounded = _mm512_mask_or_epi32(rounded, _mm512_fpclass_ps_mask(value, kNaNClass), upper,
                                   _mm512_set1_epi32(0x0040));
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(out) + i, lanes,
                             _mm512_cvtepi32_epi16(rounded));
  }
}

template <Format format, OutType out_type>
void Decode(const uint8_t* codes, int64_t n, const float* scale, int64_t segment, void* out) {
  for (int64_t begin = 0; begin < n; begin += segment == 1 ? n : segment, ++scale) {
    const int64_t end = segment == 1 || n - begin < segment ? n : begin + segment;
    const __m512 whole_segment = _mm512_set1_ps(*scale);
    for (int64_t i = begin; i < end; i += 16) {
      const __mmask16 lanes = LanesBelow(end, i);
      const __m512 scales = segment == 1 ? _mm512_maskz_loadu_ps(lanes, scale + i) : whole_segment;
      const __m512 values = DecodeLanes<format>(_mm_maskz_loadu_epi8(lanes, codes + i));
      Store<out_type>(_mm512_mul_ps(values, scales), out, i, lanes);
    }
  }
}

constexpr auto kE4M3FN = Format::kE4M3FN, kE5M2 = Format::kE5M2;

constexpr QuantizeRowOps kRowOps = {
    .amax_down = {AmaxDown<InType::kF32>, AmaxDown<InType::kBF16>, AmaxDown<InType::kF16>},
    .amax_across = {AmaxAcross<InType::kF32>, AmaxAcross<InType::kBF16>, AmaxAcross<InType::kF16>},
    .encode = {{Encode<InType::kF32, kE4M3FN>, Encode<InType::kF32, kE5M2>},
               {Encode<InType::kBF16, kE4M3FN>, Encode<InType::kBF16, kE5M2>},
               {Encode<InType::kF16, kE4M3FN>, Encode<InType::kF16, kE5M2>}},
    .decode = {{Decode<kE4M3FN, OutType::kF32>, Decode<kE4M3FN, OutType::kBF16>,
                Decode<kE4M3FN, OutType::kF16>},
               {Decode<kE5M2, OutType::kF32>, Decode<kE5M2, OutType::kBF16>,
                Decode<kE5M2, OutType::kF16>}},
    .encode_stochastic =
        {{EncodeStochastic<InType::kF32, kE4M3FN>, EncodeStochastic<InType::kF32, kE5M2>},
         {EncodeStochastic<InType::kBF16, kE4M3FN>, EncodeStochastic<InType::kBF16, kE5M2>},
         {EncodeStochastic<InType::kF16, kE4M3FN>, EncodeStochastic<InType::kF16, kE5M2>}},
};

}  // namespace

const QuantizeRowOps* Avx512QuantizeRowOps() { return &kRowOps; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const QuantizeRowOps* Avx512QuantizeRowOps() { return nullptr; }

}  // namespace jax_fp8

#endif
