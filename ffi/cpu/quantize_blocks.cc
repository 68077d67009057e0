// Cuts a batch of matrices into regions, the units of parallel work.
//
// Where tiles are small enough a region holds whole tiles of every output: it is read from memory
// once, and the second look (codes after amax, the other output) finds it in cache. A larger tile
// is shared by many regions, which first agree on its amax and read x again for the codes. No
// result depends on how regions are cut: a maximum has no order.
#include "cpu/quantize_blocks.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <numeric>

#include "common/ceil_div.h"

namespace jax_fp8 {
namespace {

// All in entries of x, and measured on a Zen 4 with 1 MB of L2 and 32 MB of L3.
// Up to here a second thread costs more than it saves.
constexpr int64_t kSerialEntries = 32 * 1024;
// A region of one row of tiles is in L2 when its codes are computed.
constexpr int64_t kRowRegionEntries = 32 * 1024;
// Tall tiles want regions as wide as the matrix: memory then is read in order, which gains more
// than L2 does. They stay in L3, and shrink for small matrices to leave work for every thread.
constexpr int64_t kTallRegionEntries = 512 * 1024;
// Larger tiles are shared between regions.
constexpr int64_t kLargestUnit = 128 * 1024;
// A region of a shared tile pays for merging its amaxes, so it has a few rows for each of them.
constexpr int64_t kSharedRegionEntries = 128 * 1024;
constexpr int64_t kSharedRegionCols = 8 * 1024;
// Regions narrower than a cache line of codes would share lines.
constexpr int64_t kLineEntries = 64;
// Scratch on the stack holds a part of a row.
constexpr int64_t kPieceCols = 2048;
// Row operations are slow on segments up to this size, other than 1.
constexpr int64_t kNarrowTile = 63;

int64_t Bytes(InType type) { return type == InType::kF32 ? 4 : 2; }

struct Matrices {
  int64_t batch, rows, cols;

  int64_t entries() const { return batch * rows * cols; }
};

// How scales lie on a matrix: scale (row / tile_rows, col / tile_cols), row-major.
struct Tiling {
  int64_t tile_rows, tile_cols;
  int64_t scale_rows = 0, scale_cols = 0;  // set by Fold

