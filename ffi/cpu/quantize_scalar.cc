// The readable quantiser, which every machine has: the definition of each row operation, an entry
// at a time.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "common/rounding.h"
#include "cpu/quantize_row_ops.h"

namespace jax_fp8 {
namespace {

float F16BitsToFloat(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7FFF;
  constexpr uint32_t kBiasDifference = (127 - 15) << 23;
  uint32_t value;
  if (magnitude < 0x0400) {  // subnormal: a multiple of 2^-24
    value = std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
  } else {
    value = (magnitude << 13) + kBiasDifference;
    if (magnitude >= 0x7C00)
      value += kBiasDifference;  // infinity and NaN keep the largest exponent
  }
  return std::bit_cast<float>(value | static_cast<uint32_t>(bits & 0x8000) << 16);
}

template <InType in>
float Load(const void* x, int64_t i) {
  if constexpr (in == InType::kF32) return static_cast<const float*>(x)[i];
  const uint16_t bits = static_cast<const uint16_t*>(x)[i];
  return in == InType::kBF16 ? Bf16BitsToFloat(bits) : F16BitsToFloat(bits);
}

template <OutType out_type>
void Store(float value, void* out, int64_t i) {
  if constexpr (out_type == OutType::kF32) static_cast<float*>(out)[i] = value;
  if constexpr (out_type == OutType::kBF16) static_cast<uint16_t*>(out)[i] = FloatToBf16Bits(value);
  if constexpr (out_type == OutType::kF16) static_cast<uint16_t*>(out)[i] = FloatToF16Bits(value);
}

void RaiseTo(float x, float& amax) {
  const float magnitude = std::fabs(x);
  if (magnitude <= std::numeric_limits<float>::max() && magnitude > amax) amax = magnitude;
}

template <InType in>
void AmaxDown(const void* x, int64_t num_rows, int64_t leading_stride, int64_t n, float* amax) {
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t c = 0; c < n; ++c) RaiseTo(Load<in>(x, row * leading_stride + c), amax[c]);
  }
}

template <InType in>
void AmaxAcross(const void* x, int64_t n, int64_t segment, float* amax) {
  for (int64_t i = 0; i < n; ++i) RaiseTo(Load<in>(x, i), amax[i / segment]);
}

// The code of a magnitude <= kFirstOverflow, rounded to nearest even.
template <Format format>
uint8_t NearestCode(float magnitude) {
  constexpr FormatInfo kInfo = Info(format);
  // With 2^e the binade of the magnitude, adding 2^(e + 23 - mantissa_bits) rounds it to a multiple
  // of 2^(e - mantissa_bits): FP32 has 23 fraction bits. Subnormal codes share the lowest binade.
  constexpr uint32_t kLowestExponent = kInfo.min_normal_exponent + 127;
  const uint32_t exponent = std::max(std::bit_cast<uint32_t>(magnitude) >> 23, kLowestExponent);
  const uint32_t rounder = (exponent + 23 - kInfo.mantissa_bits) << 23;
  const uint32_t multiple =
      std::bit_cast<uint32_t>(magnitude + std::bit_cast<float>(rounder)) - rounder;
  // The multiple holds the leading 1 of a normal number, worth one exponent step.
  return multiple + ((exponent - kLowestExponent) << kInfo.mantissa_bits);
}

// The code of a magnitude <= kFirstOverflow, rounded up where its dropped fraction exceeds `bits`.
template <Format format>
uint8_t StochasticCode(float magnitude, uint32_t bits) {
  constexpr FormatInfo kInfo = Info(format);
  constexpr uint32_t kLowestExponent = kInfo.min_normal_exponent + 127;
  const uint32_t float_bits = std::bit_cast<uint32_t>(magnitude);
  const uint32_t own_exponent = std::max(float_bits >> 23, 1u);  // subnormals have that of 2^-126
  const uint64_t significand = float_bits - ((own_exponent - 1) << 23);
  const uint32_t exponent = std::max(own_exponent, kLowestExponent);
  // In ulps of the code, with 32 fraction bits. From 56 dropped bits on nothing is left.
  const uint32_t dropped_bits = exponent - own_exponent + 23 - kInfo.mantissa_bits;
  const uint64_t ulps = significand << 32 >> std::min(dropped_bits, 63u);
  const uint32_t up = static_cast<uint32_t>(ulps) > bits;
  return static_cast<uint32_t>(ulps >> 32) + up +
         ((exponent - kLowestExponent) << kInfo.mantissa_bits);
}

// round(magnitude) is the code of a magnitude <= kFirstOverflow.
template <Format format, class Round>
uint8_t EncodeOne(float x, float scale, bool saturate, Round round) {
  constexpr FormatInfo kInfo = Info(format);
  const float y = x / scale;
  const uint8_t sign = std::bit_cast<uint32_t>(y) >> 24 & 0x80;
  if (std::isnan(y)) return sign | kInfo.nan_code;
  // NOTE: decided on x: the quotient of a finite x may overflow, and must then saturate.
  if (std::isinf(x)) return sign | kInfo.inf_code;

  const float ceiling = saturate ? kInfo.max : kFirstOverflow[static_cast<int>(format)];
  return sign | round(std::min(std::fabs(y), ceiling));
}

template <InType in, Format format>
void Encode(const void* x, int64_t n, const float* scale, int64_t segment, bool saturate,
            uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = EncodeOne<format>(Load<in>(x, i), scale[i / segment], saturate, NearestCode<format>);
  }
}

template <InType in, Format format>
void EncodeStochastic(const void* x, const uint32_t* bits, int64_t n, const float* scale,
                      int64_t segment, bool saturate, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = EncodeOne<format>(Load<in>(x, i), scale[i / segment], saturate,
                                 [&](float y) { return StochasticCode<format>(y, bits[i]); });
  }
}

template <Format format, OutType out_type>
void Decode(const uint8_t* codes, int64_t n, const float* scale, int64_t segment, void* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float value = Bf16BitsToFloat(kDecodeTable<format>[codes[i]]);
    Store<out_type>(value * scale[i / segment], out, i);
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

const QuantizeRowOps* ScalarQuantizeRowOps() { return &kRowOps; }

}  // namespace jax_fp8
