// How the packed GEMM walks along k: blocks that fit the cache, cut into the pieces of the numbers
// contract.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/gemm_packed.h"
#include "cpu/k_pieces.h"

namespace jax_fp8 {

// A piece is one chain of additions; it is kept within one block where it fits, and else continues
// from block to block.
class KBlocking {
 public:
  struct Block {
    int64_t k_begin;
    int first_segment, num_segments;
    int first_run, num_runs;
  };

  KBlocking(const PackedShape& shape, const GemmDesc& desc);
  KBlocking(const KBlocking&) = delete;
  KBlocking& operator=(const KBlocking&) = delete;

  const std::vector<Block>& blocks() const { return lists_.blocks; }
  const Segment* segments(const Block& block) const {
    return &lists_.segments[block.first_segment];
  }
  const KRun* runs(const Block& block) const { return &lists_.runs[block.first_run]; }
  int max_segments() const { return max_segments_; }
  // Whether the chain of a piece and the sum of earlier pieces live in memory at once.
  bool needs_partial_tiles() const {
    return chain_floats_ > 1 || (num_pieces_ > 1 && (chains_cross_blocks_ || chain_floats_ == 1));
  }

 private:
  // NOTE: every call would otherwise allocate three of them. So a thread has one KBlocking at a
  // time.
  struct Lists {
    std::vector<Block> blocks;
    std::vector<Segment> segments;
    std::vector<KRun> runs;

    static Lists& OfThisThread();
  };

  void AppendPiece(const KPiece& piece);
  void AppendSegment(const Segment& segment);

  const int k_per_word_, block_words_, step_words_;
  const int chain_floats_;
  const int64_t k_;
  int num_pieces_ = 0;
  Lists& lists_;
  int words_in_block_ = 0;
  int max_segments_ = 0;
  bool chains_cross_blocks_ = false;
};

}  // namespace jax_fp8
