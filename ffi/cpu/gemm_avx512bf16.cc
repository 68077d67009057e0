// The avx512bf16 row's code: FP8 is decoded to BF16 (exact: every FP8 value is a normal BF16
// number) by table while packing, and multiplied by vdpbf16ps.
//
// vdpbf16ps flushes subnormals, which FP8 operands never meet: the products of two decoded values,
// and so all their sums, are multiples of 2^-32 (E5M2·E5M2; the smallest code is 2^-16).
#include "cpu/gemm_packed.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && \
    defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "cpu/few_rows.h"
#include "cpu/isa_avx512.h"
#include "cpu/microkernel.h"
#include "cpu/pack_avx512bf16.h"

namespace jax_fp8 {
namespace {

struct GemmAvx512Bf16 : Avx512 {
  static constexpr PackedShape kShape = kBf16Shape;

  [[gnu::always_inline]] static Vec AddProducts(Vec sum, Words lhs, Words rhs) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(lhs), reinterpret_cast<__m512bh>(rhs));
  }

  using Codes = PairCodes;
};

constexpr PackedGemmIsa kIsa = {
    GemmAvx512Bf16::kShape,       PackLhs, PackRhs, Multiply<GemmAvx512Bf16>, Store<GemmAvx512Bf16>,
    MultiplyCodes<GemmAvx512Bf16>};

}  // namespace

const PackedGemmIsa* PackedGemmAvx512Bf16() { return &kIsa; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PackedGemmIsa* PackedGemmAvx512Bf16() { return nullptr; }

}  // namespace jax_fp8

#endif
