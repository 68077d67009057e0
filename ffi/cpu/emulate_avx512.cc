// The emulation's code for AVX-512.
#include "cpu/emulate.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "cpu/emulate_isa_avx512.h"
#include "cpu/emulate_tile.h"

namespace jax_fp8 {

const PackedGemmIsa* EmulationAvx512(const Machine& machine) {
  return EmulationOf<EmulateAvx512>(machine);
}

}  // namespace jax_fp8

#else

namespace jax_fp8 {

const PackedGemmIsa* EmulationAvx512(const Machine&) { return nullptr; }

}  // namespace jax_fp8

#endif
