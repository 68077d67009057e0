// Transposing FP8 codes, 16 lines at a time, where k lies the wrong way. Included only by files
// that are compiled for AVX2 at least; everything here is local to such a file.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace jax_fp8 {
namespace {

// Lines may be pages apart, where hardware does not prefetch: software does, so many lines ahead.
constexpr int kLinesAhead = 16;

[[gnu::always_inline]] inline void PrefetchLine(const uint8_t* codes) {
  _mm_prefetch(reinterpret_cast<const char*>(codes), _MM_HINT_T0);
}

// In both 16-byte lanes of eight registers: byte j of register i becomes byte 8 * (j % 2) + i of
// register j / 2.
[[gnu::always_inline]] inline void TransposeBytes8x16(__m256i (&rows)[8]) {
  __m256i t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_unpacklo_epi8(rows[i], rows[i + 4]);
    t[i + 4] = _mm256_unpackhi_epi8(rows[i], rows[i + 4]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    rows[i] = _mm256_unpacklo_epi8(t[i], t[i + 2]);
    rows[i + 2] = _mm256_unpackhi_epi8(t[i], t[i + 2]);
    rows[i + 4] = _mm256_unpacklo_epi8(t[i + 4], t[i + 6]);
    rows[i + 6] = _mm256_unpackhi_epi8(t[i + 4], t[i + 6]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi8(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi8(rows[2 * i], rows[2 * i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) rows[i] = t[i];
}

// Up to 16 lines of up to 64 codes, in a buffer so that they may be read without a mask. Codes
// that do not exist are 0.
class StagedLines {
 public:
  static constexpr int kLines = 16, kCodes = 64;

  [[gnu::always_inline]] void Load(const uint8_t* codes, int64_t leading_stride, int num_lines,
                                   int num_codes) {
    if (num_lines < kLines || num_codes < kCodes) std::memset(bytes_, 0, sizeof(bytes_));
    for (int line = 0; line < kLines && line < num_lines; ++line) {
      const uint8_t* from = codes + line * leading_stride;
      PrefetchLine(from + kLines * leading_stride);
      if (num_codes >= kCodes) {
        for (int half = 0; half < kCodes; half += 32) {
          _mm256_store_si256(reinterpret_cast<__m256i*>(bytes_[line] + half),
                             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + half)));
        }
      } else {
        std::memcpy(bytes_[line], from, num_codes);
      }
    }
  }

  // columns[j] is code first + j of all lines.
  [[gnu::always_inline]] void Transpose(int first, __m128i (&columns)[16]) const {
    __m256i rows[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(At(i, first)), At(i + 8, first), 1);
    }
    TransposeBytes8x16(rows);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m256i two = _mm256_permute4x64_epi64(rows[i], _MM_SHUFFLE(3, 1, 2, 0));
      columns[2 * i] = _mm256_castsi256_si128(two);
      columns[2 * i + 1] = _mm256_extracti128_si256(two, 1);
    }
  }

 private:
  [[gnu::always_inline]] __m128i At(int line, int code) const {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes_[line] + code));
  }

  alignas(64) uint8_t bytes_[kLines][kCodes];
};

}  // namespace
}  // namespace jax_fp8
