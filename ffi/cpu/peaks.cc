#include "cpu/peaks.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu/features.h"

namespace jax_fp8 {
namespace {

struct ScalarFma {
  using Vec = float;
  static constexpr int kChains = 8;
  static constexpr int kFlops = 2;
  static Vec Set(float value) { return value; }
  // What the scalar row multiplies with: a function of the C library where the baseline of the
  // architecture has no FMA.
  static Vec MulAdd(Vec a, Vec b, Vec sum) { return std::fma(a, b, sum); }
};

struct ScalarLoad {
  using Vec = uint64_t;
  static Vec Zero() { return 0; }
  static Vec OrLoad(Vec found, const std::byte* data) {
    uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return found | word;
  }
};

std::string Always() { return ""; }

std::string WhyNot(const PeakLoops* loops, bool has, const std::string& isa) {
  if (loops == nullptr) {
    return "this build has no " + isa + " code (the compiler or the target does not know it)";
  }
  return has ? "" : "this CPU has no " + isa + ", or the system does not save its registers";
}

std::string WhyNotAmx() { return WhyNot(PeakLoopsAmx(), Features().amx_bf16, "AMX-BF16"); }
std::string WhyNotAvx512Bf16() {
  return WhyNot(PeakLoopsAvx512Bf16(), Features().avx512_bf16, "AVX512_BF16");
}
std::string WhyNotAvx512() { return WhyNot(PeakLoopsAvx512(), Features().avx512, "AVX-512"); }
std::string WhyNotAvx2() { return WhyNot(PeakLoopsAvx2(), Features().avx2, "AVX2"); }

template <const PeakLoops* (*loops)()>
int64_t Multiply(int64_t rounds) {
  return loops()->multiply(rounds);
}

template <const PeakLoops* (*loops)()>
void Read(const std::byte* data, size_t size_bytes) {
  loops()->read(data, size_bytes);
}

constexpr Peak kPeaks[] = {
    {"amx", "FLOP", "tdpbf16ps", WhyNotAmx, Multiply<PeakLoopsAmx>, nullptr},
    {"avx512bf16", "FLOP", "vdpbf16ps zmm", WhyNotAvx512Bf16, Multiply<PeakLoopsAvx512Bf16>,
     nullptr},
    {"avx512", "FLOP", "vfmadd231ps zmm", WhyNotAvx512, Multiply<PeakLoopsAvx512>, nullptr},
    {"avx2", "FLOP", "vfmadd231ps ymm", WhyNotAvx2, Multiply<PeakLoopsAvx2>, nullptr},
    {"scalar", "FLOP", "fma of one float", Always, MultiplyLoop<ScalarFma>, nullptr},
    {"read_avx512", "byte", "zmm load", WhyNotAvx512, nullptr, Read<PeakLoopsAvx512>},
    {"read_avx2", "byte", "ymm load", WhyNotAvx2, nullptr, Read<PeakLoopsAvx2>},
    {"read_scalar", "byte", "plain loads", Always, nullptr, ReadLoop<ScalarLoad>},
};

}  // namespace

std::span<const Peak> Peaks() { return kPeaks; }

void PeakBuffer::Free::operator()(std::byte* data) const { std::free(data); }

PeakBuffer::PeakBuffer(size_t size_bytes, [[maybe_unused]] bool huge_pages) {
  constexpr size_t kHugePageBytes = size_t{2} << 20;
  const size_t rounded_bytes = (size_bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(kHugePageBytes, rounded_bytes)));
  if (data_ == nullptr) return;
#if defined(__linux__)
  if (huge_pages) madvise(data_.get(), rounded_bytes, MADV_HUGEPAGE);  // only advice: may fail
#endif
  // Memory that was never written is one page of zeros, read from the cache.
  std::memset(data_.get(), 1, rounded_bytes);
  size_bytes_ = rounded_bytes;
}

}  // namespace jax_fp8
