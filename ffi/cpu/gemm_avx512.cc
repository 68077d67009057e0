// The avx512 row's code: FP8 is decoded to FP32 while packing, and multiplied by FMAs of 16 lanes.
#include "cpu/gemm_packed.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "cpu/few_rows.h"
#include "cpu/fp32_avx512.h"
#include "cpu/microkernel.h"
#include "cpu/pack_fp32.h"

namespace jax_fp8 {
namespace {

constexpr PackedGemmIsa kIsa = {GemmAvx512Fp32::kShape,  PackLhs<GemmAvx512Fp32>,
                                PackRhs<GemmAvx512Fp32>, Multiply<GemmAvx512Fp32>,
                                Store<GemmAvx512Fp32>,   MultiplyFp32Codes<GemmAvx512Fp32>};

}  // namespace

const PackedGemmIsa* PackedGemmAvx512() { return &kIsa; }

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PackedGemmIsa* PackedGemmAvx512() { return nullptr; }

}  // namespace jax_fp8

#endif