  int64_t scales() const { return scale_rows * scale_cols; }
};

struct Region {
  int64_t batch;
  int64_t row_begin, row_end, col_begin, col_end;
};

// Joins dims across which tiles continue unchanged, so that narrow matrices become long rows. The
// order of entries and scales in memory stays as it is.
Matrices Fold(Matrices x, Tiling* tilings, int num_tilings) {
  auto all = [&](auto holds) { return std::all_of(tilings, tilings + num_tilings, holds); };
  if (all([&](const Tiling& t) { return x.rows % t.tile_rows == 0; })) {
    x = {1, x.batch * x.rows, x.cols};
  }
  if (all([&](const Tiling& t) {
        return t.tile_cols == x.cols || (t.tile_rows == 1 && x.cols % t.tile_cols == 0);
      })) {
    x = {x.batch, 1, x.rows * x.cols};
    for (int i = 0; i < num_tilings; ++i) {
      tilings[i].tile_cols *= tilings[i].tile_rows;
      tilings[i].tile_rows = 1;
    }
  }
  for (int i = 0; i < num_tilings; ++i) {
    tilings[i].scale_rows = CeilDiv(x.rows, tilings[i].tile_rows);
    tilings[i].scale_cols = CeilDiv(x.cols, tilings[i].tile_cols);
  }
  return x;
}

// The part of a region between two edges of tile rows; calls body(strip) from top to bottom.
template <class Body>
void ForStrips(const Region& region, int64_t tile_rows, Body body) {
  for (int64_t row = region.row_begin; row < region.row_end;) {
    Region strip = region;
    strip.row_begin = row;
    strip.row_end = row = std::min(region.row_end, (row / tile_rows + 1) * tile_rows);
    body(strip);
  }
}

// Cuts columns [begin, end) so that one run lies in one tile or starts at a tile's edge; calls
// body(col, n, first_tile): entry i of the run belongs to tile first_tile + i / tile_cols.
template <class Body>
void ForRuns(int64_t begin, int64_t end, int64_t tile_cols, Body body) {
  const int64_t edge = std::min(end, CeilDiv(begin, tile_cols) * tile_cols);
  if (begin < edge) body(begin, edge - begin, begin / tile_cols);
  if (edge < end) body(edge, end - edge, edge / tile_cols);
}

// Calls body(entry, n, scale, segment) for runs that cover the region: entry i of a run lies at
// index `entry` + i of the batch and has scale[i / segment].
template <class Body>
void ForScaledRuns(const Matrices& x, const Region& region, const Tiling& tiling,
                   const float* scales, Body body) {
  const int64_t first_row = region.batch * x.rows;
  scales += region.batch * tiling.scales();
  ForStrips(region, tiling.tile_rows, [&](const Region& strip) {
    const float* scale_row = scales + strip.row_begin / tiling.tile_rows * tiling.scale_cols;
    if (tiling.tile_cols == 1 || tiling.tile_cols > kNarrowTile) {
      for (int64_t row = strip.row_begin; row < strip.row_end; ++row) {
        ForRuns(strip.col_begin, strip.col_end, tiling.tile_cols,
                [&](int64_t col, int64_t n, int64_t tile) {
                  body((first_row + row) * x.cols + col, n, scale_row + tile, tiling.tile_cols);
                });
      }
      return;
    }
    float expanded[kPieceCols];
    for (int64_t begin = strip.col_begin; begin < strip.col_end; begin += kPieceCols) {
      const int64_t n = std::min(kPieceCols, strip.col_end - begin);
      ForRuns(begin, begin + n, tiling.tile_cols, [&](int64_t col, int64_t length, int64_t tile) {
        for (int64_t i = 0; i < length; i += tiling.tile_cols, ++tile) {
          std::fill_n(expanded + col - begin + i, std::min(tiling.tile_cols, length - i),
                      scale_row[tile]);
        }
      });
      for (int64_t row = strip.row_begin; row < strip.row_end; ++row) {
        body((first_row + row) * x.cols + begin, n, expanded, int64_t{1});
      }
    }
  });
}

// Calls body(region) for a grid of regions over every matrix, in parallel if that pays.
template <class Body>
void ForRegions(const Matrices& x, int64_t region_rows, int64_t region_cols,
                const ParallelFor& parallel_for, Body body) {
  const int64_t grid_rows = CeilDiv(x.rows, region_rows), grid_cols = CeilDiv(x.cols, region_cols);
  const int64_t num_regions = x.batch * grid_rows * grid_cols;
  auto run = [&](int64_t index) {
    const int64_t row = index / grid_cols % grid_rows * region_rows;
    const int64_t col = index % grid_cols * region_cols;
    body(Region{.batch = index / (grid_rows * grid_cols),
                .row_begin = row,
                .row_end = std::min(x.rows, row + region_rows),
                .col_begin = col,
                .col_end = std::min(x.cols, col + region_cols)});
  };
  if (x.entries() <= kSerialEntries) {
    for (int64_t i = 0; i < num_regions; ++i) run(i);
  } else {
    parallel_for(num_regions, run);
  }
}

// The same for regions of about `entries` entries that may cut tiles anywhere.
template <class Body>
void ForAnyRegions(const Matrices& x, int64_t entries, const ParallelFor& parallel_for, Body body) {
  const int64_t cols = std::min(x.cols, std::max(kSharedRegionCols, entries / x.rows));
  const int64_t rows = std::clamp<int64_t>(entries / cols, 1, x.rows);
  ForRegions(x, rows, cols, parallel_for, body);
}

// The smallest power of two that is at least amax / max. Every format's max is 1.75 times a power
// of two, so it follows from the bits of amax without a rounding.
float PowerOfTwoScale(float amax, float max) {
  const uint32_t bits = std::bit_cast<uint32_t>(amax);
  constexpr uint32_t kMantissaOfMax = 0x600000, kMantissa = 0x7FFFFF;
  const int exponent = static_cast<int>(bits >> 23) -
                       static_cast<int>(std::bit_cast<uint32_t>(max) >> 23) +
                       ((bits & kMantissa) > kMantissaOfMax ? 1 : 0);
  return std::bit_cast<float>(static_cast<uint32_t>(std::max(exponent, -126) + 127) << 23);
}

class Quantizer {
 public:
  Quantizer(const QuantizeRowOps& ops, const QuantizeDesc& desc, const QuantizeBuffers& buffers)
      : ops_(ops), desc_(desc), buffers_(buffers), in_(static_cast<int>(desc.in)) {
    for (int i = 0; i < desc.num_outputs; ++i) {
      tilings_[i] = {.tile_rows = desc.outputs[i].tile_rows,
                     .tile_cols = desc.outputs[i].tile_cols};
    }
    x_ = Fold({desc.batch, desc.rows, desc.cols}, tilings_, desc.num_outputs);
  }

