// One FP32 value to the 16-bit types, to nearest even by integer steps, and back: the same bits on
// every machine and in every floating-point mode. NaN stays a quiet NaN of its sign.
#pragma once

#include <bit>
#include <cstdint>

namespace jax_fp8 {

inline uint16_t FloatToBf16Bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x0040);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline uint16_t FloatToF16Bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) {  // the upper bits of a NaN stay, as vcvtps2ph keeps them
    return static_cast<uint16_t>(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
  }
  if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 rounds to inf
  if (magnitude < 0x38800000) {  // below 2^-14: a multiple of 2^-24, the ulp of 0.5
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000));
  }
  constexpr uint32_t kBiasDifference = (127 - 15) << 23;
  return static_cast<uint16_t>(sign |
                               (magnitude - kBiasDifference + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

inline float F16BitsToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) {  // infinity and NaN
    return std::bit_cast<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
  }
  if (magnitude < 0x0400) {  // below 2^-14: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  constexpr uint32_t kBiasDifference = (127 - 15) << 23;
  return std::bit_cast<float>(sign | ((magnitude << 13) + kBiasDifference));
}

}  // namespace jax_fp8
