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

std::vector<Registration> Registrations();
std::pair<int, int> FfiApiVersion();

// One tuple per row: operation ("gemm" or "quantize"), name, why this machine cannot run it or "".
std::vector<std::vector<std::string>> KernelTable();

// Formats are "e4m3fn" and "e5m2", layouts "mk"/"km" and "nk"/"kn", out types "f32", "bf16", "f16".
std::vector<std::pair<std::string, std::string>> ExplainGemm(
    int64_t m, int64_t n, int64_t k, const std::string& lhs_format, const std::string& rhs_format,
    const std::string& out_type, const std::string& lhs_layout, const std::string& rhs_layout,
    std::pair<int64_t, int64_t> lhs_tile, std::pair<int64_t, int64_t> rhs_tile,
    const std::string& accumulation, int64_t promotion_interval);

}  // namespace jax_fp8
