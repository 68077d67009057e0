// Packing to FP32 words, from all four layouts without a transposing copy. Included only by
// gemm_<isa>.cc; everything here is local to that file. The file must be compiled for AVX2 at
// least.
//
// `Isa` is the trait of isa_<isa>.h with PackedShape kShape. A word is one k, so there are no gaps:
// a block is one run.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/fp8.h"
#include "cpu/gemm_packed.h"
#include "cpu/transpose_codes.h"

namespace jax_fp8 {
namespace {

constexpr int kDecoded = 16;  // codes decoded at a time
static_assert(kMaxPackedCols % kDecoded == 0);

// Codes in memory: lines of consecutive codes.
struct CodeLines {
  const uint8_t* codes;
  int64_t leading_stride;
  int num_lines, num_codes;  // codes of a line
};

// The values of 16 codes to aligned memory.
template <class Isa, Format format>
[[gnu::always_inline]] inline void DecodeTo(__m128i codes, uint32_t* words) {
  typename Isa::Vec values[kDecoded / Isa::kLanes];
  Isa::template Decode<format>(codes, values);
  float* out = reinterpret_cast<float*>(words);
#pragma GCC unroll 2
  for (int i = 0; i < kDecoded / Isa::kLanes; ++i) Isa::Store(out + i * Isa::kLanes, values[i]);
}

// Code j of line i to words[i * stride + j], and zeros up to a multiple of 16 codes.
template <class Isa, Format format>
[[gnu::always_inline]] inline void PackLines(const CodeLines& source, int stride, uint32_t* words) {
  for (int line = 0; line < source.num_lines; ++line) {
    const uint8_t* codes = source.codes + line * source.leading_stride;
    for (int j = 0; j < source.num_codes; j += kDecoded) {
      if (j % 64 == 0) PrefetchLine(codes + j + kLinesAhead * source.leading_stride);
      DecodeTo<Isa, format>(Isa::LoadCodes(codes + j, source.num_codes - j),
                            words + line * stride + j);
    }
  }
}

// Code j of line i to words[j * stride + i], and zeros up to `padded_lines`, a multiple of 16.
template <class Isa, Format format>
[[gnu::always_inline]] inline void PackTransposed(const CodeLines& source, int padded_lines,
                                                  int stride, uint32_t* words) {
  StagedLines staged;
  for (int line = 0; line < padded_lines; line += StagedLines::kLines) {
    for (int first = 0; first < source.num_codes; first += StagedLines::kCodes) {
      const int num_codes = source.num_codes - first;
      staged.Load(source.codes + line * source.leading_stride + first, source.leading_stride,
                  source.num_lines - line, num_codes);
      for (int j = 0; j < StagedLines::kCodes && j < num_codes; j += 16) {
        __m128i columns[16];
        staged.Transpose(j, columns);
        uint32_t* out = words + (first + j) * stride + line;
#pragma GCC unroll 16
        for (int c = 0; c < 16; ++c) {
          if (j + c >= num_codes) break;
          DecodeTo<Isa, format>(columns[c], out + c * stride);
        }
      }
    }
  }
}

template <class Isa, Format format>
void PackLhsAs(const PackSource& source, uint32_t* packed) {
  constexpr int kStride = Isa::kShape.lhs_row_stride;
  const int num_k = source.runs[0].k_end;
  if (source.k_contiguous) {
    PackLines<Isa, format>({source.values, source.leading_stride, source.num_rows, num_k}, kStride,
                           packed);
  } else {
    PackTransposed<Isa, format>({source.values, source.leading_stride, num_k, source.num_rows},
                                (num_k + 15) / 16 * 16, kStride, packed);
  }
}

template <class Isa, Format format>
void PackRhsAs(const PackSource& source, uint32_t* packed) {
  constexpr int kCols = Isa::kShape.tile_cols;
  constexpr int kPanelWords = Isa::kShape.rhs_panel_words;
  const int num_k = source.runs[0].k_end;
  if (source.k_contiguous) {
    PackTransposed<Isa, format>({source.values, source.leading_stride, source.num_rows, num_k},
                                kCols, kCols, packed);
    return;
  }
  for (int k = 0; k < num_k; ++k) {
    const uint8_t* codes = source.values + k * source.leading_stride;
    PrefetchLine(codes + source.prefetch_distance);
    for (int panel = 0, first = 0; first < source.num_rows; ++panel, first += kCols) {
#pragma GCC unroll 2
      for (int col = 0; col < kCols; col += kDecoded) {
        DecodeTo<Isa, format>(Isa::LoadCodes(codes + first + col, source.num_rows - first - col),
                              packed + panel * kPanelWords + k * kCols + col);
      }
    }
  }
}

template <class Isa>
void PackLhs(const PackSource& source, uint32_t* packed) {
  source.format == Format::kE4M3FN ? PackLhsAs<Isa, Format::kE4M3FN>(source, packed)
                                   : PackLhsAs<Isa, Format::kE5M2>(source, packed);
}

template <class Isa>
void PackRhs(const PackSource& source, uint32_t* packed) {
  source.format == Format::kE4M3FN ? PackRhsAs<Isa, Format::kE4M3FN>(source, packed)
                                   : PackRhsAs<Isa, Format::kE5M2>(source, packed);
}

}  // namespace
}  // namespace jax_fp8
