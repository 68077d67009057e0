// What the handlers offer to module.cc: XLA's entry points, and the kernel tables as plain data.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace jax_fp8 {

struct Registration {
  const char* target;
  const char* platform;  // XLA's spelling: "cpu", "CUDA", "ROCM"
  void* handler;
};

using MachineRow =
    std::tuple<std::string, std::string, int, int, std::string, int, bool, bool, bool, bool>;

std::vector<Registration> Registrations();
std::pair<int, int> FfiApiVersion();

// One tuple per row: operation ("gemm", "emulate" or "quantize"), name, why this machine cannot run
// it or "", why it is not chosen unless it is asked for or "".
std::vector<std::vector<std::string>> KernelTable();

// Formats are those of common/fp8.h, layouts "mk"/"km" and "nk"/"kn"/"panels", out types "f32",
// "bf16", "f16"; `kernel` is the forced row or "".
std::vector<std::pair<std::string, std::string>> ExplainGemm(
    int64_t m, int64_t n, int64_t k, const std::string& lhs_format, const std::string& rhs_format,
    const std::string& out_type, const std::string& lhs_layout, const std::string& rhs_layout,
    std::pair<int64_t, int64_t> lhs_tile, std::pair<int64_t, int64_t> rhs_tile,
    const std::string& accumulation, int64_t promotion_interval, int64_t split_k,
    const std::string& kernel, bool any_order);

// Results of FP16 accumulators, in this process, that were not finite although their operands were.
int64_t Fp16Overflows();

// One tuple per accumulation model: the fields of Machine in their order, enums as their names.
std::vector<MachineRow> MachineTable();

}  // namespace jax_fp8
