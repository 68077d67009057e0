// What the drivers of the packed GEMM share: ranges of rows and columns, and what a range of an
// operand brings to one block of k. Included only by files compiled for any CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "common/gemm_desc.h"
#include "cpu/gemm_packed.h"
#include "cpu/k_blocking.h"

namespace jax_fp8 {

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Part `part` of [0, size) cut into `num_parts` about equal parts, at multiples of `unit`.
inline Range Part(int64_t size, int64_t num_parts, int64_t unit, int64_t part) {
  const int64_t num_units = CeilDiv(size, unit);
  return {std::min(size, num_units * part / num_parts * unit),
          std::min(size, num_units * (part + 1) / num_parts * unit)};
}

// How far ahead the codes of a panel are fetched: a page, where hardware stops.
inline constexpr int64_t kPanelPrefetchBytes = 4096;

// What is to be packed of `rows` in one block of k.
inline PackSource SourceOf(const OperandDesc& desc, const OperandBuffer& buffer, Range rows,
                           const KBlocking& k_blocking, const KBlocking::Block& block,
                           int64_t prefetch_distance = 0) {
  return {.values = CodeOf(desc, buffer, rows.begin, block.k_begin),
          .leading_stride = buffer.leading_stride,
          .format = desc.format,
          .k_contiguous = desc.k_contiguous,
          .num_rows = static_cast<int>(rows.size()),
          .runs = k_blocking.runs(block),
          .num_runs = block.num_runs,
          .prefetch_distance = prefetch_distance};
}

// The scale of each row of `rows` at `k`, one per row however many rows share it.
inline void ExpandScales(const OperandDesc& desc, const OperandBuffer& buffer, Range rows,
                         int64_t k, float* expanded) {
  const float* scale = buffer.scale + k / desc.tile_k * buffer.scale_k_stride;
  if (desc.tile_rows == 1) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      expanded[row - rows.begin] = scale[row * buffer.scale_row_stride];
    }
    return;
  }
  for (int64_t row = rows.begin; row < rows.end;) {
    const int64_t tile = row / desc.tile_rows;
    const int64_t end = std::min(rows.end, (tile + 1) * desc.tile_rows);
    std::fill(expanded + (row - rows.begin), expanded + (end - rows.begin),
              scale[tile * buffer.scale_row_stride]);
    row = end;
  }
}

}  // namespace jax_fp8