  void Run(const ParallelFor& parallel_for) const {
    if (desc_.scale_given) {
      ForAnyRegions(x_, kRowRegionEntries, parallel_for, [&](const Region& region) {
        ForOutputs([&](int i) { EncodeRegion(region, i); });
      });
      return;
    }
    // The smallest piece of x that holds whole tiles of every output.
    const int64_t unit_rows =
        CommonMultiple(tilings_[0].tile_rows, tilings_[desc_.num_outputs - 1].tile_rows, x_.rows);
    const int64_t unit_cols =
        CommonMultiple(tilings_[0].tile_cols, tilings_[desc_.num_outputs - 1].tile_cols, x_.cols);
    const int64_t least_cols = std::min(x_.cols, CeilDiv(kLineEntries, unit_cols) * unit_cols);
    if (unit_rows <= kLargestUnit / least_cols) {
      RunWholeTiles(unit_rows, unit_cols, least_cols, parallel_for);
    } else {
      RunSharedTiles(parallel_for);
    }
  }

 private:
  static int64_t CommonMultiple(int64_t a, int64_t b, int64_t size) {
    const int64_t factor = a / std::gcd(a, b);
    return factor >= CeilDiv(size, b) ? size : factor * b;
  }

  template <class Body>
  void ForOutputs(Body body) const {
    for (int i = 0; i < desc_.num_outputs; ++i) body(i);
  }

  void RunWholeTiles(int64_t unit_rows, int64_t unit_cols, int64_t least_cols,
                     const ParallelFor& parallel_for) const {
    constexpr int64_t kRegionsPerThread = 4;
    const int64_t share = x_.entries() / (kRegionsPerThread * parallel_for.num_threads);
    const int64_t entries = unit_rows == 1
                                ? kRowRegionEntries
                                : std::clamp(share, kRowRegionEntries, kTallRegionEntries);
    const int64_t cols =
        std::min(x_.cols, std::max(least_cols, entries / unit_rows / unit_cols * unit_cols));
    const int64_t rows =
        std::min(x_.rows, std::max<int64_t>(1, entries / (unit_rows * cols)) * unit_rows);
    ForRegions(x_, rows, cols, parallel_for, [&](const Region& region) {
      ForOutputs([&](int i) {
        // One row of tiles after the other: codes follow while the strip is in the nearest cache.
        ForStrips(region, tilings_[i].tile_rows, [&](const Region& strip) {
          float* scale = ScaleRow(strip, i);
          const int64_t first = strip.col_begin / tilings_[i].tile_cols;
          const int64_t last = CeilDiv(strip.col_end, tilings_[i].tile_cols);
          std::fill(scale + first, scale + last, 0.0f);
          AccumulateAmax(strip, i,
                         [](float& largest, float amax) { largest = std::max(largest, amax); });
          AmaxToScale(scale + first, last - first);
          EncodeRegion(strip, i);
        });
      });
    });
  }

  void RunSharedTiles(const ParallelFor& parallel_for) const {
    ForOutputs([&](int i) {
      std::fill_n(buffers_.outputs[i].scale, x_.batch * tilings_[i].scales(), 0.0f);
    });
    ForAnyRegions(x_, kSharedRegionEntries, parallel_for, [&](const Region& region) {
      ForOutputs([&](int i) {
        ForStrips(region, tilings_[i].tile_rows, [&](const Region& strip) {
          AccumulateAmax(strip, i, [](float& scale, float amax) {
            const std::atomic_ref<float> shared(scale);
            float seen = shared.load(std::memory_order_relaxed);
            while (seen < amax &&
                   !shared.compare_exchange_weak(seen, amax, std::memory_order_relaxed)) {
            }
          });
        });
      });
    });
    ForOutputs(
        [&](int i) { AmaxToScale(buffers_.outputs[i].scale, x_.batch * tilings_[i].scales()); });
    ForAnyRegions(x_, kSharedRegionEntries, parallel_for, [&](const Region& region) {
      ForOutputs([&](int i) { EncodeRegion(region, i); });
    });
  }

  const void* EntryAt(int64_t index) const {
    return static_cast<const char*>(buffers_.x) + index * Bytes(desc_.in);
  }

  float* ScaleRow(const Region& strip, int output) const {
    const Tiling& tiling = tilings_[output];
    return buffers_.outputs[output].scale + strip.batch * tiling.scales() +
           strip.row_begin / tiling.tile_rows * tiling.scale_cols;
  }

  // Calls merge(scale, amax) for each tile that meets the strip, where amax is that of the common
  // entries. A tile may come up more than once.
  template <class Merge>
  void AccumulateAmax(const Region& strip, int output, Merge merge) const {
    const int64_t tile_cols = tilings_[output].tile_cols;
    float* scale = ScaleRow(strip, output);
    Region piece = strip;
    for (int64_t begin = strip.col_begin; begin < strip.col_end; begin += kPieceCols) {
      piece.col_begin = begin;
      piece.col_end = std::min(strip.col_end, begin + kPieceCols);
      const int64_t first = begin / tile_cols;
      const int64_t num_tiles = CeilDiv(piece.col_end, tile_cols) - first;
      float amax[kPieceCols];
      std::fill_n(amax, num_tiles, 0.0f);
      PieceAmax(piece, tile_cols, amax);
      for (int64_t i = 0; i < num_tiles; ++i) merge(scale[first + i], amax[i]);
    }
  }

