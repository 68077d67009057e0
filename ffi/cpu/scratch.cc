#include "cpu/scratch.h"

#include <cstdlib>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_fp8 {

Scratch& Scratch::OfThisThread() {
  thread_local Scratch scratch;
  return scratch;
}

Scratch::~Scratch() { std::free(data_); }

void* Scratch::Reserve(size_t size_bytes) {
  if (size_bytes <= capacity_bytes_) return data_;
  // Whole 2 MB pages: packed panels and tiles would otherwise take hundreds of TLB entries.
  constexpr size_t kHugePageBytes = size_t{2} << 20;
  const size_t rounded_bytes = (size_bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  std::free(data_);
  data_ = std::aligned_alloc(kHugePageBytes, rounded_bytes);
  capacity_bytes_ = data_ == nullptr ? 0 : rounded_bytes;
#if defined(__linux__)
  if (data_ != nullptr) madvise(data_, rounded_bytes, MADV_HUGEPAGE);  // only advice: may fail
#endif
  return data_;
}

}  // namespace jax_fp8
