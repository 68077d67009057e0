// Collects what the handlers of every platform offer. The only file that knows them all.
#include <span>

#include "common/gemm_desc.h"
#include "cpu/emulate.h"
#include "cpu/kernels.h"
#include "handlers/gemm_handlers.h"
#include "handlers/handlers.h"
#include "handlers/instruction_handlers.h"
#include "handlers/quantize_handlers.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {
namespace {

Format ParseFormat(const std::string& name) {
  for (size_t i = 0; i < kFormats.size(); ++i) {
    if (name == kFormats[i].name) return static_cast<Format>(i);
  }
  return Format::kE4M3FN;
}

OutType ParseOutType(const std::string& name) {
  if (name == "bf16") return OutType::kBF16;
  if (name == "f16") return OutType::kF16;
  return OutType::kF32;
}

// Each row with its reason to refuse `desc`.
std::vector<std::pair<std::string, std::string>> Reasons(const GemmDesc& desc) {
  std::vector<std::pair<std::string, std::string>> reasons;
  for (const GemmKernel& row : desc.is_emulated() ? EmulateKernels() : GemmKernels()) {
    reasons.emplace_back(row.name, row.why_not(desc));
  }
  return reasons;
}

}  // namespace

std::vector<Registration> Registrations() {
  std::vector<Registration> registrations = GemmRegistrations();
  for (const auto& more : {InstructionRegistrations(), QuantizeRegistrations()}) {
    registrations.insert(registrations.end(), more.begin(), more.end());
  }
  return registrations;
}

std::pair<int, int> FfiApiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

std::vector<std::vector<std::string>> KernelTable() {
  // A request that no row refuses for its own sake: what remains is the machine's or the build's.
  GemmDesc any{.m = 1,
               .n = 1,
               .k = 1,
               .lhs = {Format::kE4M3FN, true, 1, 1},
               .rhs = {Format::kE4M3FN, true, 1, 1},
               .out = OutType::kF32,
               .any_order = true};
  GemmDesc in_order = any;
  in_order.any_order = false;
  std::vector<std::vector<std::string>> table;
  for (const GemmKernel& row : GemmKernels()) {
    const std::string why_not = row.why_not(any);
    table.push_back({"gemm", row.name, why_not, why_not.empty() ? row.why_not(in_order) : ""});
  }
  any.machine = FindMachine("hopper_wgmma");
  for (const auto& [name, reason] : Reasons(any)) table.push_back({"emulate", name, reason, ""});
  for (const auto& row : QuantizeKernelTable()) table.push_back({row[0], row[1], row[2], ""});
  return table;
}

std::vector<std::pair<std::string, std::string>> ExplainGemm(
    int64_t m, int64_t n, int64_t k, const std::string& lhs_format, const std::string& rhs_format,
    const std::string& out_type, const std::string& lhs_layout, const std::string& rhs_layout,
    std::pair<int64_t, int64_t> lhs_tile, std::pair<int64_t, int64_t> rhs_tile,
    const std::string& accumulation, int64_t promotion_interval, int64_t split_k,
    const std::string& kernel, bool any_order) {
  return Reasons(
      {.m = m,
       .n = n,
       .k = k,
       .lhs = {ParseFormat(lhs_format), lhs_layout == "mk", lhs_tile.first, lhs_tile.second},
       .rhs = {ParseFormat(rhs_format), rhs_layout == "nk", rhs_tile.first, rhs_tile.second,
               rhs_layout == "panels"},
       .out = ParseOutType(out_type),
       .machine = FindMachine(accumulation),
       .promotion_interval = promotion_interval,
       .split_k = split_k,
       .any_order = MayReorder(any_order, kernel, m)});
}

int64_t Fp16Overflows() { return Fp16OverflowCount(); }

std::vector<MachineRow> MachineTable() {
  constexpr const char* kSummations[] = {"aligned", "grouped",  "sequential",
                                         "chunked", "pairwise", "exact"};
  constexpr const char* kRoundings[] = {"rz_e8m13", "rz_fp32", "rne_fp32", "rne_fp16", "rne_bf16"};
  std::vector<MachineRow> table;
  for (const Machine& machine : Machines()) {
    table.emplace_back(machine.name, kSummations[static_cast<int>(machine.summation)], machine.step,
                       machine.fraction_bits, kRoundings[static_cast<int>(machine.rounding)],
                       machine.zero_exponent, machine.fp16_operands, machine.scales_inside,
                       machine.fnuz_operands, machine.ignores_interval);
  }
  return table;
}

}  // namespace jax_fp8
