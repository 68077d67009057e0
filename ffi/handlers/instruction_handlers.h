// XLA's entry point of a single matrix instruction.
#pragma once

#include <vector>

#include "handlers/handlers.h"

namespace jax_fp8 {

std::vector<Registration> InstructionRegistrations();

}  // namespace jax_fp8
