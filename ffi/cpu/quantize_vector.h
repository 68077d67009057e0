// The loops of a vector quantiser row, once for every ISA. Included only by quantize_<isa>.cc;
// everything here is local to that file.
//
// `Isa` is the trait of isa_<isa>.h with
//   RaiseTo(x, amax)                the larger of amax and |x|, over the lanes where x is finite
//   MaxOfLanes(x)
//   Nearest<format>(magnitude)      the code of each magnitude <= kFirstOverflow, rounded to
//   nearest
//                                   even
//   Stochastic<format>(magnitude, bits)  the same, rounded up where the dropped fraction exceeds
//   bits WithSpecials<format>(codes, x, y)    infinity, NaN and the sign put over codes of y, which
//   is
//                                   x / scale
//   StoreCodes(lanes, codes)        the codes of four registers
//   StoreCodes(lanes, codes, mask)  the codes of one
// Codes lie one in each 32-bit lane. The steps are those of quantize_scalar.cc.
#pragma once

#include <cstdint>

#include "cpu/quantize_row_ops.h"

namespace jax_fp8 {
namespace {

template <class Isa, InType in>
void AmaxDown(const void* x, int64_t num_rows, int64_t leading_stride, int64_t n, float* amax) {
  // Four rows at a time, so that amax moves to and from L1 once for four loads of x.
  for (int64_t row = 0; row < num_rows; row += 4) {
    const int64_t rows = num_rows - row < 4 ? num_rows - row : 4;
    for (int64_t c = 0; c < n; c += Isa::kLanes) {
      const auto lanes = Isa::LanesBelow(n, c);
      auto running = Isa::template LoadFrom<InType::kF32>(amax, c, lanes);
      for (int64_t r = row; r < row + rows; ++r) {
        running =
            Isa::RaiseTo(Isa::template LoadFrom<in>(x, r * leading_stride + c, lanes), running);
      }
      Isa::template StoreTo<OutType::kF32>(amax, c, lanes, running);
    }
  }
}

template <class Isa, InType in>
float AmaxOf(const void* x, int64_t begin, int64_t end) {
  typename Isa::Vec running[4] = {};
  int64_t i = begin;
  for (; i + 4 * Isa::kLanes <= end; i += 4 * Isa::kLanes) {
    for (int v = 0; v < 4; ++v) {
      running[v] = Isa::RaiseTo(Isa::template LoadFrom<in>(x, i + Isa::kLanes * v, Isa::kAllLanes),
                                running[v]);
    }
  }
  for (; i < end; i += Isa::kLanes) {
    running[0] =
        Isa::RaiseTo(Isa::template LoadFrom<in>(x, i, Isa::LanesBelow(end, i)), running[0]);
  }
  return Isa::MaxOfLanes(
      Isa::Max(Isa::Max(running[0], running[1]), Isa::Max(running[2], running[3])));
}

template <class Isa, InType in>
void AmaxAcross(const void* x, int64_t n, int64_t segment, float* amax) {
  for (int64_t begin = 0; begin < n; begin += segment, ++amax) {
    const float found = AmaxOf<Isa, in>(x, begin, n - begin < segment ? n : begin + segment);
    if (found > *amax) *amax = found;
  }
}

// codes_at(i, lanes) is the codes of the entries i, i + 1, ….
template <class Isa, class CodesAt>
void EncodeRun(int64_t begin, int64_t end, uint8_t* codes, CodesAt codes_at) {
  int64_t i = begin;
  for (; i + 4 * Isa::kLanes <= end; i += 4 * Isa::kLanes) {
    typename Isa::Words lanes[4];
    for (int v = 0; v < 4; ++v) lanes[v] = codes_at(i + Isa::kLanes * v, Isa::kAllLanes);
    Isa::StoreCodes(lanes, codes + i);
  }
  for (; i < end; i += Isa::kLanes) {
    const typename Isa::Lanes mask = Isa::LanesBelow(end, i);
    Isa::StoreCodes(codes_at(i, mask), codes + i, mask);
  }
}

// round_at(magnitude, i, lanes) is the codes of the magnitudes of the entries i, i + 1, ….
template <class Isa, InType in, Format format, class RoundAt>
void EncodeSegments(const void* x, int64_t n, const float* scale, int64_t segment, bool saturate,
                    uint8_t* codes, RoundAt round_at) {
  using Vec = typename Isa::Vec;
  using Lanes = typename Isa::Lanes;
  constexpr FormatInfo kInfo = kFormats[static_cast<int>(format)];
  const Vec ceiling =
      Isa::Broadcast(saturate ? kInfo.max : kFirstOverflow[static_cast<int>(format)]);
  auto codes_at = [=](int64_t i, Lanes lanes, Vec scales) {
    const Vec entries = Isa::template LoadFrom<in>(x, i, lanes);
    const Vec y = Isa::Div(entries, scales);
    const auto magnitude_codes = round_at(Isa::Min(Isa::Abs(y), ceiling), i, lanes);
    return Isa::template WithSpecials<format>(magnitude_codes, entries, y);
  };
  if (segment == 1) {
    EncodeRun<Isa>(0, n, codes, [=](int64_t i, Lanes lanes) {
      return codes_at(i, lanes, Isa::template LoadFrom<InType::kF32>(scale, i, lanes));
    });
    return;
  }
  for (int64_t begin = 0; begin < n; begin += segment, ++scale) {
    const Vec whole_segment = Isa::Broadcast(*scale);
    EncodeRun<Isa>(begin, n - begin < segment ? n : begin + segment, codes,
                   [=](int64_t i, Lanes lanes) { return codes_at(i, lanes, whole_segment); });
  }
}

template <class Isa, InType in, Format format>
void Encode(const void* x, int64_t n, const float* scale, int64_t segment, bool saturate,
            uint8_t* codes) {
  EncodeSegments<Isa, in, format>(x, n, scale, segment, saturate, codes,
                                  [](typename Isa::Vec magnitude, int64_t, typename Isa::Lanes) {
                                    return Isa::template Nearest<format>(magnitude);
                                  });
}

template <class Isa, InType in, Format format>
void EncodeStochastic(const void* x, const uint32_t* bits, int64_t n, const float* scale,
                      int64_t segment, bool saturate, uint8_t* codes) {
  EncodeSegments<Isa, in, format>(
      x, n, scale, segment, saturate, codes,
      [bits](typename Isa::Vec magnitude, int64_t i, typename Isa::Lanes lanes) {
        return Isa::template Stochastic<format>(magnitude, Isa::LoadWordsFrom(bits, i, lanes));
      });
}

template <class Isa, Format format, OutType out_type>
void Decode(const uint8_t* codes, int64_t n, const float* scale, int64_t segment, void* out) {
  constexpr int kCodes = 16, kVecs = kCodes / Isa::kLanes;
  for (int64_t begin = 0; begin < n; begin += segment == 1 ? n : segment, ++scale) {
    const int64_t end = segment == 1 || n - begin < segment ? n : begin + segment;
    const auto whole_segment = Isa::Broadcast(*scale);
    for (int64_t i = begin; i < end; i += kCodes) {
      typename Isa::Vec values[kVecs];
      Isa::template Decode<format>(Isa::LoadCodes(codes + i, end - i), values);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        const int64_t at = i + v * Isa::kLanes;
        const auto lanes = Isa::LanesBelow(end, at);
        const auto scales =
            segment == 1 ? Isa::template LoadFrom<InType::kF32>(scale, at, lanes) : whole_segment;
        Isa::template StoreTo<out_type>(out, at, lanes, Isa::Mul(values[v], scales));
      }
    }
  }
}

template <class Isa>
constexpr QuantizeRowOps MakeRowOps() {
  constexpr auto kE4M3FN = Format::kE4M3FN, kE5M2 = Format::kE5M2;
  constexpr auto kF32 = InType::kF32, kBF16 = InType::kBF16, kF16 = InType::kF16;
  return {
      .amax_down = {AmaxDown<Isa, kF32>, AmaxDown<Isa, kBF16>, AmaxDown<Isa, kF16>},
      .amax_across = {AmaxAcross<Isa, kF32>, AmaxAcross<Isa, kBF16>, AmaxAcross<Isa, kF16>},
      .encode = {{Encode<Isa, kF32, kE4M3FN>, Encode<Isa, kF32, kE5M2>},
                 {Encode<Isa, kBF16, kE4M3FN>, Encode<Isa, kBF16, kE5M2>},
                 {Encode<Isa, kF16, kE4M3FN>, Encode<Isa, kF16, kE5M2>}},
      .decode = {{Decode<Isa, kE4M3FN, OutType::kF32>, Decode<Isa, kE4M3FN, OutType::kBF16>,
                  Decode<Isa, kE4M3FN, OutType::kF16>},
                 {Decode<Isa, kE5M2, OutType::kF32>, Decode<Isa, kE5M2, OutType::kBF16>,
                  Decode<Isa, kE5M2, OutType::kF16>}},
      .encode_stochastic =
          {{EncodeStochastic<Isa, kF32, kE4M3FN>, EncodeStochastic<Isa, kF32, kE5M2>},
           {EncodeStochastic<Isa, kBF16, kE4M3FN>, EncodeStochastic<Isa, kBF16, kE5M2>},
           {EncodeStochastic<Isa, kF16, kE4M3FN>, EncodeStochastic<Isa, kF16, kE5M2>}},
  };
}

}  // namespace
}  // namespace jax_fp8
