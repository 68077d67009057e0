// The two OCP 8-bit formats (OCP 8-bit Floating Point Specification 1.0), their FNUZ relatives of
// AMD CDNA3, which only the emulation of that machine takes, and the scalar decoder that the
// readable kernels use. Every finite code of each format is a normal BF16 number, so decoding is
// exact, and the product of two decoded values is exact in FP32.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace jax_fp8 {

enum class Format : uint8_t { kE4M3FN, kE5M2, kE4M3FNUZ, kE5M2FNUZ };

struct FormatInfo {
  const char* name;
  int mantissa_bits;
  int bias;
  float max;
  int min_normal_exponent;
  bool has_inf;
  uint8_t max_code, inf_code, nan_code;  // inf_code is nan_code where the format has no infinity
  bool is_fnuz;  // the code of -0 is NaN, and there is no other; both codes above are then 0x80
};

// A column per fact, indexed by Format; jax_fp8/formats.py is the same table for Python.
inline constexpr std::array<FormatInfo, 4> kFormats = {{
    {"e4m3fn", 3, 7, 448.0f, -6, false, 0x7E, 0x7F, 0x7F, false},
    {"e5m2", 2, 15, 57344.0f, -14, true, 0x7B, 0x7C, 0x7E, false},
    {"e4m3fnuz", 3, 8, 240.0f, -7, false, 0x7F, 0x80, 0x80, true},
    {"e5m2fnuz", 2, 16, 57344.0f, -15, false, 0x7F, 0x80, 0x80, true},
}};

constexpr const FormatInfo& Info(Format format) { return kFormats[static_cast<int>(format)]; }

// One code to the bits of its BF16 value. Subnormals are normalised by integer steps, never by a
// multiplication that a flush-to-zero mode could spoil.
constexpr uint16_t DecodeToBf16Bits(uint8_t code, Format format) {
  const FormatInfo& info = Info(format);
  const uint16_t sign = static_cast<uint16_t>(code & 0x80) << 8;
  const int magnitude = code & 0x7F;
  if (info.is_fnuz && code == info.nan_code) return 0x7FC0;
  if (info.has_inf ? magnitude > info.inf_code : magnitude == info.nan_code) return sign | 0x7FC0;
  if (info.has_inf && magnitude == info.inf_code) return sign | 0x7F80;
  int exponent = magnitude >> info.mantissa_bits;
  int mantissa = magnitude & ((1 << info.mantissa_bits) - 1);
  if (exponent == 0) {
    if (mantissa == 0) return sign;
    exponent = 1;
    while (!(mantissa >> info.mantissa_bits)) mantissa <<= 1, --exponent;
    mantissa &= (1 << info.mantissa_bits) - 1;
  }
  return static_cast<uint16_t>(sign | (exponent - info.bias + 127) << 7 |
                               mantissa << (7 - info.mantissa_bits));
}

// kDecodeTable<F>[code] is the BF16 bits of `code`.
template <Format format>
inline constexpr std::array<uint16_t, 256> kDecodeTable = [] {
  std::array<uint16_t, 256> table{};
  for (int code = 0; code < 256; ++code) {
    table[code] = DecodeToBf16Bits(static_cast<uint8_t>(code), format);
  }
  return table;
}();

inline const std::array<uint16_t, 256>& DecodeTable(Format format) {
  static constexpr const std::array<uint16_t, 256>* kTables[] = {
      &kDecodeTable<Format::kE4M3FN>, &kDecodeTable<Format::kE5M2>,
      &kDecodeTable<Format::kE4M3FNUZ>, &kDecodeTable<Format::kE5M2FNUZ>};
  return *kTables[static_cast<int>(format)];
}

inline float Bf16BitsToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

}  // namespace jax_fp8
