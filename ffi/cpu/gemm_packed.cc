// The driver of the packed GEMM: cuts the outputs into tasks, and walks each task block by block
// along k, panel by panel along n and tile by tile along m.
//
// In a task, one k block of all its lhs rows is packed (it stays in L2), then one rhs panel at a
// time (L1), which all row tiles use at once. Tiles stay in contiguous scratch until their last
// block: written straight to the output, a tile's rows could all fall into the same L1 set.
#include "cpu/gemm_packed.h"

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "cpu/k_blocking.h"
#include "cpu/kernels.h"
#include "cpu/operand_ranges.h"
#include "cpu/scratch.h"

namespace jax_fp8 {
namespace {

// Bounds on one task's part of a product. They bound its scratch too (about 2 MB; 3 MB if chains
// cross blocks), and make packing, which every task does for itself, about 2 % of its work.
constexpr int64_t kMaxTaskRows = 512, kMaxTaskElements = 512 * 512;
// A task of few rows takes more columns: longer streams of a kn rhs, whose k lie n bytes apart.
constexpr int64_t kMaxTaskCols = 4096;
// Up to so many rows, where memory is the bottleneck, a kn rhs is read a few k at a time, of all
// columns of a task: each k is one stream that hardware can foresee.
constexpr int64_t kMaxStreamedRows = 64;
constexpr int kStreamedK = 32;
// Other layouts of a rhs are read along k, as many blocks at a time as of a packed lhs fit here.
constexpr int64_t kMaxPackedLhsBytes = 512 << 10;
// No product is cut, and small products are put together, so that a task has fewer multiplications
// than this (about 10 us of work): waking a thread takes as long.
constexpr int64_t kMinMultiplications = int64_t{1} << 20;
// More tasks than threads, so that a thread which starts late or is disturbed can do fewer.
constexpr int64_t kTasksPerThread = 4;

constexpr size_t kAlignment = 64;

// How a batch of products is cut into tasks: each product into a grid of parts, or whole products
// put together.
struct TaskGrid {
  int64_t num_row_parts, num_col_parts;
  int64_t parts_per_task = 1;
  int64_t num_parts;  // of the whole batch

  TaskGrid(const GemmDesc& desc, int64_t batch_size, int64_t num_threads, int tile_rows)
      : num_row_parts(CeilDiv(desc.m, kMaxTaskRows)),
        num_col_parts(CeilDiv(
            desc.n, std::min(kMaxTaskElements / CeilDiv(desc.m, num_row_parts), kMaxTaskCols))) {
    const double multiplications = static_cast<double>(desc.m) * desc.n * desc.k;
    const int64_t max_useful_parts = static_cast<int64_t>(multiplications / kMinMultiplications);
    const int64_t wanted_parts =
        num_threads == 1
            ? 1
            : std::min(CeilDiv(kTasksPerThread * num_threads, batch_size), max_useful_parts);
    while (num_row_parts * num_col_parts < wanted_parts) {
      const int64_t rows = CeilDiv(desc.m, num_row_parts), cols = CeilDiv(desc.n, num_col_parts);
      if (cols >= rows && cols > kMaxPackedCols) {
        ++num_col_parts;
      } else if (rows > tile_rows) {
        ++num_row_parts;
      } else {
        break;
      }
    }
    num_parts = batch_size * num_row_parts * num_col_parts;
    if (max_useful_parts == 0) {
      parts_per_task = static_cast<int64_t>(kMinMultiplications / multiplications);
    }
  }
  int64_t num_tasks() const { return CeilDiv(num_parts, parts_per_task); }
};

// One thread's memory for one task.
struct Workspace {
  uint32_t* lhs;     // [row][word], PackedShape::lhs_row_stride apart
  uint32_t* rhs;     // [panel][word][column], the panels of kMaxPackedCols columns
  float* lhs_scale;  // [segment][row]
  float* rhs_scale;  // [segment][kMaxPackedCols]
  float* acc;        // [panel][row tile][row][column]
  float* partial;    // the same, where chains cross blocks
  float* total;      // the same, where k is split into parts

