#include "cpu/emulate.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <string>
#include <vector>

#include "cpu/accumulator.h"

namespace jax_fp8 {
namespace {

std::string WhyNot(const GemmDesc& desc) {
  const Machine& machine = *desc.machine;
  if (!machine.fnuz_operands) {
    for (Format format : {desc.lhs.format, desc.rhs.format}) {
      if (Info(format).is_fnuz) {
        return std::string(Info(format).name) + " is not an operand of " + machine.name;
      }
    }
  }
  if (desc.promotion_interval % machine.step != 0 && !machine.ignores_interval) {
    return std::string(machine.name) + " promotes at multiples of " + std::to_string(machine.step);
  }
  if (machine.scales_inside && (desc.lhs.tile_k != std::min<int64_t>(kMxBlock, desc.k) ||
                                desc.rhs.tile_k != std::min<int64_t>(kMxBlock, desc.k))) {
    return std::string(machine.name) + " takes a scale for every " + std::to_string(kMxBlock) +
           " k of both operands";
  }
  return "";
}

// Whether a row of lhs, or of rhs, holds a code that is no finite number.
std::vector<bool> NonFiniteRows(const OperandDesc& desc, const OperandBuffer& buffer, int64_t rows,
                                int64_t k, const Machine& machine) {
  const auto& table = DecodedTable(machine, desc.format);
  std::array<bool, 256> is_special{};
  for (int code = 0; code < 256; ++code)
    is_special[code] = table[code].is_nan || table[code].is_inf;
  std::vector<bool> found(rows, false);
  const int64_t num_lines = desc.k_contiguous ? rows : k, line = desc.k_contiguous ? k : rows;
  for (int64_t i = 0; i < num_lines; ++i) {
    for (int64_t j = 0; j < line; ++j) {
      if (is_special[buffer.values[i * buffer.leading_stride + j]]) {
        found[desc.k_contiguous ? i : j] = true;
      }
    }
  }
  return found;
}

std::atomic<int64_t> overflow_count = 0;

bool IsFinite(const GemmDesc& desc, const void* out, int64_t index) {
  const auto* half = static_cast<const uint16_t*>(out) + index;
  if (desc.out == OutType::kF32) return std::isfinite(static_cast<const float*>(out)[index]);
  const uint16_t exponent = desc.out == OutType::kBF16 ? 0x7F80 : 0x7C00;
  return (*half & exponent) != exponent;
}

// Adds to overflow_count what an FP16 accumulator made of finite operands.
void CountOverflows(const GemmDesc& desc, const GemmBuffers& buffers) {
  const auto bad_rows = NonFiniteRows(desc.lhs, buffers.lhs, desc.m, desc.k, *desc.machine);
  const auto bad_cols = NonFiniteRows(desc.rhs, buffers.rhs, desc.n, desc.k, *desc.machine);
  int64_t count = 0;
  for (int64_t row = 0; row < desc.m; ++row) {
    for (int64_t col = 0; col < desc.n; ++col) {
      if (bad_rows[row] || bad_cols[col]) continue;
      count += !IsFinite(desc, buffers.out, row * desc.n + col);
    }
  }
  overflow_count += count;
}

constexpr GemmKernel kEmulateKernels[] = {
    {"scalar", WhyNot, RunEmulateScalar},
};

}  // namespace

std::span<const GemmKernel> EmulateKernels() { return kEmulateKernels; }

bool RunEmulate(const GemmKernel& row, const GemmDesc& desc, std::span<const GemmBuffers> batch,
                const ParallelFor& parallel_for) {
  if (!row.run(desc, batch, parallel_for)) return false;
  if (desc.machine->rounding == Rounding::kRneFp16) {
    parallel_for(static_cast<int64_t>(batch.size()),
                 [&](int64_t i) { CountOverflows(desc, batch[i]); });
  }
  return true;
}

int64_t Fp16OverflowCount() { return overflow_count; }

}  // namespace jax_fp8
