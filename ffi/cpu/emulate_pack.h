// Packing for the vectorised emulation (see emulate_layout.h), from all four layouts. Included only
// by emulate_<isa>.cc; everything here is local to that file, which is compiled for AVX2 at least.
//
// Codes that are no finite numbers become zeros: outputs that meet one are computed elsewhere.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/fp8.h"
#include "cpu/emulate_layout.h"
#include "cpu/gemm_packed.h"
#include "cpu/transpose_codes.h"

namespace jax_fp8 {
namespace {

// 32 codes, taken apart. A value is ± significand · 2^unit.
struct CodeFields {
  __m256i significand, unit, exponent, lowest, is_zero, is_negative;
};

template <Format format, bool kAsFp16>
[[gnu::always_inline]] inline CodeFields TakeApart(__m256i codes) {
  constexpr FormatInfo kInfo = Info(format);
  constexpr int kMantissa = kInfo.mantissa_bits;
  auto set1 = [](int value) __attribute__((always_inline)) {
    return _mm256_set1_epi8(static_cast<char>(value));
  };
  const __m256i zero = _mm256_setzero_si256();
  __m256i magnitude = _mm256_and_si256(codes, set1(0x7F));
  const __m256i special = kInfo.is_fnuz ? _mm256_cmpeq_epi8(codes, set1(0x80))
                                        : _mm256_cmpgt_epi8(magnitude, set1(kInfo.max_code));
  magnitude = _mm256_andnot_si256(special, magnitude);
  const __m256i field =
      _mm256_and_si256(_mm256_srli_epi16(magnitude, kMantissa), set1(0x7F >> kMantissa));
  const __m256i is_normal = _mm256_cmpgt_epi8(field, zero);
  CodeFields out;
  out.is_negative = _mm256_cmpgt_epi8(zero, codes);
  out.is_zero = _mm256_cmpeq_epi8(magnitude, zero);
  out.significand = _mm256_or_si256(_mm256_and_si256(magnitude, set1((1 << kMantissa) - 1)),
                                    _mm256_and_si256(is_normal, set1(1 << kMantissa)));
  out.exponent = _mm256_sub_epi8(_mm256_max_epi8(field, set1(1)), set1(kInfo.bias));
  out.unit = _mm256_sub_epi8(out.exponent, set1(kMantissa));
  const __m256i trailing_zeros =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0));
  out.lowest = _mm256_add_epi8(out.unit, _mm256_shuffle_epi8(trailing_zeros, out.significand));
  if constexpr (kAsFp16 && kInfo.min_normal_exponent > -14) {
    // The subnormals are normal numbers of FP16.
    const __m256i top_bit = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -3, -2, -2, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0));
    static_assert(kMantissa == 3);
    out.exponent = _mm256_add_epi8(out.exponent, _mm256_shuffle_epi8(top_bit, out.significand));
  }
  return out;
}

// The values of 8 of 32 codes.
[[gnu::always_inline]] inline __m256 Values8(__m128i significand, __m128i unit,
                                             __m128i is_negative) {
  const __m256 magnitude = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(significand));
  const __m256i biased = _mm256_add_epi32(_mm256_cvtepi8_epi32(unit), _mm256_set1_epi32(127));
  const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  const __m256i sign = _mm256_slli_epi32(_mm256_cvtepi8_epi32(is_negative), 31);
  return _mm256_or_ps(_mm256_mul_ps(magnitude, power), _mm256_castsi256_ps(sign));
}

[[gnu::always_inline]] inline void StoreReals(float* to, __m256 values) {
  _mm256_store_ps(to, values);
}
[[gnu::always_inline]] inline void StoreReals(double* to, __m256 values) {
  _mm256_store_pd(to, _mm256_cvtps_pd(_mm256_castps256_ps128(values)));
  _mm256_store_pd(to + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1)));
}

template <class Real>
[[gnu::always_inline]] inline void StoreValues(const CodeFields& fields, int count, Real* to) {
  alignas(32) uint8_t bytes[3][32];
  auto store = [&](int i, __m256i x) __attribute__((always_inline)) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes[i]), x);
  };
  store(0, fields.significand);
  store(1, fields.unit);
  store(2, fields.is_negative);
  auto load8 = [&](int i, int at) __attribute__((always_inline)) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes[i] + at));
  };
  for (int at = 0; at < count; at += 8) {
    StoreReals(to + at, Values8(load8(0, at), load8(1, at), load8(2, at)));
  }
}

