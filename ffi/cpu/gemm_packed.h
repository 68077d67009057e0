// The packed GEMM: what its driver (gemm_packed.cc, built for any CPU) and the code of one ISA
// share. Only plain data crosses this line, so that no inline function is compiled with ISA flags
// and then picked by the linker for everyone.
//
// A register tile is PackedShape::tile_rows x tile_cols outputs. Operands are packed along k into
// 32-bit words. A word is one FP32 value, or a BF16 pair with the lower k in its high half:
// vdpbf16ps adds the product of the high halves first. Either way each output is one chain of FP32
// FMAs in ascending k.
#pragma once

#include <cstdint>
#include <span>

#include "common/gemm_desc.h"
#include "common/parallel.h"

namespace jax_fp8 {

// Columns of a kn rhs that are packed at once: a cache line of codes, and a panel of a prepared
// rhs.
inline constexpr int kMaxPackedCols = kPanelCols;

// How one ISA packs. A packed lhs is rows of words; a packed rhs is panels of tile_cols columns,
// each panel block_words rows of tile_cols words (the emulation packs otherwise, see its files).
struct PackedShape {
  int tile_rows, tile_cols;  // tile_cols divides kMaxPackedCols
  int k_per_word;
  int block_words;  // words along k packed at a time: a rhs panel of them takes half of L1
  // Words from row to row of a packed lhs: no power of two, which would put all rows of a tile into
  // the same L1 sets.
  int lhs_row_stride;
  int rhs_panel_words;
  // Whether few rows of lhs are bound by memory, so that the driver reads a rhs in its order.
  bool follows_memory = false;
  int step_words = 1;  // words that are added up at once, from the start of a piece on
  int few_rows = 0;    // rows up to which multiply_codes takes an lhs; 0: there is none
  // Floats that a chain takes in TileProduct::partial while it grows; 0 if it grows in registers.
  int chain_floats = 0;
};

// A stretch of k within one block and one piece (see KBlocking). All offsets count from the block.
struct Segment {
  int k_begin, k_end;
  int first_word;
  bool starts_piece, ends_piece;  // else the chain comes from, or goes to, a neighbouring block
  // Of a split k: parts are added up apart from each other.
  bool in_first_piece;  // of its part
  bool ends_part, in_first_part;
  bool ends_k;
  int words_before;  // of its piece
};

// A stretch of k that packs without a gap. Gaps arise where a piece ends within a word: its other
// half is filled with zero in both operands.
struct KRun {
  int k_begin, k_end;
  int first_word;
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
  // Of a rhs that is not k-contiguous: bytes from a code to the one to fetch meanwhile.
  int64_t prefetch_distance = 0;
};

// One register tile times one k block.
struct TileProduct {
  const uint32_t* lhs;  // at the first row
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
  float* acc;      // the tile of scaled sums of a part; may be `partial` if there is one piece
  float* total;    // the tile of sums of parts; may be `acc` if there is one part
};

// Up to few_rows rows times a stretch of k, of at most kMaxPackedCols columns of a rhs that is not
// k-contiguous.
struct CodesProduct {
  const uint32_t* lhs;   // packed, at the first k
  const uint8_t* codes;  // of the rhs, at the first k and column
  int64_t leading_stride;
  Format format;
  int num_rows, num_cols, num_k;
  bool starts_piece;
  float* sums;  // tiles of [num_rows][tile_cols], tile_stride apart
  int64_t tile_stride;
  int64_t prefetch_distance;  // bytes from a code to the one to fetch meanwhile
};

// The valid part of a finished tile, to its place in the output.
struct TileStore {
  const float* total;
  void* out;
  int64_t out_stride;
  OutType type;
  int num_rows, num_cols;
};

struct PackedGemmIsa {
  PackedShape shape;
  void (*pack_lhs)(const PackSource& source, uint32_t* packed);
  void (*pack_rhs)(const PackSource& source, uint32_t* packed);  // up to kMaxPackedCols columns
  void (*multiply)(const TileProduct& product);
  void (*store)(const TileStore& store);
  void (*multiply_codes)(const CodesProduct& product) = nullptr;
  // Around the work of one task, where the ISA has registers to set up.
  void (*start)() = nullptr;
  void (*finish)() = nullptr;
};

// The driver for an lhs of few rows, and whether it takes the request.
bool TakesFewRows(const PackedGemmIsa& isa, const GemmDesc& desc);
bool RunFewRows(const PackedGemmIsa& isa, const GemmDesc& desc, std::span<const GemmBuffers> batch,
                const ParallelFor& parallel_for);

// Null where the build has no code for the ISA.
const PackedGemmIsa* PackedGemmAmx();
const PackedGemmIsa* PackedGemmAvx512Bf16();
const PackedGemmIsa* PackedGemmAvx512Vbmi();
const PackedGemmIsa* PackedGemmAvx512();
const PackedGemmIsa* PackedGemmAvx2();

}  // namespace jax_fp8
