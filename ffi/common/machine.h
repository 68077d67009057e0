// The accumulators of real hardware, and some of software, as rows of a table;
// emulation/machines.py is the same table for Python, with the source of each fact.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace jax_fp8 {

// How products are added up.
enum class Summation : uint8_t {
  // `step` products and the accumulator are aligned to the largest exponent of them all, cut toward
  // zero `fraction_bits` below it, added exactly, and rounded.
  kAligned,
  // The products with even and with odd index are aligned and cut apart from each other, then both
  // sums and the accumulator are aligned and rounded down (see GroupedStep).
  kGrouped,
  kSequential,  // one product after another, rounded each time
  kChunked,   // `step` products in a chain of FP32 FMAs, then added to the accumulator and rounded
  kPairwise,  // a balanced binary tree of FP32 additions over the whole piece
  kExact,     // rounded once
};

// What the accumulator is rounded to: toward zero or to nearest even, and the type.
enum class Rounding : uint8_t { kRzE8M13, kRzFp32, kRneFp32, kRneFp16, kRneBf16 };

struct Machine {
  const char* name;
  Summation summation;
  int step;           // products that are added at once; steps count from the start of a piece
  int fraction_bits;  // kept below the largest exponent
  Rounding rounding;
  int zero_exponent;   // exponent that a term of zero brings into the alignment
  bool fp16_operands;  // operands are converted to FP16 first, and align as FP16 values do
  bool scales_inside;  // a step multiplies by its two E8M0 scales, one pair for every 32 products
  bool fnuz_operands;  // FNUZ codes are accepted beside the OCP formats
  bool ignores_interval;  // an FP32 accumulator or better: promotion_interval changes nothing
};

std::span<const Machine> Machines();
const Machine* FindMachine(std::string_view name);  // null if there is none

// k that one pair of E8M0 scales covers (OCP Microscaling Formats 1.0).
inline constexpr int kMxBlock = 32;

}  // namespace jax_fp8
