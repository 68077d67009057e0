#include "common/quantize_desc.h"

namespace jax_fp8 {
namespace {

constexpr const char* kRealNames[] = {"f32", "bf16", "f16"};  // by InType and by OutType

std::string SizesToString(int64_t batch, int64_t rows, int64_t cols) {
  return "batch=" + std::to_string(batch) + " rows=" + std::to_string(rows) +
         " cols=" + std::to_string(cols) + " ";
}

std::string TileToString(int64_t tile_rows, int64_t tile_cols) {
  return std::to_string(tile_rows) + "x" + std::to_string(tile_cols);
}

}  // namespace

std::string ToString(const QuantizeDesc& desc) {
  std::string text = SizesToString(desc.batch, desc.rows, desc.cols) +
                     kRealNames[static_cast<int>(desc.in)] + "->" + Info(desc.format).name;
  for (int i = 0; i < desc.num_outputs; ++i) {
    text += (i == 0 ? " tile " : " and ") +
            TileToString(desc.outputs[i].tile_rows, desc.outputs[i].tile_cols);
  }
  if (desc.scale_given) text += " scale given";
  if (desc.power_of_two) text += " power_of_two";
  if (!desc.saturate) text += " not saturating";
  if (desc.stochastic) text += " stochastic";
  return text;
}

std::string ToString(const DequantizeDesc& desc) {
  return SizesToString(desc.batch, desc.rows, desc.cols) + Info(desc.format).name + "->" +
         kRealNames[static_cast<int>(desc.out)] + " tile " +
         TileToString(desc.tile_rows, desc.tile_cols);
}

}  // namespace jax_fp8
