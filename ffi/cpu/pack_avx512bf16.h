// Packing for the avx512bf16 row: FP8 codes to BF16 pairs along k, from all four layouts without a
// transposing copy. Included only by gemm_avx512bf16.cc; everything here is local to that file.
//
// Loads are masked: nothing outside an operand is read.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/avx512vbmi.h"
#include "cpu/gemm_packed.h"

namespace jax_fp8 {
namespace {

// 24 of 32 registers hold sums.
constexpr PackedShape kBf16Shape = {.tile_rows = 12,
                                    .tile_cols = 32,
                                    .k_per_word = 2,
                                    .block_words = 128,
                                    .lhs_row_stride = 144,
                                    .rhs_panel_words = 32 * 128,
                                    .follows_memory = true,
                                    .few_rows = 4};
constexpr int kTileCols = kBf16Shape.tile_cols;
constexpr int kPanelWords = kBf16Shape.rhs_panel_words;
constexpr int kLhsRowStride = kBf16Shape.lhs_row_stride;

[[gnu::always_inline]] inline int NumPairs(int num_k) { return (num_k + 1) / 2; }

// ---- lhs: rows of pairs, kLhsRowStride apart

// 64 codes of one row, consecutive in k, to `num_pairs` words with each pair's lower k on top.
[[gnu::always_inline]] inline void StoreLhsPairs(const Decoder& decoder, __m512i codes,
                                                 int num_pairs, uint32_t* packed) {
  const __m512i swapped = _mm512_shuffle_epi8(
      codes,
      _mm512_broadcast_i32x4(_mm_setr_epi8(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)));
  // So ordered, unpacking within lanes leaves the pairs in order.
  const __m512i ordered =
      _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), swapped);
  __m512i first, second;
  decoder.Decode(ordered, first, second);
  _mm512_mask_storeu_epi32(packed, MaskOfFirst16(num_pairs), first);
  _mm512_mask_storeu_epi32(packed + 16, MaskOfFirst16(num_pairs - 16), second);
}

void PackLhsMk(const PackSource& source, uint32_t* packed) {
  const Decoder decoder(source.format);
  for (int row = 0; row < source.num_rows; ++row) {
    const uint8_t* codes = source.values + row * source.leading_stride;
    uint32_t* out = packed + row * kLhsRowStride;
    for (int i = 0; i < source.num_runs; ++i) {
      const KRun& run = source.runs[i];
      for (int k = run.k_begin; k < run.k_end; k += 64) {
        const int num_k = run.k_end - k;
        StoreLhsPairs(decoder, _mm512_maskz_loadu_epi8(MaskOfFirst(num_k), codes + k),
                      NumPairs(num_k), out + run.first_word + (k - run.k_begin) / 2);
      }
    }
  }
}

// 16 rows of a km lhs: word r of the result is row r's codes of k … k+3.
[[gnu::always_inline]] inline __m512i LoadKm4x16(const uint8_t* codes, int64_t leading_stride,
                                                 __mmask16 rows, int num_k) {
  __m512i lanes = _mm512_setzero_si512();  // lane j: the 16 codes of k+j
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    if (j >= num_k) break;
    const __m128i lane = _mm_maskz_loadu_epi8(rows, codes + j * leading_stride);
    lanes = _mm512_mask_broadcast_i32x4(lanes, static_cast<__mmask16>(0xF << 4 * j), lane);
  }
  return OrderForQuads(lanes);  // byte 4r+j of it is byte 16j+r
}

void PackLhsKm(const PackSource& source, uint32_t* packed) {
  const Decoder decoder(source.format);
  for (int i = 0; i < source.num_runs; ++i) {
    const KRun& run = source.runs[i];
    for (int k = run.k_begin; k < run.k_end; k += 64) {
      const int num_k = run.k_end - k;
      const uint8_t* codes = source.values + k * source.leading_stride;
      for (int row = 0; row < source.num_rows; row += 16) {
        const int num_rows = source.num_rows - row;
        __m512i words[16];  // [four k][row], transposed to [row][four k]
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
          words[j] = LoadKm4x16(codes + 4 * j * source.leading_stride + row, source.leading_stride,
                                MaskOfFirst16(num_rows), num_k - 4 * j);
        }
        Transpose16x16(words);
        uint32_t* out = packed + row * kLhsRowStride + run.first_word + (k - run.k_begin) / 2;
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
          if (j >= num_rows) break;
          StoreLhsPairs(decoder, words[j], NumPairs(num_k), out + j * kLhsRowStride);
        }
      }
    }
  }
}

// ---- rhs: panels of [pair][kTileCols]

