#include "cpu/nonfinite.h"

#include <algorithm>
#include <cmath>

namespace jax_fp8 {
namespace {

// A set of NonFinite from the largest magnitude of some codes, or from what FNUZ codes hold. Loops
// over codes are free of branches, so that compilers vectorise them.
class Scan {
 public:
  explicit Scan(Format format) : info_(Info(format)) {}

  // A byte that grows with what is to be found.
  uint8_t Rank(uint8_t code) const {
    return info_.is_fnuz ? static_cast<uint8_t>(code == info_.nan_code) : code & 0x7F;
  }
  uint8_t Classify(uint8_t largest_rank) const {
    if (info_.is_fnuz) return largest_rank != 0 ? kHasNan : kAllFinite;
    if (largest_rank <= info_.max_code) return kAllFinite;
    return info_.has_inf && largest_rank == info_.inf_code ? kHasInf : kHasNan;
  }

 private:
  const FormatInfo info_;
};

// What the rows [begin, end) hold, into found[begin …].
void ScanRows(const OperandDesc& desc, const OperandBuffer& buffer, int64_t begin, int64_t end,
              int64_t k, uint8_t* found) {
  const Scan scan(desc.format);
  std::fill(found + begin, found + end, 0);
  if (desc.k_contiguous) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* codes = CodeOf(desc, buffer, row, 0);
      uint8_t largest = 0;
      for (int64_t i = 0; i < k; ++i) largest = std::max(largest, scan.Rank(codes[i]));
      found[row] = largest;
    }
  } else {
    for (int64_t panel = begin; panel < end; panel += kPanelCols) {
      const int64_t num_rows = std::min(kPanelCols, end - panel);
      for (int64_t i = 0; i < k; ++i) {
        const uint8_t* codes = CodeOf(desc, buffer, panel, i);
        for (int64_t j = 0; j < num_rows; ++j) {
          found[panel + j] = std::max(found[panel + j], scan.Rank(codes[j]));
        }
      }
    }
  }
  for (int64_t row = begin; row < end; ++row) found[row] = scan.Classify(found[row]);
}

bool HasNanScale(const OperandDesc& desc, const OperandBuffer& buffer, int64_t row, int64_t k) {
  const float* scale = buffer.scale + row / desc.tile_rows * buffer.scale_row_stride;
  for (int64_t i = 0; i * desc.tile_k < k; ++i) {
    if (std::isnan(scale[i * buffer.scale_k_stride])) return true;
  }
  return false;
}

std::vector<uint8_t> ScanOperand(const OperandDesc& desc, const OperandBuffer& buffer,
                                 int64_t num_rows, int64_t k, bool scales_inside,
                                 const ParallelFor& parallel_for) {
  constexpr int64_t kRowsPerTask = 4 * kPanelCols;
  std::vector<uint8_t> found(num_rows);
  parallel_for((num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    const int64_t begin = task * kRowsPerTask, end = std::min(begin + kRowsPerTask, num_rows);
    ScanRows(desc, buffer, begin, end, k, found.data());
    for (int64_t row = begin; scales_inside && row < end; ++row) {
      if (HasNanScale(desc, buffer, row, k)) found[row] = kHasNan;
    }
  });
  return found;
}

}  // namespace

NonFiniteOutputs::NonFiniteOutputs(const GemmDesc& desc, const GemmBuffers& buffers,
                                   const ParallelFor& parallel_for) {
  const bool scales_inside = desc.machine != nullptr && desc.machine->scales_inside;
  rows = ScanOperand(desc.lhs, buffers.lhs, desc.m, desc.k, scales_inside, parallel_for);
  cols = ScanOperand(desc.rhs, buffers.rhs, desc.n, desc.k, scales_inside, parallel_for);
  auto is_set = [](uint8_t found) { return found != kAllFinite; };
  any = std::any_of(rows.begin(), rows.end(), is_set) ||
        std::any_of(cols.begin(), cols.end(), is_set);
}

}  // namespace jax_fp8
