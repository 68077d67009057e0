// What the quantise handlers offer to registry.cc.
#pragma once

#include <string>
#include <vector>

#include "handlers/handlers.h"

namespace jax_fp8 {

std::vector<Registration> QuantizeRegistrations();

// One row per kernel: "quantize", name, why this machine cannot run it or "".
std::vector<std::vector<std::string>> QuantizeKernelTable();

}  // namespace jax_fp8
