// The CPU handlers of quantisation and its inverse: check everything that protects memory, turn
// XLA's buffers into a request, and run the kernel that takes it.
#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "common/parallel.h"
#include "common/quantize_desc.h"
#include "cpu/quantize_kernels.h"
#include "handlers/buffers.h"
#include "handlers/quantize_handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8 {
namespace {

namespace ffi = xla::ffi;
using Tile = ffi::Span<const int64_t>;

struct NamedBuffer {
  std::string name;
  ffi::AnyBuffer buffer;

  Dims dims() const { return buffer.dimensions(); }
  std::string Shape() const { return name + ToString(dims()); }
};

// FP8 values of (batch, rows, cols) with one scale per tile of (rows, cols).
struct ScaledArgs {
  NamedBuffer values, scale;
  Tile tile;
};

ffi::Error Invalid(const char* call, const std::string& message) {
  return ffi::Error::InvalidArgument(std::string("jax_fp8.") + call + ": " + message);
}

// Which of the types that InType and OutType list in the same order, by its index there.
std::optional<int> RealTypeIndex(ffi::DataType type) {
  if (type == ffi::DataType::F32) return 0;
  if (type == ffi::DataType::BF16) return 1;
  if (type == ffi::DataType::F16) return 2;
  return std::nullopt;
}

// Checks values and scale against the real array that they stand for, and reads their format and
// their tile, cut to the matrix. Returns what is wrong, or "".
std::string ReadScaled(const ScaledArgs& args, const NamedBuffer& real, Format* format,
                       int64_t* tile_rows, int64_t* tile_cols) {
  const Dims dims = real.dims(), values_dims = args.values.dims(), scale_dims = args.scale.dims();
  if (dims.size() != 3) return real.Shape() + " must have dims (batch, rows, cols)";
  if (!std::equal(dims.begin(), dims.end(), values_dims.begin(), values_dims.end())) {
    return args.values.Shape() + " must have the shape of " + real.Shape();
  }
  if (!ParseOcpFormat(args.values.buffer.element_type(), format)) {
    return args.values.name + " must be float8_e4m3fn or float8_e5m2";
  }
  if (args.scale.buffer.element_type() != ffi::DataType::F32) {
    return args.scale.name + " must be float32";
  }
  if (args.tile.size() != 2 || args.tile[0] < 1 || args.tile[1] < 1) {
    return "tile" + ToString(args.tile) + " must be two sizes >= 1";
  }
  if (scale_dims.size() != 3 || scale_dims[0] != dims[0] ||
      scale_dims[1] != CeilDiv(dims[1], args.tile[0]) ||
      scale_dims[2] != CeilDiv(dims[2], args.tile[1])) {
    return args.scale.Shape() + " must have one scale per tile " + ToString(args.tile) + " of " +
           real.Shape();
  }
  *tile_rows = std::min(args.tile[0], std::max<int64_t>(dims[1], 1));
  *tile_cols = std::min(args.tile[1], std::max<int64_t>(dims[2], 1));
  return "";
}

struct QuantizeOptions {
  bool scale_given = false, power_of_two = false, saturate = true;
  std::optional<NamedBuffer> bits = std::nullopt;  // given: stochastic rounding by them
};

// Returns what is wrong with the bits that x is rounded by, or "".
std::string CheckBits(const NamedBuffer& bits, const NamedBuffer& x) {
  const Dims dims = x.dims(), bits_dims = bits.dims();
  if (bits.buffer.element_type() != ffi::DataType::U32) return bits.name + " must be uint32";
  if (!std::equal(dims.begin(), dims.end(), bits_dims.begin(), bits_dims.end())) {
    return bits.Shape() + " must have the shape of " + x.Shape();
  }
  return "";
}

ffi::Error CheckAndQuantize(const char* call, ffi::ThreadPool& pool, const NamedBuffer& x,
                            std::span<const ScaledArgs> outputs, const QuantizeOptions& options,
                            std::string_view kernel) {
  const std::optional<int> in = RealTypeIndex(x.buffer.element_type());
  if (!in) return Invalid(call, x.name + " must be float32, bfloat16 or float16");
  QuantizeDesc desc{};
  QuantizeBuffers buffers{.x = x.buffer.untyped_data(), .outputs = {}, .bits = nullptr};
  for (size_t i = 0; i < outputs.size(); ++i) {
    Format format;
    const std::string error =
        ReadScaled(outputs[i], x, &format, &desc.outputs[i].tile_rows, &desc.outputs[i].tile_cols);
    if (!error.empty()) return Invalid(call, error);
    if (i > 0 && format != desc.format) {
      return Invalid(call,
                     outputs[i].values.name + " must have the format of " + outputs[0].values.name);
    }
    desc.format = format;
    buffers.outputs[i] = {static_cast<uint8_t*>(outputs[i].values.buffer.untyped_data()),
                          static_cast<float*>(outputs[i].scale.buffer.untyped_data())};
  }
  desc.batch = x.dims()[0];
  desc.rows = x.dims()[1];
  desc.cols = x.dims()[2];
  desc.in = static_cast<InType>(*in);
  desc.num_outputs = static_cast<int>(outputs.size());
  desc.scale_given = options.scale_given;
  desc.power_of_two = options.power_of_two;
  desc.saturate = options.saturate;
  if (options.bits) {
    const std::string error = CheckBits(*options.bits, x);
    if (!error.empty()) return Invalid(call, error);
    desc.stochastic = true;
    buffers.bits = static_cast<const uint32_t*>(options.bits->buffer.untyped_data());
  }

  std::string reasons;
  const QuantizeKernel* row = Pick(QuantizeKernels(), desc, kernel, &reasons);
  if (row == nullptr) return Invalid(call, reasons);
  const IeeeSubnormals ieee;  // for what a kernel does outside ParallelFor
  row->run(desc, buffers, OnPool(pool));
  return ffi::Error::Success();
}

ffi::Error Quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                    ffi::Result<ffi::AnyBuffer> scale, Tile tile, bool power_of_two,
                    std::string_view kernel) {
  const ScaledArgs outputs[] = {{{"values", *values}, {"scale", *scale}, tile}};
  return CheckAndQuantize("quantize", pool, {"x", x}, outputs, {.power_of_two = power_of_two},
                          kernel);
}

