// Packing for the avx512bf16 row: FP8 codes to BF16 pairs along k, from all four layouts without a
// transposing copy. Included only by gemm_avx512bf16.cc; everything here is local to that file.
//
// Loads are masked: nothing outside an operand is read.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/fp8.h"
#include "cpu/gemm_packed.h"

namespace jax_fp8 {
namespace {

// 24 of 32 registers hold sums.
constexpr PackedShape kBf16Shape = {.tile_rows = 12,
                                    .tile_cols = 32,
                                    .k_per_word = 2,
                                    .block_words = 128,
                                    .lhs_row_stride = 144,
                                    .rhs_panel_words = 32 * 128};
constexpr int kTileCols = kBf16Shape.tile_cols;
constexpr int kPanelWords = kBf16Shape.rhs_panel_words;
constexpr int kLhsRowStride = kBf16Shape.lhs_row_stride;

// The BF16 bytes of the 128 codes without sign.
struct DecodeBytes {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

constexpr DecodeBytes MakeDecodeBytes(Format format) {
  DecodeBytes bytes{};
  for (int code = 0; code < 128; ++code) {
    const uint16_t bits = DecodeToBf16Bits(static_cast<uint8_t>(code), format);
    bytes.low[code] = static_cast<uint8_t>(bits & 0xFF);
    bytes.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return bytes;
}

constexpr DecodeBytes kDecodeBytes[] = {MakeDecodeBytes(Format::kE4M3FN),
                                        MakeDecodeBytes(Format::kE5M2)};

// The decode table in registers.
class Decoder {
 public:
  explicit Decoder(Format format) {
    const DecodeBytes& bytes = kDecodeBytes[static_cast<int>(format)];
    low_[0] = _mm512_load_si512(bytes.low);
    low_[1] = _mm512_load_si512(bytes.low + 64);
    high_[0] = _mm512_load_si512(bytes.high);
    high_[1] = _mm512_load_si512(bytes.high + 64);
  }

  // 64 codes to BF16, unpacked within each 16-byte lane: `first` holds the codes of bytes 0-7 of
  // every lane, `second` those of bytes 8-15.
  [[gnu::always_inline]] void Decode(__m512i codes, __m512i& first, __m512i& second) const {
    // vpermi2b looks at seven bits of a code; the eighth, the sign, is then OR'd in.
    const __m512i low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
    constexpr int kAOrBAndC = 0xF8;
    const __m512i high =
        _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8('\x80'), kAOrBAndC);
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }

 private:
  __m512i low_[2], high_[2];
};

// `count` low bits set, count in [0, 64].
[[gnu::always_inline]] inline __mmask64 MaskOfFirst(int count) {
  return count <= 0 ? 0 : count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
}

[[gnu::always_inline]] inline __mmask16 MaskOfFirst16(int count) {
  return static_cast<__mmask16>(MaskOfFirst(count));
}

[[gnu::always_inline]] inline int NumPairs(int num_k) { return (num_k + 1) / 2; }

// Transposes a 16 x 16 matrix of 32-bit words.
[[gnu::always_inline]] inline void Transpose16x16(__m512i (&rows)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xDD);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
  }
}

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
  // Byte 4r+j of the result is byte 16j+r.
  const __m512i in_lane =
      _mm512_setr_epi32(0x30201000, 0x31211101, 0x32221202, 0x33231303, 0x34241404, 0x35251505,
                        0x36261606, 0x37271707, 0x38281808, 0x39291909, 0x3A2A1A0A, 0x3B2B1B0B,
                        0x3C2C1C0C, 0x3D2D1D0D, 0x3E2E1E0E, 0x3F2F1F0F);
  return _mm512_permutexvar_epi8(in_lane, lanes);
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

// Two panels at once: a pair of k is two loads of 64 columns and a byte shuffle for each panel.
void PackRhsKn(const PackSource& source, uint32_t* packed) {
  const Decoder decoder(source.format);
  const __m512i interleave[] = {_mm512_load_si512(kInterleave[0].bytes),
                                _mm512_load_si512(kInterleave[1].bytes)};
  const __mmask64 cols = MaskOfFirst(source.num_rows);
  for (int i = 0; i < source.num_runs; ++i) {
    const KRun& run = source.runs[i];
    for (int k = run.k_begin; k < run.k_end; k += 2) {
      const uint8_t* codes = source.values + k * source.leading_stride;
      const __m512i even = _mm512_maskz_loadu_epi8(cols, codes);
      const __m512i odd =
          _mm512_maskz_loadu_epi8(k + 1 < run.k_end ? cols : 0, codes + source.leading_stride);
      // As for nk: rows may be pages apart.
      _mm_prefetch(codes + 8 * source.leading_stride, _MM_HINT_T0);
      _mm_prefetch(codes + 9 * source.leading_stride, _MM_HINT_T0);
      uint32_t* out = packed + (run.first_word + (k - run.k_begin) / 2) * kTileCols;
#pragma GCC unroll 2
      for (int panel = 0; panel < 2; ++panel) {
        __m512i first, second;
        decoder.Decode(_mm512_permutex2var_epi8(even, interleave[panel], odd), first, second);
        _mm512_store_si512(out + panel * kPanelWords, first);
        _mm512_store_si512(out + panel * kPanelWords + 16, second);
      }
    }
  }
}

}  // namespace
}  // namespace jax_fp8
