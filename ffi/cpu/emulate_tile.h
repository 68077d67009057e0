// One register tile of the emulation: advances the chains by a block, and adds up what they leave
// when a piece of k ends. Included only by emulate_<isa>.cc; everything here is local to that file.
#pragma once

#include <cstdint>
#include <string_view>

#include "cpu/emulate_aligned.h"
#include "cpu/emulate_chain.h"
#include "cpu/emulate_grouped.h"
#include "cpu/emulate_pack.h"
#include "cpu/emulate_wide.h"
#include "cpu/gemm_packed.h"

namespace jax_fp8 {
namespace {

constexpr int kEmulateTileRows = 6;

template <class Arithmetic>
constexpr PackedShape EmulateShape() {
  return {.tile_rows = kEmulateTileRows,
          .tile_cols = Arithmetic::kCols,
          .k_per_word = Arithmetic::kKPerWord,
          .block_words = Arithmetic::kBlockWords,
          .lhs_row_stride = sizeof(typename Arithmetic::Lhs) / sizeof(uint32_t),
          .rhs_panel_words = sizeof(typename Arithmetic::Rhs) / sizeof(uint32_t),
          .chain_floats = Arithmetic::kChainFloats};
}

// All rows of the tile, as many at a time as registers hold.
template <class Arithmetic>
void Advance(const TileProduct& product, int s) {
  [[maybe_unused]] const typename Arithmetic::Isa::template Rounds<Arithmetic::kRoundsDown> mode;
  const auto* lhs = reinterpret_cast<const typename Arithmetic::Lhs*>(product.lhs);
  const auto& rhs = *reinterpret_cast<const typename Arithmetic::Rhs*>(product.rhs);
  StepOperands operands{.segment = product.segments[s],
                        .lhs_scale = product.lhs_scale + s * product.lhs_scale_stride,
                        .rhs_scale = product.rhs_scale + s * kMaxPackedCols,
                        .chain = product.partial};
  constexpr int kRows = Arithmetic::kRows;
  int row = 0;
  auto advance = [&]<int kNumRows>() {
    Arithmetic::template Step<kNumRows>(lhs + row, rhs, operands);
    row += kNumRows;
    operands.lhs_scale += kNumRows;
    operands.chain += kNumRows * Arithmetic::kCols * Arithmetic::kChainFloats;
  };
  while (product.num_rows - row >= kRows) advance.template operator()<kRows>();
  if constexpr (kRows > 2) {
    if (product.num_rows - row == 2) advance.template operator()<2>();
  }
  if constexpr (kRows > 1) {
    while (row < product.num_rows) advance.template operator()<1>();
  }
}

// What the numbers contract does with the chains of a finished piece.
template <class Arithmetic>
void FinishPiece(const TileProduct& product, int s) {
  using Isa = typename Arithmetic::Isa;
  using Vec = typename Isa::Vec;
  const Segment& segment = product.segments[s];
  const bool scales_vary = product.scales_vary_along_k && !Arithmetic::kScalesInside;
  const bool scales_at_the_end = segment.ends_k && !scales_vary && !Arithmetic::kScalesInside;
  const float* lhs_scale = product.lhs_scale + s * product.lhs_scale_stride;
  const float* rhs_scale = product.rhs_scale + s * kMaxPackedCols;
  for (int row = 0; row < product.num_rows; ++row) {
    for (int col = 0; col < Arithmetic::kCols; col += Isa::kLanes) {
      const int at = row * Arithmetic::kCols + col;
      const Vec scale = Isa::Mul(Isa::Broadcast(lhs_scale[row]), Isa::Load(rhs_scale + col));
      const Vec partial =
          Isa::Load(product.partial + row * Arithmetic::kCols * Arithmetic::kChainFloats + col);
      Vec sum = segment.in_first_piece ? Isa::Zero() : Isa::Load(product.acc + at);
      sum = scales_vary ? Isa::AddScaledNonZero(partial, scale, sum) : Isa::Add(sum, partial);
      if (!segment.ends_part) {
        Isa::Store(product.acc + at, sum);
        continue;
      }
      if (!segment.in_first_part) sum = Isa::Add(Isa::Load(product.total + at), sum);
      if (scales_at_the_end) sum = Isa::ScaleNonZero(sum, scale);
      if (segment.ends_k) sum = Isa::ReplaceNan(sum, Isa::Broadcast(kMachineNan));
      Isa::Store(product.total + at, sum);
    }
  }
}

template <class Arithmetic>
void EmulateTile(const TileProduct& product) {
  for (int s = 0; s < product.num_segments; ++s) {
    Advance<Arithmetic>(product, s);
    if (product.segments[s].ends_piece) FinishPiece<Arithmetic>(product, s);
  }
}

// The ISA trait with the shape that microkernel.h's Store asks for.
template <class Arithmetic>
struct EmulatedTile : Arithmetic::Isa {
  static constexpr PackedShape kShape = EmulateShape<Arithmetic>();
};

template <class Arithmetic>
constexpr PackedGemmIsa kEmulation = {EmulateShape<Arithmetic>(), EmulatePackLhs<Arithmetic>,
                                      EmulatePackRhs<Arithmetic>, EmulateTile<Arithmetic>,
                                      Store<EmulatedTile<Arithmetic>>};

// The code for `machine`, or null where there is none.
template <class Isa>
const PackedGemmIsa* EmulationOf(const Machine& machine) {
  using enum Rounding;
  struct Row {
    const char* name;
    const PackedGemmIsa* code;
  };
  static constexpr Row kRows[] = {
      {"hopper_wgmma", &kEmulation<Aligned<Isa, float, 32, 13, kRzE8M13>>},
      {"hopper_wgmma_f16", &kEmulation<Aligned<Isa, float, 32, 13, kRneFp16>>},
      {"hopper_mma", &kEmulation<Aligned<Isa, double, 16, 25, kRzFp32, -133, true>>},
      {"ada_mma", &kEmulation<Aligned<Isa, float, 16, 13, kRzE8M13>>},
      {"ada_mma_f16", &kEmulation<Aligned<Isa, float, 16, 13, kRneFp16>>},
      {"blackwell_tcgen05", &kEmulation<Aligned<Isa, double, 32, 25, kRzFp32>>},
      {"blackwell_tcgen05_f16", &kEmulation<Aligned<Isa, double, 32, 25, kRneFp16>>},
      {"blackwell_tcgen05_blockscale",
       &kEmulation<Aligned<Isa, double, 32, 25, kRzFp32, -133, false, true>>},
      {"cdna3_mfma", &kEmulation<Grouped<Isa>>},
      {"fp32", &kEmulation<Chain<Isa, Summation::kSequential, kRneFp32>>},
      {"fp16", &kEmulation<Chain<Isa, Summation::kSequential, kRneFp16>>},
      {"fp16_chunked", &kEmulation<Chain<Isa, Summation::kChunked, kRneFp16>>},
      {"bf16_chunked", &kEmulation<Chain<Isa, Summation::kChunked, kRneBf16>>},
      {"fp32_pairwise", &kEmulation<Pairwise<Isa>>},
      {"exact", &kEmulation<Exact<Isa>>},
  };
  for (const Row& row : kRows) {
    if (std::string_view(row.name) == machine.name) return row.code;
  }
  return nullptr;
}

}  // namespace
}  // namespace jax_fp8