ffi::Error QuantizeTwoAxes(ffi::ThreadPool pool, ffi::AnyBuffer x,
                           ffi::Result<ffi::AnyBuffer> values0, ffi::Result<ffi::AnyBuffer> scale0,
                           ffi::Result<ffi::AnyBuffer> values1, ffi::Result<ffi::AnyBuffer> scale1,
                           Tile tile0, Tile tile1, bool power_of_two, std::string_view kernel) {
  const ScaledArgs outputs[] = {{{"values0", *values0}, {"scale0", *scale0}, tile0},
                                {{"values1", *values1}, {"scale1", *scale1}, tile1}};
  return CheckAndQuantize("quantize_two_axes", pool, {"x", x}, outputs,
                          {.power_of_two = power_of_two}, kernel);
}

ffi::Error QuantizeWithScale(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                             ffi::Result<ffi::AnyBuffer> values, Tile tile, bool saturate,
                             std::string_view kernel) {
  const ScaledArgs outputs[] = {{{"values", *values}, {"scale", scale}, tile}};
  return CheckAndQuantize("quantize_with_scale", pool, {"x", x}, outputs,
                          {.scale_given = true, .saturate = saturate}, kernel);
}

ffi::Error QuantizeStochastic(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer bits,
                              ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> scale,
                              Tile tile, bool power_of_two, std::string_view kernel) {
  const ScaledArgs outputs[] = {{{"values", *values}, {"scale", *scale}, tile}};
  return CheckAndQuantize("quantize_stochastic", pool, {"x", x}, outputs,
                          {.power_of_two = power_of_two, .bits = NamedBuffer{"bits", bits}},
                          kernel);
}

ffi::Error QuantizeStochasticWithScale(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                       ffi::AnyBuffer bits, ffi::Result<ffi::AnyBuffer> values,
                                       Tile tile, bool saturate, std::string_view kernel) {
  const ScaledArgs outputs[] = {{{"values", *values}, {"scale", scale}, tile}};
  return CheckAndQuantize(
      "quantize_stochastic_with_scale", pool, {"x", x}, outputs,
      {.scale_given = true, .saturate = saturate, .bits = NamedBuffer{"bits", bits}}, kernel);
}

