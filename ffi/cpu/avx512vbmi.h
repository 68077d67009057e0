// What the rows that decode by table share: 64 codes at a time, by vpermi2b (AVX512_VBMI). Included
// only by files compiled for it; everything here is local to such a file.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/fp8.h"

namespace jax_fp8 {
namespace {

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
    __m512i low, high;
    LookUp(codes, low, high);
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }

  // 64 codes to FP32: lane i of words[j] is the value of code 4 * i + j.
  [[gnu::always_inline]] void DecodeQuads(__m512i codes, __m512i (&words)[4]) const {
    __m512i low, high;
    LookUp(codes, low, high);
    constexpr int kBWhereAElseC = 0xCA;
    const __m512i even_bytes = _mm512_set1_epi16(0x00FF), upper = _mm512_set1_epi32(~0xFFFF);
    const __m512i even =
        _mm512_ternarylogic_epi32(even_bytes, low, _mm512_slli_epi16(high, 8), kBWhereAElseC);
    const __m512i odd =
        _mm512_ternarylogic_epi32(even_bytes, _mm512_srli_epi16(low, 8), high, kBWhereAElseC);
    // A BF16 value is the upper half of the same FP32 value.
    words[0] = _mm512_slli_epi32(even, 16);
    words[1] = _mm512_slli_epi32(odd, 16);
    words[2] = _mm512_and_si512(even, upper);
    words[3] = _mm512_and_si512(odd, upper);
  }

 private:
  // The low and the high bytes of the BF16 values.
  [[gnu::always_inline]] void LookUp(__m512i codes, __m512i& low, __m512i& high) const {
    // vpermi2b looks at seven bits of a code; the eighth, the sign, is then OR'd in.
    low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
    constexpr int kAOrBAndC = 0xF8;
    high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8('\x80'), kAOrBAndC);
  }

  __m512i low_[2], high_[2];
};

// `count` low bits set, count in [0, 64].
[[gnu::always_inline]] inline __mmask64 MaskOfFirst(int count) {
  return count <= 0 ? 0 : count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
}

[[gnu::always_inline]] inline __mmask16 MaskOfFirst16(int count) {
  return static_cast<__mmask16>(MaskOfFirst(count));
}

// Puts 64 codes in the order that DecodeQuads turns into consecutive words: code 16 * j + i to byte
// 4 * i + j.
[[gnu::always_inline]] inline __m512i OrderForQuads(__m512i codes) {
  const __m512i index =
      _mm512_setr_epi32(0x30201000, 0x31211101, 0x32221202, 0x33231303, 0x34241404, 0x35251505,
                        0x36261606, 0x37271707, 0x38281808, 0x39291909, 0x3A2A1A0A, 0x3B2B1B0B,
                        0x3C2C1C0C, 0x3D2D1D0D, 0x3E2E1E0E, 0x3F2F1F0F);
  return _mm512_permutexvar_epi8(index, codes);
}

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

}  // namespace
}  // namespace jax_fp8
