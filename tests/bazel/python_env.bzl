"""The headers of the Python that will import the extension: CPython's, nanobind's and those of XLA's FFI.

ffi/CMakeLists.txt asks the same questions; here the interpreter is PYTHON_BIN_PATH, or else python3.
"""

_WHERE = """
import pathlib, sysconfig
import jaxlib, nanobind
print(sysconfig.get_path("include"))
print(nanobind.__path__[0])
print(pathlib.Path(jaxlib.__file__).parent / "include")
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "xla_ffi",
    hdrs = glob(["xla_ffi/xla/ffi/**/*.h"]),
    includes = ["xla_ffi"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    copts = ["-std=c++17", "-Os", "-fvisibility=hidden", "-fno-strict-aliasing", "-w"],
    includes = ["nanobind/include"],
    linkstatic = True,
    textual_hdrs = glob(["nanobind/src/*"]) + glob(["nanobind/ext/robin_map/include/**/*.h"]),
    deps = [":python", ":robin_map"],
)

cc_library(
    name = "robin_map",
    hdrs = glob(["nanobind/ext/robin_map/include/**/*.h"]),
    includes = ["nanobind/ext/robin_map/include"],
)

cc_library(
    name = "python",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)
"""

def _python_env_impl(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH") or ctx.which("python3")
    found = ctx.execute([python, "-c", _WHERE])
    if found.return_code:
        fail("%s cannot import nanobind and jaxlib: %s" % (python, found.stderr))
    cpython, nanobind, xla_ffi = found.stdout.splitlines()
    ctx.symlink(cpython, "python")
    ctx.symlink(nanobind, "nanobind")
    ctx.symlink(xla_ffi, "xla_ffi")
    ctx.file("BUILD", _BUILD)

python_env = repository_rule(
    implementation = _python_env_impl,
    doc = "A repository with the cc_library targets :nanobind and :xla_ffi.",
    environ = [
        "PYTHON_BIN_PATH",
        "PATH",
    ],
    configure = True,
)
