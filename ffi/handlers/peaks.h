// The machine's peaks for module.cc. No XLA: threads that measure together are the caller's.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cpu/peaks.h"

namespace jax_fp8 {

// One entry per peak: name, unit ("FLOP" or "byte"), instruction, why this machine cannot run it or
// "".
std::vector<std::vector<std::string>> PeakTable();

// Runs the multiplications of a peak on this thread until `seconds` have passed; returns FLOPs and
// seconds. Throws std::invalid_argument if there is no such peak or it cannot run here.
std::pair<double, double> MeasureMultiply(const std::string& name, double seconds);

class ReadBuffer {
 public:
  // Throws std::bad_alloc, std::invalid_argument.
  ReadBuffer(int64_t size_bytes, bool huge_pages);

  int64_t size_bytes() const { return static_cast<int64_t>(buffer_.size_bytes()); }

  // Seconds of one pass over whole multiples of 512 bytes. Throws std::invalid_argument if the
  // bytes are not all in the buffer, or for a peak that cannot run.
  double Read(const std::string& name, int64_t first_byte, int64_t num_bytes) const;

 private:
  PeakBuffer buffer_;
};

}  // namespace jax_fp8
