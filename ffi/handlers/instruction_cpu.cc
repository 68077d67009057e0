// The CPU handler of "jax_fp8.instruction.v1": one matrix instruction, d = a · b + c, by the
// readable accumulator. a is (m, k), b (k, n), c and d (m, n) of the accumulator's type, the
// scales, where the machine multiplies by them, (m, ceil(k / 32)) and (ceil(k / 32), n), else
// empty.
#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "common/parallel.h"
#include "common/rounding.h"
#include "cpu/accumulator.h"
#include "handlers/buffers.h"
#include "handlers/instruction_handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8 {
namespace {

namespace ffi = xla::ffi;

ffi::Error Invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jax_fp8.instruction: " + message);
}

// One element of d: the chain of all k, which starts from c.
struct Chain {
  const Machine& machine;
  DecodedCodes a, b;
  const float *a_scale, *b_scale;
  int64_t b_scale_stride;
  int64_t size_k;

  float operator()(float c) const {
    for (int64_t k = 0; k < size_k; k += machine.step) {
      const int num_k = static_cast<int>(std::min<int64_t>(machine.step, size_k - k));
      int scale_exponent = 0;
      if (machine.scales_inside) {
        const float x = a_scale[k / kMxBlock], y = b_scale[k / kMxBlock * b_scale_stride];
        if (std::isnan(x) || std::isnan(y)) return kMachineNan;
        scale_exponent = std::ilogb(x) + std::ilogb(y);
      }
      c = Step(machine, a.From(k), b.From(k), num_k, scale_exponent, c);
    }
    return c;
  }
};

ffi::Error Instruction(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer c,
                       ffi::Buffer<ffi::F32> a_scale, ffi::Buffer<ffi::F32> b_scale,
                       ffi::Result<ffi::AnyBuffer> d, std::string_view accumulation) {
  const Machine* machine = FindMachine(accumulation);
  if (machine == nullptr || machine->summation == Summation::kPairwise ||
      machine->summation == Summation::kExact) {
    return Invalid("'" + std::string(accumulation) + "' is not a machine with instructions");
  }
  Format a_format, b_format;
  if (!ParseFormat(a.element_type(), &a_format) || !ParseFormat(b.element_type(), &b_format)) {
    return Invalid("a and b must be FP8 arrays");
  }
  const Dims a_dims = a.dimensions(), b_dims = b.dimensions(), c_dims = c.dimensions();
  if (a_dims.size() != 2 || b_dims.size() != 2 || c_dims.size() != 2 || a_dims[1] != b_dims[0] ||
      a_dims[0] != c_dims[0] || b_dims[1] != c_dims[1] || d->dimensions().size() != 2 ||
      d->dimensions()[0] != c_dims[0] || d->dimensions()[1] != c_dims[1]) {
    return Invalid("a" + ToString(a_dims) + ", b" + ToString(b_dims) + ", c" + ToString(c_dims) +
                   " do not make d" + ToString(d->dimensions()));
  }
  const bool is_f16 = c.element_type() == ffi::DataType::F16;
  if ((!is_f16 && c.element_type() != ffi::DataType::F32) ||
      d->element_type() != c.element_type()) {
    return Invalid("c and d must both be float32 or both be float16");
  }
  const int64_t m = a_dims[0], k = a_dims[1], n = b_dims[1], blocks = CeilDiv(k, kMxBlock);
  if (machine->scales_inside && (static_cast<int64_t>(a_scale.element_count()) != m * blocks ||
                                 static_cast<int64_t>(b_scale.element_count()) != n * blocks)) {
    return Invalid("the scales must be (m, k / 32) and (k / 32, n)");
  }

  const auto* a_codes = static_cast<const uint8_t*>(a.untyped_data());
  const auto* b_codes = static_cast<const uint8_t*>(b.untyped_data());
  const auto& a_table = DecodedTable(*machine, a_format);
  const auto& b_table = DecodedTable(*machine, b_format);
  OnPool(pool)(m, [&](int64_t row) {
    for (int64_t col = 0; col < n; ++col) {
      const Chain chain{*machine,
                        {a_codes + row * k, 1, &a_table},
                        {b_codes + col, n, &b_table},
                        a_scale.typed_data() + row * blocks,
                        b_scale.typed_data() + col,
                        n,
                        k};
      const int64_t index = row * n + col;
      if (is_f16) {
        const uint16_t bits = static_cast<const uint16_t*>(c.untyped_data())[index];
        const float sum = chain(F16BitsToFloat(bits));
        static_cast<uint16_t*>(d->untyped_data())[index] = FloatToF16Bits(sum);
      } else {
        static_cast<float*>(d->untyped_data())[index] =
            chain(static_cast<const float*>(c.untyped_data())[index]);
      }
    }
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(InstructionHandler, Instruction,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()         // a
                           .Arg<ffi::AnyBuffer>()         // b
                           .Arg<ffi::AnyBuffer>()         // c
                           .Arg<ffi::Buffer<ffi::F32>>()  // a_scale
                           .Arg<ffi::Buffer<ffi::F32>>()  // b_scale
                           .Ret<ffi::AnyBuffer>()         // d
                           .Attr<std::string_view>("accumulation"));

}  // namespace

std::vector<Registration> InstructionRegistrations() {
  return {{"jax_fp8.instruction.v1", "cpu", reinterpret_cast<void*>(InstructionHandler)}};
}

}  // namespace jax_fp8