[[gnu::always_inline]] inline __m256i ZeroWhere(__m256i mask, __m256i x) {
  return _mm256_andnot_si256(mask, x);
}
[[gnu::always_inline]] inline __m256i BiasedExponent(const CodeFields& fields, int bias) {
  return ZeroWhere(fields.is_zero,
                   _mm256_add_epi8(fields.exponent, _mm256_set1_epi8(static_cast<char>(bias))));
}
[[gnu::always_inline]] inline __m256i LowestBitUnless(__m256i mask, const CodeFields& fields) {
  return _mm256_blendv_epi8(fields.lowest, _mm256_set1_epi8(kNoLowestBit),
                            _mm256_or_si256(mask, fields.is_zero));
}

// Moves those of `values` that are below 1 to `low`, if the format is E5M2; tells whether it is.
template <Format format, int kCount>
[[gnu::always_inline]] inline bool SplitAtOne(double* values, double* low) {
  constexpr bool kHasLow = Info(format).mantissa_bits == 2;
  for (int i = 0; i < kCount; ++i) {
    const bool is_low = kHasLow && -1 < values[i] && values[i] < 1;
    low[i] = is_low ? values[i] : 0;
    values[i] = is_low ? 0 : values[i];
  }
  return kHasLow;
}

// ---- one operand's codes of a step, k in order, zeros where there are none

// Copies up to kStep codes of each row.
template <int kStep>
class StepCodes {
 public:
  explicit StepCodes(const PackSource& source) : source_(source), num_k_(source.runs[0].k_end) {}

  // 32 codes of row `row`: its kStep, then anything.
  [[gnu::always_inline]] __m256i Row(int row) {
    if (source_.k_contiguous) {
      const uint8_t* codes = source_.values + row * source_.leading_stride;
      if (num_k_ < 32) {
        alignas(32) uint8_t buffer[32] = {};
        std::memcpy(buffer, codes, num_k_);
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(buffer));
      }
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    }
    const int first = row / kRowsAtOnce * kRowsAtOnce;
    if (first != first_row_) Transpose(first);
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(transposed_[row - first]));
  }

 private:
  static constexpr int kRowsAtOnce = StagedLines::kCodes;

  void Transpose(int first) {
    first_row_ = first;
    StagedLines staged;
    const int num_rows = std::min(source_.num_rows - first, kRowsAtOnce);
    std::memset(transposed_, 0, sizeof(transposed_));
    for (int k = 0; k < num_k_; k += StagedLines::kLines) {
      staged.Load(source_.values + k * source_.leading_stride + first, source_.leading_stride,
                  num_k_ - k, num_rows);
      for (int row = 0; row < num_rows; row += 16) {
        __m128i columns[16];
        staged.Transpose(row, columns);
        for (int i = 0; i < 16; ++i) {
          _mm_store_si128(reinterpret_cast<__m128i*>(transposed_[row + i] + k), columns[i]);
        }
      }
    }
  }

  const PackSource& source_;
  const int num_k_;
  int first_row_ = -1;
  alignas(32) uint8_t transposed_[kRowsAtOnce][32];
};

// codes[k][column], for up to kMaxPackedCols columns.
template <int kStep>
void LoadColumns(const PackSource& source, uint8_t (&codes)[kStep][kMaxPackedCols]) {
  const int num_k = source.runs[0].k_end;
  if (num_k < kStep || source.num_rows < kMaxPackedCols) std::memset(codes, 0, sizeof(codes));
  if (!source.k_contiguous) {
    for (int k = 0; k < num_k; ++k) {
      const uint8_t* from = source.values + k * source.leading_stride;
      PrefetchLine(from + kLinesAhead * source.leading_stride);
      if (source.num_rows == kMaxPackedCols) {
        std::memcpy(codes[k], from, kMaxPackedCols);
      } else {
        std::memcpy(codes[k], from, source.num_rows);
      }
    }
    return;
  }
  StagedLines staged;
  for (int col = 0; col < source.num_rows; col += StagedLines::kLines) {
    staged.Load(source.values + col * source.leading_stride, source.leading_stride,
                source.num_rows - col, num_k);
    for (int k = 0; k < num_k; k += 16) {
      __m128i lines[16];
      staged.Transpose(k, lines);
      for (int i = 0; i < 16 && k + i < num_k; ++i) {
        _mm_store_si128(reinterpret_cast<__m128i*>(codes[k + i] + col), lines[i]);
      }
    }
  }
}

// ---- steps

