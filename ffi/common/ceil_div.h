// The one rounding-up division: an inline function of the same name in two headers would be one for
// the linker, whichever it takes.
#pragma once

#include <cstdint>

namespace jax_fp8 {

// size >= 0, part >= 1; no sum overflows, however large the part.
constexpr int64_t CeilDiv(int64_t size, int64_t part) { return size / part + (size % part != 0); }

}  // namespace jax_fp8
