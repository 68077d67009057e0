#include "common/machine.h"

namespace jax_fp8 {
namespace {

using enum Summation;
using enum Rounding;

// clang-format off
constexpr Machine kMachines[] = {
    // name                       summation  step frac rounding  zero  fp16   scales fnuz   interval
    {"hopper_wgmma",               kAligned,    32, 13, kRzE8M13, -133, false, false, false, false},
    {"hopper_wgmma_f16",           kAligned,    32, 13, kRneFp16, -21,  false, false, false, false},
    {"hopper_mma",                 kAligned,    16, 25, kRzFp32,  -133, true,  false, false, false},
    {"ada_mma",                    kAligned,    16, 13, kRzE8M13, -132, false, false, false, false},
    {"ada_mma_f16",                kAligned,    16, 13, kRneFp16, -20,  false, false, false, false},
    {"blackwell_tcgen05",          kAligned,    32, 25, kRzFp32,  -133, false, false, false, false},
    {"blackwell_tcgen05_f16",      kAligned,    32, 25, kRneFp16, -21,  false, false, false, false},
    {"blackwell_tcgen05_blockscale", kAligned,  32, 25, kRzFp32,  -133, false, true,  false, false},
    {"cdna3_mfma",                 kGrouped,    16, 24, kRneFp32, -999, false, false, true,  false},
    {"fp32",                       kSequential, 1,  0,  kRneFp32, 0,    false, false, false, true},
    {"fp32_pairwise",              kPairwise,   1,  0,  kRneFp32, 0,    false, false, false, true},
    {"fp16",                       kSequential, 1,  0,  kRneFp16, 0,    false, false, false, false},
    {"fp16_chunked",               kChunked,    32, 0,  kRneFp16, 0,    false, false, false, false},
    {"bf16_chunked",               kChunked,    32, 0,  kRneBf16, 0,    false, false, false, false},
    {"exact",                      kExact,      1,  0,  kRneFp32, 0,    false, false, false, true},
};
// clang-format on

}  // namespace

std::span<const Machine> Machines() { return kMachines; }

const Machine* FindMachine(std::string_view name) {
  for (const Machine& machine : kMachines) {
    if (machine.name == name) return &machine;
  }
  return nullptr;
}

}  // namespace jax_fp8