  // Sets the pointers into the thread's scratch. False if there is no memory.
  bool Reserve(const PackedShape& shape, int64_t num_rows, int64_t num_tiles, int max_segments,
               bool separate_partial, bool separate_total) {
    const int64_t tile_size = shape.tile_rows * shape.tile_cols;
    size_t size_bytes = 0;
    auto place = [&size_bytes](int64_t words) {
      const size_t offset = size_bytes;
      size_bytes += (words * 4 + kAlignment - 1) / kAlignment * kAlignment;
      return offset;
    };
    const size_t lhs_offset = place(num_rows * shape.lhs_row_stride);
    const size_t rhs_offset =
        place(int64_t{kMaxPackedCols} / shape.tile_cols * shape.rhs_panel_words);
    const size_t lhs_scale_offset = place(num_rows * max_segments);
    const size_t rhs_scale_offset = place(int64_t{kMaxPackedCols} * max_segments);
    const size_t acc_offset = place(num_tiles * tile_size);
    const size_t partial_offset =
        separate_partial ? place(num_tiles * tile_size * std::max(shape.chain_floats, 1))
                         : acc_offset;
    const size_t total_offset = separate_total ? place(num_tiles * tile_size) : acc_offset;
    char* base = static_cast<char*>(Scratch::OfThisThread().Reserve(size_bytes));
    if (base == nullptr) return false;
    lhs = reinterpret_cast<uint32_t*>(base + lhs_offset);
    rhs = reinterpret_cast<uint32_t*>(base + rhs_offset);
    lhs_scale = reinterpret_cast<float*>(base + lhs_scale_offset);
    rhs_scale = reinterpret_cast<float*>(base + rhs_scale_offset);
    acc = reinterpret_cast<float*>(base + acc_offset);
    partial = reinterpret_cast<float*>(base + partial_offset);
    total = reinterpret_cast<float*>(base + total_offset);
    return true;
  }
};

bool IsStreamed(const PackedGemmIsa& isa, const GemmDesc& desc) {
  return isa.shape.follows_memory && desc.m <= kMaxStreamedRows && !desc.rhs.k_contiguous &&
         !desc.rhs.in_panels;
}

// One part of one product, computed by one thread.
class Task {
 public:
  Task(const PackedGemmIsa& isa, const GemmDesc& desc, const KBlocking& k_blocking,
       const GemmBuffers& buffers, Range rows, Range cols)
      : isa_(isa),
        desc_(desc),
        k_blocking_(k_blocking),
        buffers_(buffers),
        rows_(rows),
        cols_(cols),
        num_row_tiles_(CeilDiv(rows.size(), shape_.tile_rows)) {}

  // False if there is no memory.
  bool Run() {
    const int64_t num_blocks = k_blocking_.blocks().size();
    const int64_t kept_cols = num_slots_ == num_blocks ? StepCols() : cols_.size();
    const int64_t num_tiles =
        NeedsAllTiles() ? CeilDiv(kept_cols, shape_.tile_cols) * num_row_tiles_ : 1;
    if (!workspace_.Reserve(shape_, num_slots_ * rows_.size(), num_tiles,
                            k_blocking_.max_segments(), k_blocking_.needs_partial_tiles(),
                            desc_.split_k > 1)) {
      return false;
    }
    if (isa_.start != nullptr) isa_.start();
    for (int64_t first = 0; first < num_blocks; first += num_slots_) {
      const int64_t end = std::min(first + num_slots_, num_blocks);
      for (int64_t i = first; i < end; ++i) PackLhs(i);
      for (int64_t col = cols_.begin; col < cols_.end; col += StepCols()) {
        const Range cols{col, std::min(col + StepCols(), cols_.end)};
        const int64_t first_kept = num_slots_ == num_blocks ? col : cols_.begin;
        for (int64_t i = first; i < end; ++i) MultiplyCols(i, cols, first_kept);
      }
    }
    if (isa_.finish != nullptr) isa_.finish();
    return true;
  }

 private:
  // With a single block each tile is finished, and stored, before the next one starts.
  bool NeedsAllTiles() const { return k_blocking_.blocks().size() > 1; }

