// The avx512vbmi row's code: FP8 is decoded to FP32 by table while packing, and multiplied by FMAs
// of 16 lanes. It is the avx512 row with half its cost of decoding.
#include "cpu/gemm_packed.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__)

#include "cpu/avx512vbmi.h"
#include "cpu/few_rows.h"
#include "cpu/fp32_avx512.h"
#include "cpu/microkernel.h"
#include "cpu/pack_fp32.h"

namespace jax_fp8 {
namespace {

struct GemmAvx512Vbmi : GemmAvx512Fp32 {
  // One k of 64 columns.
  class Codes {
   public:
    explicit Codes(Format format) : decoder_(format) {}

    [[gnu::always_inline]] void Load(const uint8_t* codes, int64_t, int, int num_cols,
                                     Words (&words)[4]) const {
      const __m512i loaded = _mm512_maskz_loadu_epi8(MaskOfFirst(num_cols), codes);
      decoder_.DecodeQuads(OrderForQuads(loaded), words);
    }

   private:
    Decoder decoder_;
  };
};

constexpr int kCols = GemmAvx512Vbmi::kShape.tile_cols;
constexpr int kPanelWords = GemmAvx512Vbmi::kShape.rhs_panel_words;

// One panel, 16 columns and 64 k at a time.
void PackNk(const PackSource& source, uint32_t* packed) {
  const Decoder decoder(source.format);
  const int end = source.runs[0].k_end;
  for (int k = 0; k < end; k += 64) {
    const int num_k = end - k;
    const __mmask64 k_mask = MaskOfFirst(num_k);
    for (int col = 0; col < kCols; col += 16) {
      const int num_cols = source.num_rows - col;
      const uint8_t* codes = source.values + col * source.leading_stride + k;
      __m512i quads[16];  // [col][four k], transposed to [four k][col]
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) {
        const uint8_t* address = codes + j * source.leading_stride;
        quads[j] = _mm512_maskz_loadu_epi8(j < num_cols ? k_mask : 0, address);
        _mm_prefetch(address + 128, _MM_HINT_T0);  // as in pack_avx512bf16.h
      }
      Transpose16x16(quads);
      uint32_t* out = packed + k * kCols + col;
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) {
        if (4 * j >= num_k) break;
        __m512i words[4];
        decoder.DecodeQuads(quads[j], words);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          if (4 * j + i < num_k) _mm512_store_si512(out + (4 * j + i) * kCols, words[i]);
        }
      }
    }
  }
}

// Two panels at once.
void PackKn(const PackSource& source, uint32_t* packed) {
  const GemmAvx512Vbmi::Codes decoder(source.format);
  const int num_k = source.runs[0].k_end;
  for (int k = 0; k < num_k; ++k) {
    const uint8_t* codes = source.values + k * source.leading_stride;
    PrefetchLine(codes + source.prefetch_distance);
    __m512i words[4];
    decoder.Load(codes, 0, 1, source.num_rows, words);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm512_store_si512(packed + i / 2 * kPanelWords + k * kCols + i % 2 * 16, words[i]);
    }
  }
}

void PackRhs(const PackSource& source, uint32_t* packed) {
  source.k_contiguous ? PackNk(source, packed) : PackKn(source, packed);
}

constexpr PackedGemmIsa kIsa = {
    GemmAvx512Vbmi::kShape,   PackLhs<GemmAvx512Vbmi>, PackRhs,
    Multiply<GemmAvx512Vbmi>, Store<GemmAvx512Vbmi>,   MultiplyCodes<GemmAvx512Vbmi>};

}  // namespace

const PackedGemmIsa* PackedGemmAvx512Vbmi() { return &kIsa; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PackedGemmIsa* PackedGemmAvx512Vbmi() { return nullptr; }

}  // namespace jax_fp8

#endif
