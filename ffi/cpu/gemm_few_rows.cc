// The driver for an lhs of few rows, as when a model writes one token after another: the weights
// are read from memory once, in streams that hardware can foresee, and decoded in registers.
//
// Of a kn rhs a few k of all columns of a task are read at a time: each k is one stream. A panel of
// a prepared rhs is one stream, of any number of k. Sums stay in scratch (L1) meanwhile.
#include <algorithm>
#include <atomic>
#include <cstddef>

#include "cpu/gemm_packed.h"
#include "cpu/k_blocking.h"
#include "cpu/operand_ranges.h"
#include "cpu/scratch.h"

namespace jax_fp8 {
namespace {

// Words along k that are read of a kn rhs before the next columns are: streams that hardware
// follows at once.
constexpr int kStreamedWords = 8;
// Of one task: its sums take 16 KB for each row.
constexpr int64_t kMaxTaskCols = 4096;
// No task has fewer multiplications (see gemm_packed.cc) or columns: shorter streams are slower.
constexpr int64_t kMinMultiplications = int64_t{1} << 19;
constexpr int64_t kMinTaskCols = 512;

struct Workspace {
  uint32_t* lhs;     // [block of k][row][word]
  float* rhs_scale;  // [kMaxPackedCols]
  float* lhs_scale;  // [row]
  float* partial;    // [tile][row][column]
  float* acc;        // the same

  bool Reserve(const PackedShape& shape, int64_t num_rows, int64_t num_cols, size_t num_blocks) {
    const size_t lhs_words = num_blocks * num_rows * shape.lhs_row_stride;
    const size_t sums = num_rows * num_cols;
    const size_t words = lhs_words + 2 * kMaxPackedCols + 2 * sums;
    auto* base = static_cast<uint32_t*>(Scratch::OfThisThread().Reserve(words * 4));
    if (base == nullptr) return false;
    lhs = base;
    rhs_scale = reinterpret_cast<float*>(base + lhs_words);
    lhs_scale = rhs_scale + kMaxPackedCols;
    partial = lhs_scale + kMaxPackedCols;
    acc = partial + sums;
    return true;
  }
};

// Some columns of one product, computed by one thread.
class Task {
 public:
  Task(const PackedGemmIsa& isa, const GemmDesc& desc, const KBlocking& k_blocking,
       const GemmBuffers& buffers, Range cols)
      : isa_(isa), desc_(desc), k_blocking_(k_blocking), buffers_(buffers), cols_(cols) {}

  // False if there is no memory.
  bool Run() {
    const auto& blocks = k_blocking_.blocks();
    const int64_t padded_cols = CeilDiv(cols_.size(), kMaxPackedCols) * kMaxPackedCols;
    if (!workspace_.Reserve(shape_, desc_.m, padded_cols, blocks.size())) return false;
    for (size_t i = 0; i < blocks.size(); ++i) {
      isa_.pack_lhs(SourceOf(desc_.lhs, buffers_.lhs, {0, desc_.m}, k_blocking_, blocks[i]),
                    PackedLhs(i));
    }
    const int64_t step = desc_.rhs.in_panels ? kPanelCols : cols_.size();
    for (int64_t col = cols_.begin; col < cols_.end; col += step) {
      const Range cols{col, std::min(col + step, cols_.end)};
      for (size_t i = 0; i < blocks.size(); ++i) MultiplyBlock(i, cols);
      for (int64_t c = cols.begin; c < cols.end; c += shape_.tile_cols) Store(c);
    }
    return true;
  }

 private:
  uint32_t* PackedLhs(size_t block_idx) const {
    return workspace_.lhs + block_idx * desc_.m * shape_.lhs_row_stride;
  }
  int64_t TileStride() const { return desc_.m * shape_.tile_cols; }
  int64_t TileOffset(int64_t col) const {
    return (col - cols_.begin) / shape_.tile_cols * TileStride();
  }

  void MultiplyBlock(size_t block_idx, Range cols) const {
    const KBlocking::Block& block = k_blocking_.blocks()[block_idx];
    const int step =
        (desc_.rhs.in_panels ? shape_.block_words : kStreamedWords) * shape_.k_per_word;
    for (int i = 0; i < block.num_segments; ++i) {
      const Segment& segment = k_blocking_.segments(block)[i];
      for (int k = segment.k_begin; k < segment.k_end; k += step) {
        Multiply(block_idx, segment, k, std::min(k + step, segment.k_end), cols);
      }
      if (segment.ends_piece) Promote(block.k_begin, segment, cols);
    }
  }

