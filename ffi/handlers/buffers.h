// Small things that every handler needs to check XLA's buffers and to say what is wrong with them.
#pragma once

#include <cstdint>
#include <string>

#include "common/ceil_div.h"
#include "common/fp8.h"
#include "common/gemm_desc.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8 {

using Dims = xla::ffi::AnyBuffer::Dimensions;

// "(2, 64, 128)"
inline std::string ToString(Dims dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

inline bool ParseOcpFormat(xla::ffi::DataType type, Format* format) {
  if (type == xla::ffi::DataType::F8E4M3FN) return *format = Format::kE4M3FN, true;
  if (type == xla::ffi::DataType::F8E5M2) return *format = Format::kE5M2, true;
  return false;
}

inline bool ParseFormat(xla::ffi::DataType type, Format* format) {
  if (type == xla::ffi::DataType::F8E4M3FNUZ) return *format = Format::kE4M3FNUZ, true;
  if (type == xla::ffi::DataType::F8E5M2FNUZ) return *format = Format::kE5M2FNUZ, true;
  return ParseOcpFormat(type, format);
}

}  // namespace jax_fp8
