#include "cpu/emulate.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <new>
#include <string>

#include "cpu/accumulator.h"
#include "cpu/features.h"
#include "cpu/nonfinite.h"
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
  const int64_t block = std::clamp<int64_t>(desc.k, 1, kMxBlock);
  if (machine.scales_inside && (desc.lhs.tile_k != block || desc.rhs.tile_k != block)) {
    return std::string(machine.name) + " takes a scale for every " + std::to_string(kMxBlock) +
           " k of both operands";
  }
  return "";
}

std::atomic<int64_t> overflow_count = 0;

bool IsFinite(const GemmDesc& desc, const void* out, int64_t index) {
  const auto* half = static_cast<const uint16_t*>(out) + index;
  if (desc.out == OutType::kF32) return std::isfinite(static_cast<const float*>(out)[index]);
  const uint16_t exponent = desc.out == OutType::kBF16 ? 0x7F80 : 0x7C00;
  return (*half & exponent) != exponent;
}

// Adds to overflow_count what an FP16 accumulator made of finite operands.
void CountOverflows(const GemmDesc& desc, const GemmBuffers& buffers,
                    const ParallelFor& parallel_for) {
  const NonFiniteOutputs nonfinite(desc, buffers, parallel_for);
  parallel_for(desc.m, [&](int64_t row) {
    if (nonfinite.rows[row] != kAllFinite) return;
    int64_t count = 0;
    for (int64_t col = 0; col < desc.n; ++col) {
      if (nonfinite.cols[col] != kAllFinite) continue;
      count += !IsFinite(desc, buffers.out, row * desc.n + col);
    }
    overflow_count += count;
  });
}

// Computes again, one by one, the outputs that meet a NaN or an infinity.
void ReplaceNonFinite(const GemmDesc& desc, const GemmBuffers& buffers,
                      const ParallelFor& parallel_for) {
  const NonFiniteOutputs nonfinite(desc, buffers, parallel_for);
  if (!nonfinite.any) return;
  parallel_for(desc.m, [&](int64_t row) {
    for (int64_t col = 0; col < desc.n; ++col) {
      const uint8_t found = nonfinite.rows[row] | nonfinite.cols[col];
      if (found == kAllFinite) continue;
      // A NaN makes every sum NaN, whatever the machine: no need to add up.
      const float value = found & kHasNan ? kMachineNan : EmulateElement(desc, buffers, row, col);
      StoreElement(value, desc.out, buffers.out, row * desc.n + col);
    }
  });
}

// Calls body(buffers, parallel_for) for every product of a batch: in parallel over the batch, or
// within its only product. False if there is no memory.
template <class Body>
bool ForEachProduct(std::span<const GemmBuffers> batch, const ParallelFor& parallel_for,
                    const Body& body) {
  if (batch.size() == 1) return body(batch[0], parallel_for), true;
  const ParallelFor serial{1, [](int64_t num_tasks, TaskBody task) {
                             for (int64_t i = 0; i < num_tasks; ++i) task(i);
                           }};
  std::atomic<bool> has_memory = true;
  parallel_for(static_cast<int64_t>(batch.size()), [&](int64_t i) {
    try {
      body(batch[i], serial);
    } catch (const std::bad_alloc&) {  // no exception may leave a pool's thread
      has_memory = false;
    }
  });
  return has_memory;
}

using Emulation = const PackedGemmIsa* (*)(const Machine&);

// Operands that are all finite by the code of an ISA, the rest by the readable code.
template <Emulation emulation>
bool RunVectorised(const GemmDesc& desc, std::span<const GemmBuffers> batch,
                   const ParallelFor& parallel_for) {
  if (!RunPackedGemm(*emulation(*desc.machine), desc, batch, parallel_for)) return false;
  return ForEachProduct(batch, parallel_for,
                        [&](const GemmBuffers& buffers, const ParallelFor& within_product) {
                          ReplaceNonFinite(desc, buffers, within_product);
                        });
}

// Sums of more products than this could leave the double that holds them.
constexpr int64_t kMaxWideK = int64_t{1} << 17;

std::string WhyNotVectorised(const GemmDesc& desc) {
  const Summation summation = desc.machine->summation;
  const bool is_wide = summation == Summation::kExact || summation == Summation::kPairwise;
  if (is_wide && desc.k > kMaxWideK) {
    return "this row adds up to " + std::to_string(kMaxWideK) + " k for " + desc.machine->name;
  }
  return WhyNot(desc);
}

std::string NoCode(const char* isa, const Machine& machine) {
  return std::string("the ") + isa + " code of this build does not emulate " + machine.name;
}

std::string WhyNotAvx512(const GemmDesc& desc) {
  if (!Features().avx512) return "this CPU has no AVX-512 F, BW, DQ and VL";
  if (EmulationAvx512(*desc.machine) == nullptr) return NoCode("AVX-512", *desc.machine);
  return WhyNotVectorised(desc);
}

std::string WhyNotAvx2(const GemmDesc& desc) {
  if (!Features().avx2) return "this CPU has no AVX2, FMA and F16C";
  if (EmulationAvx2(*desc.machine) == nullptr) return NoCode("AVX2", *desc.machine);
  return WhyNotVectorised(desc);
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
  if (desc.machine->rounding != Rounding::kRneFp16) return true;
  return ForEachProduct(batch, parallel_for,
                        [&](const GemmBuffers& buffers, const ParallelFor& within_product) {
                          CountOverflows(desc, buffers, within_product);
                        });
}

int64_t Fp16OverflowCount() { return overflow_count; }

}  // namespace jax_fp8
