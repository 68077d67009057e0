// Times the loops of cpu/peaks.h.
#include <chrono>
#include <new>
#include <stdexcept>
#include <string_view>

#include "handlers/peaks.h"

namespace jax_fp8 {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

const Peak& Find(std::string_view name, std::string_view unit) {
  for (const Peak& peak : Peaks()) {
    if (name != peak.name || unit != peak.unit) continue;
    const std::string reason = peak.why_not();
    if (!reason.empty()) throw std::invalid_argument(std::string(name) + ": " + reason);
    return peak;
  }
  throw std::invalid_argument("there is no peak '" + std::string(name) + "' that counts " +
                              std::string(unit) + "s");
}

}  // namespace

std::vector<std::vector<std::string>> PeakTable() {
  std::vector<std::vector<std::string>> table;
  for (const Peak& peak : Peaks()) {
    table.push_back({peak.name, peak.unit, peak.instruction, peak.why_not()});
  }
  return table;
}

std::pair<double, double> MeasureMultiply(const std::string& name, double seconds) {
  const Peak& peak = Find(name, "FLOP");
  constexpr int64_t kRounds =
      10000;               // at most a few hundred microseconds, far above a clock's tick
  peak.multiply(kRounds);  // the clock frequency settles
  double flops = 0;
  const double begin = Now();
  double elapsed = 0;
  while (elapsed < seconds || flops == 0) {
    flops += static_cast<double>(peak.multiply(kRounds));
    elapsed = Now() - begin;
  }
  return {flops, elapsed};
}

ReadBuffer::ReadBuffer(int64_t size_bytes, bool huge_pages)
    : buffer_(size_bytes < 1 ? throw std::invalid_argument("a buffer has at least one byte")
                             : static_cast<size_t>(size_bytes),
              huge_pages) {
  if (buffer_.data() == nullptr) throw std::bad_alloc();
}

double ReadBuffer::Read(const std::string& name, int64_t first_byte, int64_t num_bytes) const {
  const Peak& peak = Find(name, "byte");
  constexpr int64_t kUnit = kReadBytes;
  if (first_byte < 0 || num_bytes < kUnit || num_bytes > size_bytes() - first_byte ||
      first_byte % kUnit != 0 || num_bytes % kUnit != 0) {
    throw std::invalid_argument("read: bytes " + std::to_string(first_byte) + " to " +
                                std::to_string(first_byte + num_bytes) + " of a buffer of " +
                                std::to_string(size_bytes()) + " are no multiples of 512 in it");
  }
  // Systems reclaim memory that nobody has used for seconds: a byte of each page is read before.
  constexpr int64_t kPageBytes = 4096;
  unsigned touched = 0;
  for (int64_t i = 0; i < num_bytes; i += kPageBytes) {
    touched += std::to_integer<unsigned>(buffer_.data()[first_byte + i]);
  }
  asm volatile("" ::"r"(touched));
  const double begin = Now();
  peak.read(buffer_.data() + first_byte, static_cast<size_t>(num_bytes));
  return Now() - begin;
}

}  // namespace jax_fp8
