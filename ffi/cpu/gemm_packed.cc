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
#include "cpu/scratch.h"

namespace jax_fp8 {
namespace {

// Bounds on one task's part of a product. They bound its scratch too (about 2 MB; 3 MB if chains
// cross blocks), and make packing, which every task does for itself, about 2 % of its work.
constexpr int64_t kMaxTaskRows = 512, kMaxTaskCols = 512;
// No product is cut, and small products are put together, so that a task has fewer multiplications
// than this (about 10 us of work): waking a thread takes as long.
constexpr int64_t kMinMultiplications = int64_t{1} << 20;
// More tasks than threads, so that a thread which starts late or is disturbed can do fewer.
constexpr int64_t kTasksPerThread = 4;

constexpr size_t kAlignment = 64;

int64_t CeilDiv(int64_t size, int64_t part) { return (size + part - 1) / part; }

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Part `part` of [0, size) cut into `num_parts` about equal parts, at multiples of `unit`.
Range Part(int64_t size, int64_t num_parts, int64_t unit, int64_t part) {
  const int64_t num_units = CeilDiv(size, unit);
  return {std::min(size, num_units * part / num_parts * unit),
          std::min(size, num_units * (part + 1) / num_parts * unit)};
}

// How a batch of products is cut into tasks: each product into a grid of parts, or whole products
// put together.
struct TaskGrid {
  int64_t num_row_parts, num_col_parts;
  int64_t parts_per_task = 1;
  int64_t num_parts;  // of the whole batch

  TaskGrid(const GemmDesc& desc, int64_t batch_size, int64_t num_threads, int tile_rows)
      : num_row_parts(CeilDiv(desc.m, kMaxTaskRows)), num_col_parts(CeilDiv(desc.n, kMaxTaskCols)) {
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

// The scale of each row of `rows` at `k`, one per row however many rows share it.
void ExpandScales(const OperandDesc& desc, const OperandBuffer& buffer, Range rows, int64_t k,
                  float* expanded) {
  const float* scale = buffer.scale + k / desc.tile_k * buffer.scale_k_stride;
  for (int64_t row = rows.begin; row < rows.end;) {
    const int64_t tile = row / desc.tile_rows;
    const int64_t end = std::min(rows.end, (tile + 1) * desc.tile_rows);
    std::fill(expanded + (row - rows.begin), expanded + (end - rows.begin),
              scale[tile * buffer.scale_row_stride]);
    row = end;
  }
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
    const int64_t num_tiles =
        NeedsAllTiles() ? CeilDiv(cols_.size(), shape_.tile_cols) * num_row_tiles_ : 1;
    if (!workspace_.Reserve(shape_, rows_.size(), num_tiles, k_blocking_.max_segments(),
                            k_blocking_.needs_partial_tiles(), desc_.split_k > 1)) {
      return false;
    }
    for (const KBlocking::Block& block : k_blocking_.blocks()) {
      isa_.pack_lhs(Source(desc_.lhs, buffers_.lhs, rows_, block), workspace_.lhs);
      ExpandBlockScales(desc_.lhs, buffers_.lhs, rows_, block, rows_.size(), workspace_.lhs_scale);
      // Columns packed at a time: one panel, or those that a cache line of a kn rhs gives at once.
      const int64_t step = desc_.rhs.k_contiguous ? shape_.tile_cols : kMaxPackedCols;
      for (int64_t col = cols_.begin; col < cols_.end; col += step) {
        const Range packed{col, std::min(col + step, cols_.end)};
        isa_.pack_rhs(Source(desc_.rhs, buffers_.rhs, packed, block), workspace_.rhs);
        ExpandBlockScales(desc_.rhs, buffers_.rhs, packed, block, kMaxPackedCols,
                          workspace_.rhs_scale);
        for (int64_t first = packed.begin; first < packed.end; first += shape_.tile_cols) {
          MultiplyPanel(block, packed.begin,
                        {first, std::min(first + shape_.tile_cols, packed.end)});
        }
      }
    }
    return true;
  }

 private:
  // With a single block each tile is finished, and stored, before the next one starts.
  bool NeedsAllTiles() const { return k_blocking_.blocks().size() > 1; }

  PackSource Source(const OperandDesc& desc, const OperandBuffer& buffer, Range rows,
                    const KBlocking::Block& block) const {
    return {.values = CodeOf(desc, buffer, rows.begin, block.k_begin),
            .leading_stride = buffer.leading_stride,
            .format = desc.format,
            .k_contiguous = desc.k_contiguous,
            .num_rows = static_cast<int>(rows.size()),
            .runs = k_blocking_.runs(block),
            .num_runs = block.num_runs};
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

  // All row tiles times the panel that holds columns `cols`, packed from column `packed_begin` on.
  void MultiplyPanel(const KBlocking::Block& block, int64_t packed_begin, Range cols) const {
    const int64_t packed_panel = (cols.begin - packed_begin) / shape_.tile_cols;
    const int64_t panel = (cols.begin - cols_.begin) / shape_.tile_cols;
    const bool is_last_block = &block == &k_blocking_.blocks().back();
    for (int64_t tile = 0; tile < num_row_tiles_; ++tile) {
      // Tiles of about equal height: a last tile of one row would cost nearly a full one.
      const Range rows = Part(rows_.size(), num_row_tiles_, 1, tile);
      const int64_t tile_offset =
          NeedsAllTiles() ? (panel * num_row_tiles_ + tile) * shape_.tile_rows * shape_.tile_cols
                          : 0;
      const TileProduct product{
          .lhs = workspace_.lhs + rows.begin * shape_.lhs_row_stride,
          .rhs = workspace_.rhs + packed_panel * shape_.rhs_panel_words,
          .num_rows = static_cast<int>(rows.size()),
          .segments = k_blocking_.segments(block),
          .num_segments = block.num_segments,
          .lhs_scale = workspace_.lhs_scale + rows.begin,
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
  const bool scales_inside_ = desc_.machine != nullptr && desc_.machine->scales_inside;
  const bool scales_vary_along_k_ = desc_.lhs.tile_k < desc_.k || desc_.rhs.tile_k < desc_.k;
  const int64_t element_bytes_ = desc_.out == OutType::kF32 ? 4 : 2;
  Workspace workspace_;
};

}  // namespace

bool RunPackedGemm(const PackedGemmIsa& isa, const GemmDesc& desc,
                   std::span<const GemmBuffers> batch, const ParallelFor& parallel_for) {
  const int tile_rows = isa.shape.tile_rows;
  const KBlocking k_blocking(isa.shape, desc);
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