  int64_t NumSlots() const {
    const int64_t num_blocks = k_blocking_.blocks().size();
    if (!shape_.follows_memory) return 1;
    if (!desc_.rhs.k_contiguous && !desc_.rhs.in_panels) return 1;
    const int64_t block_bytes = rows_.size() * shape_.lhs_row_stride * 4;
    return std::clamp<int64_t>(kMaxPackedLhsBytes / block_bytes, 1, num_blocks);
  }

  // Columns packed at a time: one panel, or those that a cache line of a kn rhs gives at once.
  int64_t StepCols() const { return desc_.rhs.k_contiguous ? shape_.tile_cols : kMaxPackedCols; }

  uint32_t* LhsOf(int64_t block_idx) const {
    return workspace_.lhs + block_idx % num_slots_ * rows_.size() * shape_.lhs_row_stride;
  }
  float* LhsScaleOf(int64_t block_idx) const {
    return workspace_.lhs_scale +
           block_idx % num_slots_ * rows_.size() * k_blocking_.max_segments();
  }

  void PackLhs(int64_t block_idx) const {
    const KBlocking::Block& block = k_blocking_.blocks()[block_idx];
    isa_.pack_lhs(SourceOf(desc_.lhs, buffers_.lhs, rows_, k_blocking_, block), LhsOf(block_idx));
    ExpandBlockScales(desc_.lhs, buffers_.lhs, rows_, block, rows_.size(), LhsScaleOf(block_idx));
  }

  // All rows times the columns `packed`, in one block of k; tiles are kept from `first_col` on.
  void MultiplyCols(int64_t block_idx, Range packed, int64_t first_col) const {
    const KBlocking::Block& block = k_blocking_.blocks()[block_idx];
    isa_.pack_rhs(SourceOf(desc_.rhs, buffers_.rhs, packed, k_blocking_, block, PrefetchDistance()),
                  workspace_.rhs);
    ExpandBlockScales(desc_.rhs, buffers_.rhs, packed, block, kMaxPackedCols, workspace_.rhs_scale);
    for (int64_t col = packed.begin; col < packed.end; col += shape_.tile_cols) {
      MultiplyPanel(block_idx, {col, std::min(col + shape_.tile_cols, packed.end)},
                    (col - packed.begin) / shape_.tile_cols, (col - first_col) / shape_.tile_cols);
    }
  }

  // Of a rhs that is not k-contiguous, see PackSource.
  int64_t PrefetchDistance() const {
    constexpr int64_t kRowsAhead = 16;
    if (desc_.rhs.in_panels) return kPanelPrefetchBytes;
    return is_streamed_ ? kMaxPackedCols : kRowsAhead * buffers_.rhs.leading_stride;
  }

  void ExpandBlockScales(const OperandDesc& desc, const OperandBuffer& buffer, Range rows,
                         const KBlocking::Block& block, int64_t segment_stride,
                         float* expanded) const {
    for (int i = 0; i < block.num_segments; ++i) {
      const Segment& segment = k_blocking_.segments(block)[i];
      if (!segment.ends_piece && !scales_inside_) continue;
      ExpandScales(desc, buffer, rows, block.k_begin + segment.k_begin,
                   expanded + i * segment_stride);
    }
  }

  // All row tiles times columns `cols`: panel `packed_panel` of the packed ones, and `panel` of the
  // tiles that are kept.
  void MultiplyPanel(int64_t block_idx, Range cols, int64_t packed_panel, int64_t panel) const {
    const KBlocking::Block& block = k_blocking_.blocks()[block_idx];
    const bool is_last_block = &block == &k_blocking_.blocks().back();
    for (int64_t tile = 0; tile < num_row_tiles_; ++tile) {
      // Tiles of about equal height: a last tile of one row would cost nearly a full one.
      const Range rows = Part(rows_.size(), num_row_tiles_, 1, tile);
      const int64_t tile_offset =
          NeedsAllTiles() ? (panel * num_row_tiles_ + tile) * shape_.tile_rows * shape_.tile_cols
                          : 0;
      const TileProduct product{
          .lhs = LhsOf(block_idx) + rows.begin * shape_.lhs_row_stride,
          .rhs = workspace_.rhs + packed_panel * shape_.rhs_panel_words,
          .num_rows = static_cast<int>(rows.size()),
          .segments = k_blocking_.segments(block),
          .num_segments = block.num_segments,
          .lhs_scale = LhsScaleOf(block_idx) + rows.begin,
          .rhs_scale = workspace_.rhs_scale + packed_panel * shape_.tile_cols,
          .lhs_scale_stride = rows_.size(),
          .scales_vary_along_k = scales_vary_along_k_,
          .partial = workspace_.partial + tile_offset * std::max(shape_.chain_floats, 1),
          .acc = workspace_.acc + tile_offset,
          .total = workspace_.total + tile_offset};
      const Range out_rows{rows_.begin + rows.begin, rows_.begin + rows.end};
      if (is_last_block) PrefetchOutput(out_rows, cols);
      isa_.multiply(product);
      if (is_last_block) StoreTile(product.total, out_rows, cols);
    }
  }

