// What a quantise kernel row is made of: loops over entries of one row of a matrix, written once
// per ISA. quantize_blocks.h turns a set of them into a kernel for any shape and tile.
//
// Each loop must give the same bits in every ISA, with subnormals kept (the caller has cleared
// flush-to-zero), and must not touch memory outside the entries that it is given.
#pragma once

#include <cstdint>

#include "common/quantize_desc.h"

namespace jax_fp8 {

// The magnitude whose code would be max_code + 1 (by Format). That code is inf_code, so a quantiser
// that clips here instead of at the maximum gives infinity or NaN to all that rounds above it.
inline constexpr float kFirstOverflow[] = {480.0f, 65536.0f};

struct QuantizeRowOps {
  // amax[c] = max(amax[c], |x[r][c]|) over the finite entries of `num_rows` rows of `n` entries,
  // the rows `leading_stride` entries apart. 0 <= amax on entry.
  using AmaxDown = void (*)(const void* x, int64_t num_rows, int64_t leading_stride, int64_t n,
                            float* amax);
  // amax[i / segment] = max(amax[i / segment], |x[i]|) over the finite entries i < n.
  using AmaxAcross = void (*)(const void* x, int64_t n, int64_t segment, float* amax);
  // codes[i] = x[i] / scale[i / segment], divided in FP32 and rounded to nearest even.
  using Encode = void (*)(const void* x, int64_t n, const float* scale, int64_t segment,
                          bool saturate, uint8_t* codes);
  // The same with stochastic rounding. Let y = x[i] / scale[i / segment], clipped as in Encode, and
  // q = |y| in ulps of y's binade, or of the lowest normal one. The code is that of floor(q) ulps,
  // and the next one up iff floor((q - floor(q)) · 2^32) > bits[i]: exact values stay, and with
  // uniform bits all others go up with the probability of their fraction, cut to 32 bits.
  using EncodeStochastic = void (*)(const void* x, const uint32_t* bits, int64_t n,
                                    const float* scale, int64_t segment, bool saturate,
                                    uint8_t* codes);
  // out[i] = codes[i] · scale[i / segment], multiplied in FP32 and rounded once to the type of out.
  using Decode = void (*)(const uint8_t* codes, int64_t n, const float* scale, int64_t segment,
                          void* out);

  AmaxDown amax_down[3];                     // by InType
  AmaxAcross amax_across[3];                 // by InType
  Encode encode[3][2];                       // by InType and Format
  Decode decode[2][3];                       // by Format and OutType
  EncodeStochastic encode_stochastic[3][2];  // by InType and Format
};

const QuantizeRowOps* ScalarQuantizeRowOps();
// Null where this build was made without the ISA.
const QuantizeRowOps* Avx512QuantizeRowOps();
const QuantizeRowOps* Avx2QuantizeRowOps();

}  // namespace jax_fp8
