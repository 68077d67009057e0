// Peaks of AVX-512: FP32 FMAs and loads of 16 lanes.
#include "cpu/peak_loops.h"

#if defined(__AVX512F__)

#include <immintrin.h>

namespace jax_fp8 {
namespace {

struct Fma512 {
  using Vec = __m512;
  static constexpr int kChains = 24;
  static constexpr int kFlops = 2 * 16;
  static Vec Set(float value) { return _mm512_set1_ps(value); }
  [[gnu::always_inline]] static Vec MulAdd(Vec a, Vec b, Vec sum) {
    return _mm512_fmadd_ps(a, b, sum);
  }
};

struct Load512 {
  using Vec = __m512i;
  static Vec Zero() { return _mm512_setzero_si512(); }
  [[gnu::always_inline]] static Vec OrLoad(Vec found, const std::byte* data) {
    return _mm512_or_si512(found, _mm512_load_si512(data));
  }
};

constexpr PeakLoops kLoops = {MultiplyLoop<Fma512>, ReadLoop<Load512>};

}  // namespace

const PeakLoops* PeakLoopsAvx512() { return &kLoops; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PeakLoops* PeakLoopsAvx512() { return nullptr; }

}  // namespace jax_fp8

#endif
