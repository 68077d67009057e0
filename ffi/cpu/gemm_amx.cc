// The amx row's code: packed as for avx512bf16, and multiplied by TDPBF16PS, 16 x 16 outputs and 32
// k at a time.
//
// It adds up in another order than the other rows: of every 32 k, counted from the start of a
// piece, those with odd index and those with even index are two chains of FMAs; their sum is added
// to the accumulator (Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS).
// Subnormals are flushed, which FP8 operands never meet (see gemm_avx512bf16.cc).
#include "cpu/gemm_packed.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512VBMI__) && \
    defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <cstring>

#include "cpu/isa_avx512.h"
#include "cpu/microkernel.h"
#include "cpu/pack_avx512bf16.h"

namespace jax_fp8 {
namespace {

constexpr int kTileRows = 16;   // of a tile register
constexpr int kStepWords = 16;  // 64 bytes, a row of a tile register
constexpr int kLhsStrideBytes = kLhsRowStride * 4, kRhsStrideBytes = kTileCols * 4;
constexpr int kSumStrideBytes = kTileCols * 4;

constexpr PackedShape AmxShape() {
  PackedShape shape = kBf16Shape;
  shape.tile_rows = 2 * kTileRows;
  shape.step_words = kStepWords;
  shape.few_rows = 0;
  return shape;
}

struct Amx : Avx512 {
  static constexpr PackedShape kShape = AmxShape();
};

// NOTE: GCC's tile intrinsics do not say that they read memory: what was written to a buffer of
// this file must be told to be there before they do.
[[gnu::always_inline]] inline void MakeVisible(const void* buffer) {
  asm volatile("" ::"r"(buffer) : "memory");
}

// Operand of LDTILECFG, palette 1.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

void Start() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = 64, config.rows[tile] = kTileRows;
  MakeVisible(&config);
  _tile_loadconfig(&config);
}

// NOTE: the ABI wants tile registers in their initial state wherever a function returns.
void Finish() { _tile_release(); }

// One step of k: the sums are tiles 0-3, lhs 4 and 5, rhs 6 and 7.
[[gnu::always_inline]] inline void MultiplyStep(const uint32_t* lhs, int lhs_stride_bytes,
                                                const uint32_t* rhs) {
  _tile_loadd(4, lhs, lhs_stride_bytes);
  _tile_loadd(6, rhs, kRhsStrideBytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, rhs + kTileCols / 2, kRhsStrideBytes);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, reinterpret_cast<const char*>(lhs) + kTileRows * lhs_stride_bytes,
              lhs_stride_bytes);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// The words of a step that do not fill it, with zeros after them.
struct PartialStep {
  alignas(64) uint32_t lhs[2 * kTileRows][kStepWords];
  alignas(64) uint32_t rhs[kStepWords][kTileCols];

  PartialStep(const uint32_t* from_lhs, const uint32_t* from_rhs, int num_rows, int num_words) {
    std::memset(this, 0, sizeof(*this));
    for (int row = 0; row < num_rows; ++row) {
      std::memcpy(lhs[row], from_lhs + row * kLhsRowStride, num_words * 4);
    }
    std::memcpy(rhs, from_rhs, num_words * kRhsStrideBytes);
    MakeVisible(this);
  }
};

void MultiplyAmx(const TileProduct& product) {
  constexpr int kHalf = kTileCols / 2;
  alignas(64) float ended[2 * kTileRows][kTileCols];
  for (int s = 0; s < product.num_segments; ++s) {
    const Segment& segment = product.segments[s];
    const uint32_t* lhs = product.lhs + segment.first_word;
    const uint32_t* rhs = product.rhs + segment.first_word * kTileCols;
    if (segment.starts_piece) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, product.partial, kSumStrideBytes);
      _tile_loadd(1, product.partial + kHalf, kSumStrideBytes);
      _tile_loadd(2, product.partial + kTileRows * kTileCols, kSumStrideBytes);
      _tile_loadd(3, product.partial + kTileRows * kTileCols + kHalf, kSumStrideBytes);
    }
    int num_words = NumPairs(segment.k_end - segment.k_begin);
    for (; num_words >= kStepWords; num_words -= kStepWords) {
      MultiplyStep(lhs, kLhsStrideBytes, rhs);
      lhs += kStepWords;
      rhs += kStepWords * kTileCols;
    }
    if (num_words > 0) {
      const PartialStep step(lhs, rhs, product.num_rows, num_words);
      MultiplyStep(step.lhs[0], kStepWords * 4, step.rhs[0]);
    }
    float* sums = segment.ends_piece ? ended[0] : product.partial;
    _tile_stored(0, sums, kSumStrideBytes);
    _tile_stored(1, sums + kHalf, kSumStrideBytes);
    _tile_stored(2, sums + kTileRows * kTileCols, kSumStrideBytes);
    _tile_stored(3, sums + kTileRows * kTileCols + kHalf, kSumStrideBytes);
    if (!segment.ends_piece) continue;
    const float* lhs_scale = product.lhs_scale + s * product.lhs_scale_stride;
    const float* rhs_scale = product.rhs_scale + s * kMaxPackedCols;
    const Amx::Vec rhs_scales[] = {Amx::Load(rhs_scale), Amx::Load(rhs_scale + kHalf)};
    for (int row = 0; row < product.num_rows; ++row) {
      const Amx::Vec row_scale = Amx::Broadcast(lhs_scale[row]);
      for (int half = 0; half < 2; ++half) {
        Promote<Amx>(Amx::Load(ended[row] + half * kHalf), Amx::Mul(row_scale, rhs_scales[half]),
                     product.scales_vary_along_k, segment.in_first_piece,
                     product.acc + row * kTileCols + half * kHalf);
      }
    }
  }
}

constexpr PackedGemmIsa kIsa = {.shape = Amx::kShape,
                                .pack_lhs = PackLhs,
                                .pack_rhs = PackRhs,
                                .multiply = MultiplyAmx,
                                .store = Store<Amx>,
                                .start = Start,
                                .finish = Finish};

}  // namespace

const PackedGemmIsa* PackedGemmAmx() { return &kIsa; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PackedGemmIsa* PackedGemmAmx() { return nullptr; }

}  // namespace jax_fp8

#endif
