#include "common/gemm_desc.h"

namespace jax_fp8 {
namespace {

const char* RhsLayout(const OperandDesc& rhs) {
  if (rhs.in_panels) return "panels";
  return rhs.k_contiguous ? "nk" : "kn";
}

std::string OperandToString(const OperandDesc& operand, const char* layout) {
  return std::string(Info(operand.format).name) + "[" + std::to_string(operand.tile_rows) + "x" +
         std::to_string(operand.tile_k) + "," + layout + "]";
}

const char* OutTypeName(OutType type) {
  switch (type) {
    case OutType::kF32:
      return "f32";
    case OutType::kBF16:
      return "bf16";
    case OutType::kF16:
      return "f16";
  }
  return "?";
}

}  // namespace

std::string ToString(const GemmDesc& desc) {
  std::string text = "m=" + std::to_string(desc.m) + " n=" + std::to_string(desc.n) +
                     " k=" + std::to_string(desc.k) + " " +
                     OperandToString(desc.lhs, desc.lhs.k_contiguous ? "mk" : "km") + "·" +
                     OperandToString(desc.rhs, RhsLayout(desc.rhs)) + "->" + OutTypeName(desc.out);
  if (desc.machine != nullptr) {
    text += std::string(" accumulation=") + desc.machine->name;
    if (!desc.machine->ignores_interval && desc.promotion_interval != 0) {
      text += " promotion_interval=" + std::to_string(desc.promotion_interval);
    }
  }
  if (desc.split_k != 1) text += " split_k=" + std::to_string(desc.split_k);
  return text;
}

}  // namespace jax_fp8
