// The emulation's code for AVX2.
#include "cpu/emulate.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "cpu/emulate_isa_avx2.h"
#include "cpu/emulate_tile.h"

namespace jax_fp8 {

const PackedGemmIsa* EmulationAvx2(const Machine& machine) {
  return EmulationOf<EmulateAvx2>(machine);
}

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PackedGemmIsa* EmulationAvx2(const Machine&) { return nullptr; }

}  // namespace jax_fp8

#endif
