// What the GEMM handlers offer to registry.cc.
#pragma once

#include <vector>

#include "handlers/handlers.h"

namespace jax_fp8 {

std::vector<Registration> GemmRegistrations();

}  // namespace jax_fp8
