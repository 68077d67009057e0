// A kernel is a row of a table: a name, a sentence on why it refuses a request, and its entry
// point. Pick takes the first row that accepts; when none does, the error carries every row's
// reason.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace jax_fp8 {

template <class Desc, class RunFn>
struct Kernel {
  const char* name;
  // Empty: this machine and this build can run the row for `desc`. Otherwise one sentence.
  std::string (*why_not)(const Desc& desc);
  RunFn run;
};

// Returns the row that takes `desc`, or null with `*error` naming every row's reason. `forced` is a
// row's name, or empty for the first that accepts.
template <class Desc, class RunFn>
const Kernel<Desc, RunFn>* Pick(std::span<const Kernel<Desc, RunFn>> rows, const Desc& desc,
                                std::string_view forced, std::string* error) {
  std::string reasons;
  for (const auto& row : rows) {
    if (!forced.empty() && forced != row.name) continue;
    std::string reason = row.why_not(desc);
    if (reason.empty()) return &row;
    reasons += std::string(reasons.empty() ? "" : "; ") + row.name + ": " + reason;
  }
  if (reasons.empty()) reasons = "there is no row named '" + std::string(forced) + "'";
  *error = "no kernel takes (" + ToString(desc) + "): " + reasons;
  return nullptr;
}

}  // namespace jax_fp8
