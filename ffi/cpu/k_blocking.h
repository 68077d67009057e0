// How the packed GEMM walks along k: blocks that fit the cache, cut into the pieces of the numbers
// contract.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/gemm_packed.h"

namespace jax_fp8 {

// k is cut into pieces at every tile edge of either operand. A piece is one chain of FMAs; it is
// kept within one block where it fits, and else continues from block to block.
class KBlocking {
 public:
  struct Block {
    int64_t k_begin;
    int first_segment, num_segments;
    int first_run, num_runs;
  };

  KBlocking(const PackedShape& shape, int64_t k, int64_t lhs_tile_k, int64_t rhs_tile_k);

  const std::vector<Block>& blocks() const { return blocks_; }
  const Segment* segments(const Block& block) const { return &segments_[block.first_segment]; }
  const KRun* runs(const Block& block) const { return &runs_[block.first_run]; }
  int max_segments() const { return max_segments_; }
  // Whether some piece is so long that its chain and the scaled sum of earlier pieces live at once.
  bool chains_cross_blocks() const { return chains_cross_blocks_; }

 private:
  void AppendPiece(int64_t begin, int64_t end);
  void AppendSegment(const Segment& segment);

  const int k_per_word_, block_words_;
  std::vector<Block> blocks_;
  std::vector<Segment> segments_;
  std::vector<KRun> runs_;
  int words_in_block_ = 0;
  int max_segments_ = 0;
  bool chains_cross_blocks_ = false;
};

}  // namespace jax_fp8