ffi::Error Dequantize(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer scale,
                      ffi::Result<ffi::AnyBuffer> out, Tile tile, std::string_view kernel) {
  constexpr const char* kCall = "dequantize";
  DequantizeDesc desc{};
  const std::string error = ReadScaled({{"values", values}, {"scale", scale}, tile}, {"out", *out},
                                       &desc.format, &desc.tile_rows, &desc.tile_cols);
  if (!error.empty()) return Invalid(kCall, error);
  const std::optional<int> out_type = RealTypeIndex(out->element_type());
  if (!out_type) return Invalid(kCall, "out must be float32, bfloat16 or float16");
  desc.batch = out->dimensions()[0];
  desc.rows = out->dimensions()[1];
  desc.cols = out->dimensions()[2];
  desc.out = static_cast<OutType>(*out_type);

  std::string reasons;
  const DequantizeKernel* row = Pick(DequantizeKernels(), desc, kernel, &reasons);
  if (row == nullptr) return Invalid(kCall, reasons);
  const IeeeSubnormals ieee;  // for what a kernel does outside ParallelFor
  row->run(desc,
           {.values = static_cast<const uint8_t*>(values.untyped_data()),
            .scale = static_cast<const float*>(scale.untyped_data()),
            .out = out->untyped_data()},
           OnPool(pool));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kQuantize, Quantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // values
                           .Ret<ffi::AnyBuffer>()  // scale
                           .Attr<Tile>("tile")
                           .Attr<bool>("power_of_two")
                           .Attr<std::string_view>("kernel"));

XLA_FFI_DEFINE_HANDLER(kQuantizeTwoAxes, QuantizeTwoAxes,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // values0
                           .Ret<ffi::AnyBuffer>()  // scale0
                           .Ret<ffi::AnyBuffer>()  // values1
                           .Ret<ffi::AnyBuffer>()  // scale1
                           .Attr<Tile>("tile0")
                           .Attr<Tile>("tile1")
                           .Attr<bool>("power_of_two")
                           .Attr<std::string_view>("kernel"));

XLA_FFI_DEFINE_HANDLER(kQuantizeWithScale, QuantizeWithScale,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // scale
                           .Ret<ffi::AnyBuffer>()  // values
                           .Attr<Tile>("tile")
                           .Attr<bool>("saturate")
                           .Attr<std::string_view>("kernel"));

XLA_FFI_DEFINE_HANDLER(kQuantizeStochastic, QuantizeStochastic,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // bits
                           .Ret<ffi::AnyBuffer>()  // values
                           .Ret<ffi::AnyBuffer>()  // scale
                           .Attr<Tile>("tile")
                           .Attr<bool>("power_of_two")
                           .Attr<std::string_view>("kernel"));

XLA_FFI_DEFINE_HANDLER(kQuantizeStochasticWithScale, QuantizeStochasticWithScale,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // scale
                           .Arg<ffi::AnyBuffer>()  // bits
                           .Ret<ffi::AnyBuffer>()  // values
                           .Attr<Tile>("tile")
                           .Attr<bool>("saturate")
                           .Attr<std::string_view>("kernel"));

XLA_FFI_DEFINE_HANDLER(kDequantize, Dequantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // values
                           .Arg<ffi::AnyBuffer>()  // scale
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<Tile>("tile")
                           .Attr<std::string_view>("kernel"));

}  // namespace

std::vector<Registration> QuantizeRegistrations() {
  return {
      {"jax_fp8.quantize.v1", "cpu", reinterpret_cast<void*>(kQuantize)},
      {"jax_fp8.quantize_two_axes.v1", "cpu", reinterpret_cast<void*>(kQuantizeTwoAxes)},
      {"jax_fp8.quantize_with_scale.v1", "cpu", reinterpret_cast<void*>(kQuantizeWithScale)},
      {"jax_fp8.quantize_stochastic.v1", "cpu", reinterpret_cast<void*>(kQuantizeStochastic)},
      {"jax_fp8.quantize_stochastic_with_scale.v1", "cpu",
       reinterpret_cast<void*>(kQuantizeStochasticWithScale)},
      {"jax_fp8.dequantize.v1", "cpu", reinterpret_cast<void*>(kDequantize)},
  };
}

std::vector<std::vector<std::string>> QuantizeKernelTable() {
  std::vector<std::vector<std::string>> table;
  for (const QuantizeKernel& row : QuantizeKernels()) {
    table.push_back({"quantize", row.name, row.why_not(QuantizeDesc{})});
  }
  return table;
}

}  // namespace jax_fp8
