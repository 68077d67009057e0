// The loops behind the peaks, over a trait of one ISA. The traits have names of their own, so that
// no two ISA files instantiate the same template. Nothing of the standard library with code in it
// is included: a copy compiled with an ISA's flags could end up in all others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace jax_fp8 {

// Sizes of reads are multiples of this.
inline constexpr size_t kReadBytes = 512;

// The loops of one ISA; null where the build has no code for it.
struct PeakLoops {
  int64_t (*multiply)(int64_t rounds);
  void (*read)(const std::byte* data, size_t size_bytes);  // null: the ISA brings no wider loads
};
const PeakLoops* PeakLoopsAmx();
const PeakLoops* PeakLoopsAvx512Bf16();
const PeakLoops* PeakLoopsAvx512();
const PeakLoops* PeakLoopsAvx2();

// Keeps a value in a register where the compiler has one for it, and out of its sight.
template <class T>
[[gnu::always_inline]] inline void Opaque(T& value) {
  if constexpr (std::is_integral_v<T>) {
    asm volatile("" : "+r"(value));
  } else {
#if defined(__x86_64__)
    asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(value));
#else
    asm volatile("" : "+m"(value));
#endif
  }
}

template <class Op, size_t... i>
[[gnu::always_inline]] inline int64_t Chains(int64_t rounds, std::index_sequence<i...>) {
  // A sum falls by 3/8 each time: it stays finite and normal, however long the loop.
  typename Op::Vec a = Op::Set(-0.25f), b = Op::Set(1.5f), sums[] = {(void(i), Op::Set(1.0f))...};
  Opaque(a);
  Opaque(b);
  for (int64_t round = 0; round < rounds; ++round) {
    ((sums[i] = Op::MulAdd(a, b, sums[i])), ...);
    (Opaque(sums[i]), ...);
  }
  return rounds * Op::kFlops * static_cast<int64_t>(sizeof...(i));
}

// More independent chains than latency times the number of units, all in registers.
template <class Op>
int64_t MultiplyLoop(int64_t rounds) {
  return Chains<Op>(rounds, std::make_index_sequence<Op::kChains>());
}

// Four places at once, each fetched ahead: a single stream stops at every 4 KB, where hardware
// prefetchers end, and reads DRAM a fifth slower.
template <class Op>
void ReadLoop(const std::byte* data, size_t size_bytes) {
  constexpr size_t kStreams = 4, kAheadBytes = 1024;
  constexpr size_t kBytes = sizeof(typename Op::Vec), kStepBytes = kReadBytes / kStreams;
  const size_t stream_bytes = size_bytes / kStreams;
  typename Op::Vec found[] = {Op::Zero(), Op::Zero(), Op::Zero(), Op::Zero()};
  for (size_t step = 0; step < stream_bytes; step += kStepBytes) {
#pragma GCC unroll 4
    for (size_t stream = 0; stream < kStreams; ++stream) {
      const std::byte* from = data + stream * stream_bytes + step;
      __builtin_prefetch(from + kAheadBytes);
      __builtin_prefetch(from + kAheadBytes + 64);
#pragma GCC unroll 16
      for (size_t i = 0; i < kStepBytes / kBytes; ++i) {
        found[stream] = Op::OrLoad(found[stream], from + i * kBytes);
      }
    }
  }
  for (auto& part : found) Opaque(part);
}

}  // namespace jax_fp8
