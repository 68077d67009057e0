// The requests of quantisation and of its inverse. Quantisation takes a batch of matrices x (rows,
// cols) to FP8 codes with one FP32 scale per tile; the two-axis form writes two sets of codes and
// scales, each with its own tile.
//
// Codes are rounded to nearest even, or stochastically: up with the probability of the fraction of
// an ulp that is dropped, by random bits that the caller brings, one word an entry of x.
#pragma once

#include <cstdint>
#include <string>

#include "common/fp8.h"
#include "common/gemm_desc.h"

namespace jax_fp8 {

enum class InType : uint8_t { kF32, kBF16, kF16 };

struct QuantizeOutputDesc {
  int64_t tile_rows, tile_cols;  // 1 … rows, 1 … cols
};

struct QuantizeDesc {
  int64_t batch, rows, cols;
  InType in;
  Format format;
  int num_outputs;    // 1, or 2 for the two-axis form
  bool scale_given;   // the scale is an input, not computed from amax
  bool power_of_two;  // computed scales are rounded up to powers of two
  bool saturate =
      true;  // false: what rounds above the format's maximum becomes its infinity or NaN
  bool stochastic = false;  // round by buffers.bits, not to nearest even; one output only
  QuantizeOutputDesc outputs[2];
};

// Everything is row-major and dense; scale is (batch, ceil(rows / tile_rows), ceil(cols /
// tile_cols)).
struct QuantizeOutput {
  uint8_t* values;
  float* scale;  // read when desc.scale_given, else written
};

struct QuantizeBuffers {
  const void* x;
  QuantizeOutput outputs[2];
  const uint32_t* bits = nullptr;  // of x's shape, read when desc.stochastic
};

struct DequantizeDesc {
  int64_t batch, rows, cols;
  Format format;
  OutType out;
  int64_t tile_rows, tile_cols;  // 1 … rows, 1 … cols
};

struct DequantizeBuffers {
  const uint8_t* values;
  const float* scale;
  void* out;
};

// "batch=1 rows=64 cols=256 f32->e4m3fn tile 1x128"
std::string ToString(const QuantizeDesc& desc);
// "batch=1 rows=64 cols=256 e4m3fn->f32 tile 1x128"
std::string ToString(const DequantizeDesc& desc);

}  // namespace jax_fp8
