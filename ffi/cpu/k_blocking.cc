#include "cpu/k_blocking.h"

#include <algorithm>

#include "common/ceil_div.h"

namespace jax_fp8 {

KBlocking::Lists& KBlocking::Lists::OfThisThread() {
  thread_local Lists lists;
  return lists;
}

KBlocking::KBlocking(const PackedShape& shape, const GemmDesc& desc)
    : k_per_word_(shape.k_per_word),
      block_words_(shape.block_words),
      step_words_(shape.step_words),
      chain_floats_(shape.chain_floats),
      k_(desc.k),
      lists_(Lists::OfThisThread()) {
  lists_.blocks.clear();
  lists_.segments.clear();
  lists_.runs.clear();
  const KPieces pieces(desc);
  for (int64_t k = 0; k < k_;) {
    const KPiece piece = pieces.From(k);
    AppendPiece(piece);
    ++num_pieces_;
    k = piece.end;
  }
}

void KBlocking::AppendPiece(const KPiece& piece) {
  const int64_t begin = piece.begin, end = piece.end;
  const int64_t num_words = CeilDiv(end - begin, k_per_word_);
  const bool fits = num_words <= block_words_ - words_in_block_;
  const bool fits_an_empty_block = num_words <= block_words_;
  chains_cross_blocks_ |= !fits_an_empty_block;
  const bool no_step_fits = block_words_ - words_in_block_ < step_words_;
  bool starts_block = lists_.blocks.empty() || (!fits && (no_step_fits || fits_an_empty_block));
  for (int64_t k = begin; k < end;) {
    if (starts_block) {
      lists_.blocks.push_back({k, static_cast<int>(lists_.segments.size()), 0,
                               static_cast<int>(lists_.runs.size()), 0});
      words_in_block_ = 0;
    }
    // A step is never cut by the end of a block.
    const int64_t room = (block_words_ - words_in_block_) / step_words_ * step_words_;
    const int64_t words = CeilDiv(end - k, k_per_word_);
    const bool ends = words <= block_words_ - words_in_block_;
    const int64_t segment_end = ends ? end : k + k_per_word_ * room;
    const int64_t block_begin = lists_.blocks.back().k_begin;
    AppendSegment({.k_begin = static_cast<int>(k - block_begin),
                   .k_end = static_cast<int>(segment_end - block_begin),
                   .first_word = words_in_block_,
                   .starts_piece = k == begin,
                   .ends_piece = segment_end == end,
                   .in_first_piece = piece.starts_part,
                   .ends_part = piece.ends_part && segment_end == end,
                   .in_first_part = piece.in_first_part,
                   .ends_k = segment_end == k_,
                   .words_before = static_cast<int>((k - begin) / k_per_word_)});
    k = segment_end;
    starts_block = true;
  }
}

void KBlocking::AppendSegment(const Segment& segment) {
  Block& block = lists_.blocks.back();
  lists_.segments.push_back(segment);
  max_segments_ = std::max(max_segments_, ++block.num_segments);

  const bool continues_run =
      block.num_runs > 0 && (segment.k_begin - lists_.runs.back().k_begin) % k_per_word_ == 0;
  if (continues_run) {
    lists_.runs.back().k_end = segment.k_end;
  } else {
    lists_.runs.push_back({segment.k_begin, segment.k_end, segment.first_word});
    ++block.num_runs;
  }
  words_in_block_ += static_cast<int>(CeilDiv(segment.k_end - segment.k_begin, k_per_word_));
}

}  // namespace jax_fp8
