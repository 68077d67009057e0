// Where the numbers contract cuts k: at every tile edge of either operand, at every promotion
// interval within a tile, and where a part of a split k ends.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "common/gemm_desc.h"

namespace jax_fp8 {

// One chain of additions that starts from +0.
struct KPiece {
  int64_t begin, end;
  bool starts_part, ends_part;
  bool in_first_part;
};

class KPieces {
 public:
  // Parts of a split k are cut at multiples of this: the k that GPU kernels fetch at a time.
  static constexpr int64_t kPartUnit = 128;

  explicit KPieces(const GemmDesc& desc) : k_(desc.k) {
    const bool scales_inside = desc.machine != nullptr && desc.machine->scales_inside;
    lhs_tile_ = scales_inside ? k_ : desc.lhs.tile_k;
    rhs_tile_ = scales_inside ? k_ : desc.rhs.tile_k;
    const bool is_short = desc.machine != nullptr && !desc.machine->ignores_interval;
    interval_ = is_short && desc.promotion_interval > 0 ? desc.promotion_interval : k_;
    const int64_t units = CeilDiv(CeilDiv(k_, kPartUnit), std::max<int64_t>(desc.split_k, 1));
    part_ = std::max<int64_t>(units, 1) * kPartUnit;
  }

  // The piece that starts at `begin`, which is 0 or the end of another piece: so intervals count
  // from the start of the tile or part.
  KPiece From(int64_t begin) const {
    const int64_t part_end = std::min((begin / part_ + 1) * part_, k_);
    const int64_t end =
        std::min({(begin / lhs_tile_ + 1) * lhs_tile_, (begin / rhs_tile_ + 1) * rhs_tile_,
                  begin + interval_, part_end});
    return {.begin = begin,
            .end = end,
            .starts_part = begin % part_ == 0,
            .ends_part = end == part_end,
            .in_first_part = begin < part_};
  }

 private:
  int64_t k_, lhs_tile_, rhs_tile_, interval_, part_;
};

}  // namespace jax_fp8
