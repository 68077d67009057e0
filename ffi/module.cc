// The Python module jax_fp8._ffi: hands XLA's capsules and the kernel tables to Python. No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "handlers/handlers.h"
#include "handlers/peaks.h"

namespace nb = nanobind;

NB_MODULE(_ffi, m) {
  m.def(
      "registrations",
      [] {
        nb::dict targets;
        for (const auto& [target, platform, handler] : jax_fp8::Registrations()) {
          targets[nb::make_tuple(target, platform)] = nb::capsule(handler);
        }
        return targets;
      },
      "(FFI target, XLA platform name) -> capsule of its handler.");
  m.def("ffi_api_version", &jax_fp8::FfiApiVersion,
        "(major, minor) of the XLA FFI headers that this module was built with.");
  m.def("kernels", &jax_fp8::KernelTable,
        "(operation, row name, why this machine cannot run it or '', why it must be asked for or "
        "'') for every row.");
  m.def("explain_gemm", &jax_fp8::ExplainGemm, nb::arg("m"), nb::arg("n"), nb::arg("k"),
        nb::arg("lhs_format"), nb::arg("rhs_format"), nb::arg("out_type"), nb::arg("lhs_layout"),
        nb::arg("rhs_layout"), nb::arg("lhs_tile"), nb::arg("rhs_tile"), nb::arg("accumulation"),
        nb::arg("promotion_interval"), nb::arg("split_k"), nb::arg("kernel"), nb::arg("any_order"),
        "(row name, reason why it refuses or '') for every GEMM row, in order of preference.");
  m.def("fp16_overflow_count", &jax_fp8::Fp16Overflows,
        "Results of FP16 accumulators that were not finite although their operands were.");
  m.def("machines", &jax_fp8::MachineTable,
        "The facts of every accumulation model, as rows of jax_fp8.emulation.machines.");
  m.def("peaks", &jax_fp8::PeakTable,
        "(name, unit, instruction, reason why this machine cannot run it or '') for every peak.");
  m.def("measure_multiply", &jax_fp8::MeasureMultiply, nb::arg("name"), nb::arg("seconds"),
        nb::call_guard<nb::gil_scoped_release>(),
        "(FLOPs, seconds) of an instruction that runs for at least so long on this thread.");
  nb::class_<jax_fp8::ReadBuffer>(m, "ReadBuffer", "Memory whose reading is timed.")
      .def(nb::init<int64_t, bool>(), nb::arg("size_bytes"), nb::arg("huge_pages"))
      .def_prop_ro("size_bytes", &jax_fp8::ReadBuffer::size_bytes)
      .def("read", &jax_fp8::ReadBuffer::Read, nb::arg("name"), nb::arg("first_byte"),
           nb::arg("num_bytes"), nb::call_guard<nb::gil_scoped_release>(),
           "Reads these bytes once, with the loads of a peak; returns the seconds it took.");
}