  // Fetches the output's cache lines while the tile is computed: a store to a line that is not
  // there waits for it, and the rows of a tile are too far apart for the hardware to foresee them.
  void PrefetchOutput(Range rows, Range cols) const {
    constexpr int64_t kCacheLineBytes = 64;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const char* begin = OutputElement(row, cols.begin);
      for (int64_t byte = 0; byte < cols.size() * element_bytes_; byte += kCacheLineBytes) {
        __builtin_prefetch(begin + byte, /*rw=*/1);
      }
    }
  }

  void StoreTile(const float* total, Range rows, Range cols) const {
    isa_.store({.total = total,
                .out = OutputElement(rows.begin, cols.begin),
                .out_stride = desc_.n,
                .type = desc_.out,
                .num_rows = static_cast<int>(rows.size()),
                .num_cols = static_cast<int>(cols.size())});
  }

  char* OutputElement(int64_t row, int64_t col) const {
    return static_cast<char*>(buffers_.out) + (row * desc_.n + col) * element_bytes_;
  }

  const PackedGemmIsa& isa_;
  const PackedShape shape_ = isa_.shape;
  const GemmDesc& desc_;
  const KBlocking& k_blocking_;
  const GemmBuffers& buffers_;
  const Range rows_, cols_;
  const int64_t num_row_tiles_;
  const int64_t num_slots_ = NumSlots();  // blocks of a packed lhs that are there at once
  const bool is_streamed_ = IsStreamed(isa_, desc_);
  const bool scales_inside_ = desc_.machine != nullptr && desc_.machine->scales_inside;
  const bool scales_vary_along_k_ = desc_.lhs.tile_k < desc_.k || desc_.rhs.tile_k < desc_.k;
  const int64_t element_bytes_ = desc_.out == OutType::kF32 ? 4 : 2;
  Workspace workspace_;
};

}  // namespace

bool RunPackedGemm(const PackedGemmIsa& isa, const GemmDesc& desc,
                   std::span<const GemmBuffers> batch, const ParallelFor& parallel_for) {
  if (TakesFewRows(isa, desc)) return RunFewRows(isa, desc, batch, parallel_for);
  const int tile_rows = isa.shape.tile_rows;
  PackedShape shape = isa.shape;
  if (IsStreamed(isa, desc)) shape.block_words = kStreamedK / shape.k_per_word;
  const KBlocking k_blocking(shape, desc);
  const TaskGrid grid(desc, static_cast<int64_t>(batch.size()), parallel_for.num_threads,
                      tile_rows);
  std::atomic<bool> has_memory = true;
  auto run_part = [&](int64_t part) {
    const Range rows =
        Part(desc.m, grid.num_row_parts, tile_rows, part / grid.num_col_parts % grid.num_row_parts);
    const Range cols = Part(desc.n, grid.num_col_parts, kMaxPackedCols, part % grid.num_col_parts);
    const GemmBuffers& buffers = batch[part / (grid.num_row_parts * grid.num_col_parts)];
    Task task(isa, desc, k_blocking, buffers, rows, cols);
    if (!task.Run()) has_memory = false;
  };
  parallel_for(grid.num_tasks(), [&](int64_t task) {
    const int64_t begin = task * grid.parts_per_task;
    const int64_t end = std::min(begin + grid.parts_per_task, grid.num_parts);
    for (int64_t part = begin; part < end; ++part) run_part(part);
  });
  return has_memory;
}

}  // namespace jax_fp8
