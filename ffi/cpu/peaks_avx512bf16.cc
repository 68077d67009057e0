// Peak of vdpbf16ps: 16 lanes of two products each.
#include "cpu/peak_loops.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)

#include <immintrin.h>

namespace jax_fp8 {
namespace {

struct Bf16Dot {
  using Vec = __m512;
  static constexpr int kChains = 24;
  static constexpr int kFlops = 2 * 32;
  static Vec Set(float value) { return _mm512_set1_ps(value); }
  // A float is two BF16 numbers: the upper one has its value, the lower one is 0 for few digits.
  [[gnu::always_inline]] static Vec MulAdd(Vec a, Vec b, Vec sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

constexpr PeakLoops kLoops = {MultiplyLoop<Bf16Dot>, nullptr};

}  // namespace

const PeakLoops* PeakLoopsAvx512Bf16() { return &kLoops; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PeakLoops* PeakLoopsAvx512Bf16() { return nullptr; }

}  // namespace jax_fp8

#endif
