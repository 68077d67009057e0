// The packed GEMM: what its driver (gemm_packed.cc, built for any CPU) and the code of one ISA
// share. Only plain data crosses this line, so that no inline function is compiled with ISA flags
// and then picked by the linker for everyone.
//
// A register tile is kTileRows x kTileCols outputs. Operands are packed to BF16 pairs along k, a
// pair being one 32-bit word with the lower k in its high half: vdpbf16ps adds the product of the
// high halves first, so each output is one chain of FP32 FMAs in ascending k.
#pragma once

#include <cstdint>

#include "common/gemm_desc.h"

namespace jax_fp8 {

inline constexpr int kTileRows = 12;
inline constexpr int kTileCols = 32;
inline constexpr int kTileSize = kTileRows * kTileCols;
inline constexpr int kBlockPairs =
    128;  // k pairs packed at a time: one rhs panel is 16 KB, half L1
// One rhs panel is kBlockPairs rows of kTileCols pairs. kn packing fills two panels at once,
// because one 64-byte load of a rhs row is 64 columns.
inline constexpr int kPanelSize = kBlockPairs * kTileCols;
inline constexpr int kMaxPackedCols = 2 * kTileCols;
// Packed lhs rows are this many pairs apart: no power of two, which would put all rows of a tile
// into the same L1 sets.
inline constexpr int kLhsRowStride = kBlockPairs + 16;

// A stretch of k within one block and one piece (see KBlocking). All offsets count from the block.
struct Segment {
  int k_begin, k_end;
  int first_pair;
  bool starts_piece, ends_piece;  // else the chain comes from, or goes to, a neighbouring block
  bool in_first_piece;
};

// A stretch of k that packs without a gap. Gaps arise where a piece of odd length ends: its last
// pair is filled with zero in both operands.
struct KRun {
  int k_begin, k_end;
  int first_pair;
};

// One operand's rows, at the first row and k of what is to be packed.
struct PackSource {
  const uint8_t* values;
  int64_t leading_stride;
  Format format;
  bool k_contiguous;
  int num_rows;
  const KRun* runs;
  int num_runs;
};

// One register tile times one k block.
struct TileProduct {
  const uint32_t* lhs;  // kLhsRowStride pairs from row to row
  const uint32_t* rhs;  // one panel
  int num_rows;
  const Segment* segments;
  int num_segments;
  // Scales of each segment that ends a piece: one per row, and one per column.
  const float* lhs_scale;  // lhs_scale_stride from segment to segment
  const float* rhs_scale;  // kMaxPackedCols from segment to segment
  int64_t lhs_scale_stride;
  bool scales_vary_along_k;
  float* partial;  // the tile of chains that continue across blocks
  float* acc;      // the tile of scaled sums; may be `partial` if scales do not vary along k
};

// The valid part of a finished tile, to its place in the output.
struct TileStore {
  const float* acc;
  void* out;
  int64_t out_stride;
  OutType type;
  int num_rows, num_cols;
};

struct PackedGemmIsa {
  void (*pack_lhs)(const PackSource& source, uint32_t* packed);
  void (*pack_rhs)(const PackSource& source, uint32_t* packed);  // up to kMaxPackedCols columns
  void (*multiply)(const TileProduct& product);
  void (*store)(const TileStore& store);
};

// Null where the build has no code for the ISA.
extern const PackedGemmIsa* const kPackedGemmAvx512Bf16;

}  // namespace jax_fp8
