// The machine's own limits: how fast an instruction multiplies, and how fast memory is read. What a
// kernel reaches is quoted as a share of these, measured in the same process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cpu/peak_loops.h"

namespace jax_fp8 {

// A loop of one instruction, or of loads. The name is that of the GEMM row that rests on it.
struct Peak {
  const char* name;
  const char* unit;         // what is counted: "FLOP" or "byte"
  const char* instruction;  // that does the work
  // Empty: this machine and this build can run the loop. Otherwise one sentence.
  std::string (*why_not)();
  // Does `rounds` of independent chains of the instruction; returns the FLOPs. Null for reads.
  int64_t (*multiply)(int64_t rounds);
  // Reads all of the memory once, a whole number of kReadBytes. Null for multiplications.
  void (*read)(const std::byte* data, size_t size_bytes);
};

// Every loop of this architecture, the fastest first of each unit.
std::span<const Peak> Peaks();

// Memory to read, every byte of it written once.
class PeakBuffer {
 public:
  // `size_bytes` is rounded up to 2 MB. `huge_pages`: ask for pages of 2 MB; else the pages are
  // what the allocator gives to any array. Empty if there is no such memory.
  PeakBuffer(size_t size_bytes, bool huge_pages);

  const std::byte* data() const { return data_.get(); }
  size_t size_bytes() const { return size_bytes_; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_bytes_ = 0;
};

}  // namespace jax_fp8