template <class Step, Format format, bool kAsFp16>
[[gnu::always_inline]] inline void PackLhsRow(__m256i codes, Step* step) {
  constexpr int kStep = sizeof(step->value) / sizeof(step->value[0]);
  const CodeFields fields = TakeApart<format, kAsFp16>(codes);
  StoreValues(fields, kStep, step->value);
  if constexpr (requires { step->low; }) {
    step->has_low = SplitAtOne<format, kStep>(step->value, step->low);
  }
  if constexpr (requires { step->exponent; }) {
    alignas(32) uint8_t exponent[32], lowest[32], plane[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(exponent), BiasedExponent(fields, kLhsBias));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lowest),
                       LowestBitUnless(_mm256_setzero_si256(), fields));
    _mm256_store_si256(reinterpret_cast<__m256i*>(plane), fields.is_negative);
    const __m256i repeat = _mm256_set1_epi32(0x01010101);
    for (int k = 0; k < kStep; k += 8) {
      auto widen = [&](const uint8_t* from) __attribute__((always_inline)) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + k)));
      };
      auto store = [&](uint32_t* to, __m256i x) __attribute__((always_inline)) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + k), x);
      };
      store(step->exponent, _mm256_mullo_epi32(widen(exponent), repeat));
      store(step->lowest, _mm256_mullo_epi32(widen(lowest), repeat));
      const __m256i mask = _mm256_cmpgt_epi32(widen(plane), _mm256_setzero_si256());
      store(step->plane, _mm256_and_si256(mask, _mm256_set1_epi32(Step::kPlaneBytes)));
    }
  }
}

template <class Step, Format format, bool kAsFp16, int kCols>
[[gnu::always_inline]] inline void PackRhsColumns(const uint8_t* codes, int k, Step* step) {
  for (int col = 0; col < kCols; col += 32) {
    const CodeFields fields = TakeApart<format, kAsFp16>(
        _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + col)));
    StoreValues(fields, 32, step->value[k] + col);
    if constexpr (requires { step->low; }) {
      step->has_low = SplitAtOne<format, 32>(step->value[k] + col, step->low[k] + col);
    }
    if constexpr (requires { step->exponent; }) {
      auto store = [&](void* to, __m256i x) __attribute__((always_inline)) {
        _mm256_store_si256(static_cast<__m256i*>(to), x);
      };
      store(step->exponent[k] + col, BiasedExponent(fields, kRhsBias));
      const __m256i is_positive =
          _mm256_xor_si256(fields.is_negative, _mm256_set1_epi8(static_cast<char>(0xFF)));
      store(step->lowest[0][k] + col, LowestBitUnless(is_positive, fields));
      store(step->lowest[1][k] + col, LowestBitUnless(fields.is_negative, fields));
    }
  }
}

// A row's steps of a block lie `lhs_row_stride` words apart from the next row's.
template <class Arithmetic, Format format>
void PackLhsAs(const PackSource& source, uint32_t* packed) {
  using Step = typename Arithmetic::Lhs;
  StepCodes<Arithmetic::kStep> codes(source);
  auto* steps = reinterpret_cast<Step*>(packed);
  for (int row = 0; row < source.num_rows; ++row) {
    PackLhsRow<Step, format, Arithmetic::kAsFp16>(codes.Row(row), steps + row);
  }
}

template <class Arithmetic, Format format>
void PackRhsAs(const PackSource& source, uint32_t* packed) {
  using Step = typename Arithmetic::Rhs;
  constexpr int kCols = Arithmetic::kCols;
  alignas(64) uint8_t codes[Arithmetic::kStep][kMaxPackedCols];
  LoadColumns(source, codes);
  auto* panels = reinterpret_cast<Step*>(packed);
  for (int panel = 0; panel * kCols < source.num_rows; ++panel) {
    for (int k = 0; k < Arithmetic::kStep; ++k) {
      PackRhsColumns<Step, format, Arithmetic::kAsFp16, kCols>(codes[k] + panel * kCols, k,
                                                               panels + panel);
    }
  }
}

template <class Arithmetic>
void EmulatePackLhs(const PackSource& source, uint32_t* packed) {
  static constexpr void (*kByFormat[])(const PackSource&, uint32_t*) = {
      PackLhsAs<Arithmetic, Format::kE4M3FN>, PackLhsAs<Arithmetic, Format::kE5M2>,
      PackLhsAs<Arithmetic, Format::kE4M3FNUZ>, PackLhsAs<Arithmetic, Format::kE5M2FNUZ>};
  kByFormat[static_cast<int>(source.format)](source, packed);
}

template <class Arithmetic>
void EmulatePackRhs(const PackSource& source, uint32_t* packed) {
  static constexpr void (*kByFormat[])(const PackSource&, uint32_t*) = {
      PackRhsAs<Arithmetic, Format::kE4M3FN>, PackRhsAs<Arithmetic, Format::kE5M2>,
      PackRhsAs<Arithmetic, Format::kE4M3FNUZ>, PackRhsAs<Arithmetic, Format::kE5M2FNUZ>};
  kByFormat[static_cast<int>(source.format)](source, packed);
}

}  // namespace
}  // namespace jax_fp8