  // k in [k_begin, k_end) of a segment; k counts from the block's start.
  void Multiply(size_t block_idx, const Segment& segment, int k_begin, int k_end,
                Range cols) const {
    const int64_t first_k = k_blocking_.blocks()[block_idx].k_begin + k_begin;
    CodesProduct product{.lhs = PackedLhs(block_idx) + segment.first_word +
                                (k_begin - segment.k_begin) / shape_.k_per_word,
                         .codes = nullptr,
                         .leading_stride = buffers_.rhs.leading_stride,
                         .format = desc_.rhs.format,
                         .num_rows = static_cast<int>(desc_.m),
                         .num_cols = kMaxPackedCols,
                         .num_k = k_end - k_begin,
                         .starts_piece = segment.starts_piece && k_begin == segment.k_begin,
                         .sums = nullptr,
                         .tile_stride = TileStride(),
                         .prefetch_distance = desc_.rhs.in_panels
                                                  ? kPanelPrefetchBytes
                                                  : buffers_.rhs.leading_stride * kStreamedWords *
                                                        shape_.k_per_word};
    for (int64_t col = cols.begin; col < cols.end; col += kMaxPackedCols) {
      product.codes = CodeOf(desc_.rhs, buffers_.rhs, col, first_k);
      product.num_cols = static_cast<int>(std::min<int64_t>(kMaxPackedCols, cols.end - col));
      product.sums = workspace_.partial + TileOffset(col);
      isa_.multiply_codes(product);
    }
  }

  // Scales the sums of a piece.
  void Promote(int64_t block_begin, const Segment& segment, Range cols) const {
    const int64_t k = block_begin + segment.k_begin;
    ExpandScales(desc_.lhs, buffers_.lhs, {0, desc_.m}, k, workspace_.lhs_scale);
    Segment end = segment;  // no k are left of it
    end.k_begin = end.k_end;
    end.starts_piece = false;
    for (int64_t col = cols.begin; col < cols.end; col += shape_.tile_cols) {
      ExpandScales(desc_.rhs, buffers_.rhs, {col, std::min(col + shape_.tile_cols, cols.end)}, k,
                   workspace_.rhs_scale);
      const int64_t offset = TileOffset(col);
      isa_.multiply({.lhs = workspace_.lhs,
                     .rhs = workspace_.lhs,
                     .num_rows = static_cast<int>(desc_.m),
                     .segments = &end,
                     .num_segments = 1,
                     .lhs_scale = workspace_.lhs_scale,
                     .rhs_scale = workspace_.rhs_scale,
                     .lhs_scale_stride = 0,
                     .scales_vary_along_k = scales_vary_along_k_,
                     .partial = workspace_.partial + offset,
                     .acc = workspace_.acc + offset,
                     .total = workspace_.acc + offset});
    }
  }

  void Store(int64_t col) const {
    const int64_t element_bytes = desc_.out == OutType::kF32 ? 4 : 2;
    isa_.store(
        {.total = workspace_.acc + TileOffset(col),
         .out = static_cast<char*>(buffers_.out) + col * element_bytes,
         .out_stride = desc_.n,
         .type = desc_.out,
         .num_rows = static_cast<int>(desc_.m),
         .num_cols = static_cast<int>(std::min<int64_t>(shape_.tile_cols, cols_.end - col))});
  }

  const PackedGemmIsa& isa_;
  const PackedShape shape_ = isa_.shape;
  const GemmDesc& desc_;
  const KBlocking& k_blocking_;
  const GemmBuffers& buffers_;
  const Range cols_;
  const bool scales_vary_along_k_ = desc_.lhs.tile_k < desc_.k || desc_.rhs.tile_k < desc_.k;
  Workspace workspace_;
};

}  // namespace

bool TakesFewRows(const PackedGemmIsa& isa, const GemmDesc& desc) {
  return isa.multiply_codes != nullptr && desc.m <= isa.shape.few_rows && !desc.rhs.k_contiguous;
}

bool RunFewRows(const PackedGemmIsa& isa, const GemmDesc& desc, std::span<const GemmBuffers> batch,
                const ParallelFor& parallel_for) {
  const KBlocking k_blocking(isa.shape, desc);
  const double multiplications = static_cast<double>(desc.m) * desc.n * desc.k;
  const auto batch_size = static_cast<int64_t>(batch.size());
  const int64_t useful =
      std::min(static_cast<int64_t>(multiplications / kMinMultiplications), desc.n / kMinTaskCols);
  const int64_t wanted = CeilDiv(parallel_for.num_threads, batch_size);
  const int64_t num_parts =
      std::max({int64_t{1}, CeilDiv(desc.n, kMaxTaskCols), std::min(useful, wanted)});
  // Small products are put together, see gemm_packed.cc.
  const int64_t parts_per_task =
      std::max<int64_t>(1, static_cast<int64_t>(kMinMultiplications / multiplications));
  const int64_t num_all = batch_size * num_parts;
  std::atomic<bool> has_memory = true;
  parallel_for(CeilDiv(num_all, parts_per_task), [&](int64_t task) {
    const int64_t end = std::min((task + 1) * parts_per_task, num_all);
    for (int64_t i = task * parts_per_task; i < end; ++i) {
      const Range cols = Part(desc.n, num_parts, kMaxPackedCols, i % num_parts);
      Task part(isa, desc, k_blocking, batch[i / num_parts], cols);
      if (!part.Run()) has_memory = false;
    }
  });
  return has_memory;
}

}  // namespace jax_fp8
