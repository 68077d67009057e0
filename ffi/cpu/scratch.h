// Memory that one thread reuses from task to task, so that a call allocates nothing once warm.
#pragma once

#include <cstddef>

namespace jax_fp8 {

class Scratch {
 public:
  // The calling thread's own.
  // NOTE: fetch it once per task and pass pointers on: in a shared library each access to a
  // thread_local is a function call, which would spill every vector register of a kernel.
  static Scratch& OfThisThread();

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  // At least `size_bytes` of undefined content, aligned to a cache line, valid until the next call;
  // null if there is no memory.
  void* Reserve(size_t size_bytes);

 private:
  void* data_ = nullptr;
  size_t capacity_bytes_ = 0;
};

}  // namespace jax_fp8
