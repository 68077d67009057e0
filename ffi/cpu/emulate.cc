#include "cpu/emulate.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <string>
#include <vector>

#include "cpu/accumulator.h"
#include "cpu/features.h"
#include "cpu/scalar_operand.h"

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

// Which rows of lhs, or of rhs, hold a code that is no finite number, or a scale that is NaN and
// multiplies inside a step.
std::vector<bool> NonFiniteRows(const OperandDesc& desc, const OperandBuffer& buffer, int64_t rows,
                                int64_t k, const Machine& machine) {
  const auto& table = DecodedTable(machine, desc.format);
  std::array<bool, 256> is_special{};
  for (int code = 0; code < 256; ++code)
    is_special[code] = table[code].is_nan || table[code].is_inf;
  std::vector<bool> found(rows, false);
  for (int64_t row = 0; machine.scales_inside && row < rows; ++row) {
    const float* scale = buffer.scale + row / desc.tile_rows * buffer.scale_row_stride;
    for (int64_t i = 0; i * desc.tile_k < k; ++i) {
      if (std::isnan(scale[i * buffer.scale_k_stride])) found[row] = true;
    }
  }
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

// A row or a column of outputs that meets what the vectorised code leaves out.
struct Exceptions {
  std::vector<bool> rows, cols;

  Exceptions(const GemmDesc& desc, const GemmBuffers& buffers)
      : rows(NonFiniteRows(desc.lhs, buffers.lhs, desc.m, desc.k, *desc.machine)),
        cols(NonFiniteRows(desc.rhs, buffers.rhs, desc.n, desc.k, *desc.machine)) {}
};

std::atomic<int64_t> overflow_count = 0;

bool IsFinite(const GemmDesc& desc, const void* out, int64_t index) {
  const auto* half = static_cast<const uint16_t*>(out) + index;
  if (desc.out == OutType::kF32) return std::isfinite(static_cast<const float*>(out)[index]);
  const uint16_t exponent = desc.out == OutType::kBF16 ? 0x7F80 : 0x7C00;
  return (*half & exponent) != exponent;
}

// Adds to overflow_count what an FP16 accumulator made of finite operands.
void CountOverflows(const GemmDesc& desc, const GemmBuffers& buffers) {
  const Exceptions exceptions(desc, buffers);
  int64_t count = 0;
  for (int64_t row = 0; row < desc.m; ++row) {
    for (int64_t col = 0; col < desc.n; ++col) {
      if (exceptions.rows[row] || exceptions.cols[col]) continue;
      count += !IsFinite(desc, buffers.out, row * desc.n + col);
    }
  }
  overflow_count += count;
}

using Emulation = const PackedGemmIsa* (*)(const Machine&);

// Operands that are all finite, by the code of an ISA, and outputs that meet a NaN or an infinity,
// one by one.
template <Emulation emulation>
bool RunVectorised(const GemmDesc& desc, std::span<const GemmBuffers> batch,
                   const ParallelFor& parallel_for) {
  if (!RunPackedGemm(*emulation(*desc.machine), desc, batch, parallel_for)) return false;
  for (const GemmBuffers& buffers : batch) {
    const Exceptions exceptions(desc, buffers);
    const int64_t num_cols = std::count(exceptions.cols.begin(), exceptions.cols.end(), true);
    const int64_t num_rows = std::count(exceptions.rows.begin(), exceptions.rows.end(), true);
    if (num_rows + num_cols == 0) continue;
    parallel_for(desc.m, [&](int64_t row) {
      if (!exceptions.rows[row] && num_cols == 0) return;
      for (int64_t col = 0; col < desc.n; ++col) {
        if (!exceptions.rows[row] && !exceptions.cols[col]) continue;
        StoreElement(EmulateElement(desc, buffers, row, col), desc.out, buffers.out,
                     row * desc.n + col);
      }
    });
  }
  return true;
}

std::string NoCode(const char* isa, const Machine& machine) {
  return std::string("the ") + isa + " code of this build does not emulate " + machine.name;
}

std::string WhyNotAvx512(const GemmDesc& desc) {
  if (!Features().avx512) return "this CPU has no AVX-512 F, BW, DQ and VL";
  if (EmulationAvx512(*desc.machine) == nullptr) return NoCode("AVX-512", *desc.machine);
  return WhyNot(desc);
}

std::string WhyNotAvx2(const GemmDesc& desc) {
  if (!Features().avx2) return "this CPU has no AVX2, FMA and F16C";
  if (EmulationAvx2(*desc.machine) == nullptr) return NoCode("AVX2", *desc.machine);
  return WhyNot(desc);
}

constexpr GemmKernel kEmulateKernels[] = {
    {"avx512", WhyNotAvx512, RunVectorised<EmulationAvx512>},
    {"avx2", WhyNotAvx2, RunVectorised<EmulationAvx2>},
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