  // Raises amax[i], for the tiles that meet a piece of a strip, to the magnitudes in the piece.
  void PieceAmax(const Region& piece, int64_t tile_cols, float* amax) const {
    const int64_t num_rows = piece.row_end - piece.row_begin;
    const int64_t num_cols = piece.col_end - piece.col_begin;
    const void* x = EntryAt((piece.batch * x_.rows + piece.row_begin) * x_.cols + piece.col_begin);
    if (tile_cols == 1) {
      ops_.amax_down[in_](x, num_rows, x_.cols, num_cols, amax);
      return;
    }
    // First down to one row, unless there is only one, then across each tile's columns.
    float column_amax[kPieceCols];
    InType row_type = desc_.in;
    if (num_rows > 1) {
      std::fill_n(column_amax, num_cols, 0.0f);
      ops_.amax_down[in_](x, num_rows, x_.cols, num_cols, column_amax);
      x = column_amax;
      row_type = InType::kF32;
    }
    ForRuns(piece.col_begin, piece.col_end, tile_cols, [&](int64_t col, int64_t n, int64_t tile) {
      const void* run = static_cast<const char*>(x) + (col - piece.col_begin) * Bytes(row_type);
      ops_.amax_across[static_cast<int>(row_type)](run, n, tile_cols,
                                                   amax + tile - piece.col_begin / tile_cols);
    });
  }

  // In place, for `n` tiles.
  void AmaxToScale(float* scale, int64_t n) const {
    constexpr float kSmallest = 0x1p-126f;  // a subnormal scale would cost precision
    const float max = Info(desc_.format).max;
    for (int64_t i = 0; i < n; ++i) {
      const float amax = scale[i];
      const float exact = std::max(amax / max, kSmallest);
      scale[i] = amax == 0 ? 1.0f : desc_.power_of_two ? PowerOfTwoScale(amax, max) : exact;
    }
  }

  void EncodeRegion(const Region& region, int output) const {
    const int format = static_cast<int>(desc_.format);
    const QuantizeOutput& out = buffers_.outputs[output];
    if (desc_.stochastic) {
      const auto encode = ops_.encode_stochastic[in_][format];
      ForScaledRuns(x_, region, tilings_[output], out.scale,
                    [&](int64_t entry, int64_t n, const float* scale, int64_t segment) {
                      encode(EntryAt(entry), buffers_.bits + entry, n, scale, segment,
                             desc_.saturate, out.values + entry);
                    });
      return;
    }
    const auto encode = ops_.encode[in_][format];
    ForScaledRuns(x_, region, tilings_[output], out.scale,
                  [&](int64_t entry, int64_t n, const float* scale, int64_t segment) {
                    encode(EntryAt(entry), n, scale, segment, desc_.saturate, out.values + entry);
                  });
  }

  const QuantizeRowOps& ops_;
  const QuantizeDesc& desc_;
  const QuantizeBuffers& buffers_;
  const int in_;
  Tiling tilings_[2] = {};
  Matrices x_;
};

}  // namespace

void QuantizeBlocks(const QuantizeRowOps& ops, const QuantizeDesc& desc,
                    const QuantizeBuffers& buffers, const ParallelFor& parallel_for) {
  if (desc.batch * desc.rows * desc.cols == 0) return;
  Quantizer(ops, desc, buffers).Run(parallel_for);
}

void DequantizeBlocks(const QuantizeRowOps& ops, const DequantizeDesc& desc,
                      const DequantizeBuffers& buffers, const ParallelFor& parallel_for) {
  if (desc.batch * desc.rows * desc.cols == 0) return;
  Tiling tiling{.tile_rows = desc.tile_rows, .tile_cols = desc.tile_cols};
  const Matrices x = Fold({desc.batch, desc.rows, desc.cols}, &tiling, 1);
  const auto decode = ops.decode[static_cast<int>(desc.format)][static_cast<int>(desc.out)];
  const int64_t out_bytes = desc.out == OutType::kF32 ? 4 : 2;
  ForAnyRegions(x, kRowRegionEntries, parallel_for, [&](const Region& region) {
    ForScaledRuns(x, region, tiling, buffers.scale,
                  [&](int64_t entry, int64_t n, const float* scale, int64_t segment) {
                    decode(buffers.values + entry, n, scale, segment,
                           static_cast<char*>(buffers.out) + entry * out_bytes);
                  });
  });
}

}  // namespace jax_fp8