// One panel, 16 columns and 64 k at a time: columns become the 16 words of a register by a
// transpose of 32-bit words (four k each), then a shuffle puts the two k of each pair together.
void PackRhsNk(const PackSource& source, uint32_t* packed) {
  const Decoder decoder(source.format);
  const __m512i to_pairs =
      _mm512_broadcast_i32x4(_mm_setr_epi8(1, 0, 5, 4, 9, 8, 13, 12, 3, 2, 7, 6, 11, 10, 15, 14));
  for (int i = 0; i < source.num_runs; ++i) {
    const KRun& run = source.runs[i];
    for (int k = run.k_begin; k < run.k_end; k += 64) {
      const int num_k = run.k_end - k, num_pairs = NumPairs(num_k);
      const __mmask64 k_mask = MaskOfFirst(num_k);
      for (int col = 0; col < kTileCols; col += 16) {
        const int num_cols = source.num_rows - col;
        const uint8_t* codes = source.values + col * source.leading_stride + k;
        __m512i words[16];  // [col][four k], transposed to [four k][col]
        if (num_cols >= 16) {
#pragma GCC unroll 16
          for (int j = 0; j < 16; ++j) {
            const uint8_t* address = codes + j * source.leading_stride;
            words[j] = _mm512_maskz_loadu_epi8(k_mask, address);
            // Rows may be pages apart, where hardware does not prefetch. Farther ahead, lines are
            // evicted before their use.
            _mm_prefetch(address + 128, _MM_HINT_T0);
          }
        } else {
          for (int j = 0; j < 16; ++j) {
            words[j] = _mm512_maskz_loadu_epi8(j < num_cols ? k_mask : 0,
                                               codes + j * source.leading_stride);
          }
        }
        Transpose16x16(words);
        uint32_t* out = packed + (run.first_word + (k - run.k_begin) / 2) * kTileCols + col;
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
          __m512i first, second;
          decoder.Decode(_mm512_shuffle_epi8(words[j], to_pairs), first, second);
          if (2 * j < num_pairs) _mm512_store_si512(out + 2 * j * kTileCols, first);
          if (2 * j + 1 < num_pairs) _mm512_store_si512(out + (2 * j + 1) * kTileCols, second);
        }
      }
    }
  }
}

// Byte indices into two rows of 64 codes (the second row's from 64 on) that interleave 32 columns
// into pairs, in the order that Decode's unpacking within lanes undoes.
struct InterleaveIndex {
  alignas(64) uint8_t bytes[64];
};

constexpr InterleaveIndex MakeInterleaveIndex(int first_col) {
  InterleaveIndex index{};
  for (int lane = 0; lane < 4; ++lane) {
    for (int i = 0; i < 8; ++i) {
      // Columns that Decode leaves in lane `lane` of its first and its second result.
      const int col = first_col + 4 * lane + i / 2;
      const int row = i % 2 == 0 ? 64 : 0;  // the second row is the higher k: the low half
      index.bytes[16 * lane + i] = static_cast<uint8_t>(row + col);
      index.bytes[16 * lane + 8 + i] = static_cast<uint8_t>(row + col + 16);
    }
  }
  return index;
}

constexpr InterleaveIndex kInterleave[] = {MakeInterleaveIndex(0), MakeInterleaveIndex(kTileCols)};

// A pair of k of 64 columns: two loads, and a byte shuffle for each panel.
class PairCodes {
 public:
  explicit PairCodes(Format format)
      : decoder_(format),
        interleave_{_mm512_load_si512(kInterleave[0].bytes),
                    _mm512_load_si512(kInterleave[1].bytes)} {}

  [[gnu::always_inline]] void Load(const uint8_t* codes, int64_t leading_stride, int num_k,
                                   int num_cols, __m512i (&words)[4]) const {
    const __mmask64 cols = MaskOfFirst(num_cols);
    const __m512i even = _mm512_maskz_loadu_epi8(cols, codes);
    const __m512i odd = _mm512_maskz_loadu_epi8(num_k > 1 ? cols : 0, codes + leading_stride);
#pragma GCC unroll 2
    for (int panel = 0; panel < 2; ++panel) {
      decoder_.Decode(_mm512_permutex2var_epi8(even, interleave_[panel], odd), words[2 * panel],
                      words[2 * panel + 1]);
    }
  }

 private:
  Decoder decoder_;
  __m512i interleave_[2];
};

// Two panels at once.
void PackRhsKn(const PackSource& source, uint32_t* packed) {
  const PairCodes decoder(source.format);
  for (int i = 0; i < source.num_runs; ++i) {
    const KRun& run = source.runs[i];
    for (int k = run.k_begin; k < run.k_end; k += 2) {
      const uint8_t* codes = source.values + k * source.leading_stride;
      _mm_prefetch(codes + source.prefetch_distance, _MM_HINT_T0);
      _mm_prefetch(codes + source.prefetch_distance + source.leading_stride, _MM_HINT_T0);
      __m512i words[4];
      decoder.Load(codes, source.leading_stride, run.k_end - k, source.num_rows, words);
      uint32_t* out = packed + (run.first_word + (k - run.k_begin) / 2) * kTileCols;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        _mm512_store_si512(out + j / 2 * kPanelWords + j % 2 * 16, words[j]);
      }
    }
  }
}

void PackLhs(const PackSource& source, uint32_t* packed) {
  source.k_contiguous ? PackLhsMk(source, packed) : PackLhsKm(source, packed);
}

void PackRhs(const PackSource& source, uint32_t* packed) {
  source.k_contiguous ? PackRhsNk(source, packed) : PackRhsKn(source, packed);
}

}  // namespace
}  // namespace jax_fp8
