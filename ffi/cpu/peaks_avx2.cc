// Peaks of AVX2: FP32 FMAs and loads of 8 lanes.
#include "cpu/peak_loops.h"

#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

namespace jax_fp8 {
namespace {

struct Fma256 {
  using Vec = __m256;
  static constexpr int kChains = 12;  // of 16 registers
  static constexpr int kFlops = 2 * 8;
  static Vec Set(float value) { return _mm256_set1_ps(value); }
  [[gnu::always_inline]] static Vec MulAdd(Vec a, Vec b, Vec sum) {
    return _mm256_fmadd_ps(a, b, sum);
  }
};

struct Load256 {
  using Vec = __m256i;
  static Vec Zero() { return _mm256_setzero_si256(); }
  [[gnu::always_inline]] static Vec OrLoad(Vec found, const std::byte* data) {
    return _mm256_or_si256(found, _mm256_load_si256(reinterpret_cast<const __m256i*>(data)));
  }
};

constexpr PeakLoops kLoops = {MultiplyLoop<Fma256>, ReadLoop<Load256>};

}  // namespace

const PeakLoops* PeakLoopsAvx2() { return &kLoops; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PeakLoops* PeakLoopsAvx2() { return nullptr; }

}  // namespace jax_fp8

#endif
