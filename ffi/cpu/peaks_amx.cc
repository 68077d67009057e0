// Peak of AMX: tdpbf16ps multiplies a 16 x 32 tile of BF16 by a 32 x 16 one.
#include "cpu/peak_loops.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)

#include <immintrin.h>

namespace jax_fp8 {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kNumTiles = 8;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

int64_t Multiply(int64_t rounds) {
  TileConfig config;
  for (int tile = 0; tile < kNumTiles; ++tile) {
    config.row_bytes[tile] = kTileRowBytes;
    config.rows[tile] = kTileRows;
  }
  alignas(64) uint16_t ones[kTileRows * kTileRowBytes / 2];
  for (uint16_t& one : ones) one = 0x3f80;
  // NOTE: GCC's intrinsics tell it of a few bytes only that they read; it would drop stores above.
  asm volatile("" : : "r"(&config), "r"(ones) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, ones, kTileRowBytes);
  _tile_loadd(5, ones, kTileRowBytes);
  _tile_loadd(6, ones, kTileRowBytes);
  _tile_loadd(7, ones, kTileRowBytes);
  // Four sums are enough for the latency: each instruction keeps the unit busy for 16 cycles.
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return rounds * 4 * 2 * 16 * 16 * 32;
}

constexpr PeakLoops kLoops = {Multiply, nullptr};

}  // namespace

const PeakLoops* PeakLoopsAmx() { return &kLoops; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PeakLoops* PeakLoopsAmx() { return nullptr; }

}  // namespace jax_fp8

#endif
