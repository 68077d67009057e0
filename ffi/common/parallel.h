// A parallel loop on XLA's own CPU thread pool, and the floating-point environment that every
// worker needs. Kernels know only ParallelFor; they never see XLA.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

namespace jax_fp8 {

// XLA runs CPU handlers with flush-to-zero and denormals-are-zero set, on the calling thread and on
// pool threads. The numbers contract asks for IEEE subnormals, so each thread that computes clears
// both for as long as it works, and gives XLA its mode back.
class IeeeSubnormals {
 public:
#if defined(__x86_64__)
  IeeeSubnormals() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ & ~(kFlushToZero | kDenormalsAreZero));
  }
  ~IeeeSubnormals() { _mm_setcsr(saved_); }
#endif
  IeeeSubnormals(const IeeeSubnormals&) = delete;
  IeeeSubnormals& operator=(const IeeeSubnormals&) = delete;
#if defined(__x86_64__)

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  unsigned saved_;
#else
  IeeeSubnormals() {}
#endif
};

// The body of a loop, by reference: unlike std::function it allocates nothing.
class TaskBody {
 public:
  template <class Body>
  TaskBody(const Body& body)
      : body_(&body),
        call_([](const void* object, int64_t task) { (*static_cast<const Body*>(object))(task); }) {
  }

  void operator()(int64_t task) const { call_(body_, task); }

 private:
  const void* body_;
  void (*call_)(const void* object, int64_t task);
};

// Calls body(task) once for each task in [0, num_tasks), on several threads, and returns when all
// are done. `body` must not throw.
struct ParallelFor {
  int64_t num_threads;  // a hint for choosing the number of tasks; results must not depend on it
  std::function<void(int64_t num_tasks, TaskBody body)> run;

  void operator()(int64_t num_tasks, TaskBody body) const { run(num_tasks, body); }
};

// `Pool` is xla::ffi::ThreadPool (Schedule, num_threads).
template <class Pool>
ParallelFor OnPool(Pool& pool) {
  const int64_t num_threads = std::max<int64_t>(pool.num_threads(), 1);
  auto run = [&pool, num_threads](int64_t num_tasks, TaskBody body) {
    const int64_t num_helpers = std::min(num_threads, num_tasks) - 1;
    if (num_helpers <= 0) {
      const IeeeSubnormals ieee;
      for (int64_t task = 0; task < num_tasks; ++task) body(task);
      return;
    }
    struct State {
      std::atomic<int64_t> next{0}, done{0};
    };
    // Shared, because a helper that starts late may outlive this call; it then finds no task left
    // and touches nothing else.
    auto state = std::make_shared<State>();
    auto drain = [state, num_tasks, body] {
      for (int64_t task; (task = state->next.fetch_add(1)) < num_tasks;) {
        const IeeeSubnormals ieee;
        body(task);
        state->done.fetch_add(1, std::memory_order_acq_rel);
      }
    };
    for (int64_t i = 0; i < num_helpers; ++i) pool.Schedule([drain] { drain(); });
    // NOTE: the caller works too and waits only for tasks already taken: XLA promises neither that
    // a scheduled task ever runs in parallel nor that it starts before this call ends.
    drain();
    while (state->done.load(std::memory_order_acquire) < num_tasks) std::this_thread::yield();
  };
  return {num_threads, std::move(run)};
}

}  // namespace jax_fp8
