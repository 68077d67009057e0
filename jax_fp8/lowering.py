"""From primitives to XLA: kernels where the platform has them, the jnp reference elsewhere.

Handlers are registered when the first call is lowered, after a comparison of FFI versions: a
handler built with newer headers than the runtime's would make XLA refuse the whole CPU backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jaxlib.version
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_fp8 import _compat, _ffi
from jax_fp8.config import REQUIRE_KERNEL_VARIABLE, Execution

__all__ = [
    "KernelRow",
    "Targets",
    "emulation_refusals",
    "kernel_table",
    "register",
    "register_lowerings",
    "row_name",
]

#: XLA's platform names of the kernels that exist, by the names that users see.
PLATFORMS: Final = {"cpu": "cpu"}


class KernelRow(NamedTuple):
    """A row of the kernel table of this build."""

    operation: str
    name: str
    why_not: str  # "" where this machine can run it
    unless_asked: str = ""  # why it is not chosen unless it is forced; "" where it may be


@functools.cache
def kernel_table() -> tuple[KernelRow, ...]:
    """Every kernel row of this build, in order of preference, with why this machine refuses it."""
    return tuple(KernelRow(*row) for row in _ffi.kernels())


@functools.cache
def emulation_refusals(machine: str) -> dict[str, str]:
    """Why each row of the table "emulate" refuses to emulate `machine`, "" where it doesn't."""
    tile = (1, 32)
    request = (
        1, 1, 32, "e4m3fn", "e4m3fn", "f32", "mk", "nk", tile, tile, machine, 0, 2, "", False,
    )  # fmt: skip
    return dict(_ffi.explain_gemm(*request))


@functools.cache
def register() -> None:
    """Registers the FFI handlers with XLA.

    Happens by itself when a call of this package is first lowered. Call it in a process that runs
    an executable or an exported function in which jax_fp8 calls are already lowered.

    Raises:
      ImportError: this build of jax_fp8 needs a newer jaxlib.
    """
    built, runtime = _ffi.ffi_api_version(), _compat.runtime_ffi_api_version()
    if built > runtime:
        raise ImportError(
            f"jax_fp8 was built with XLA FFI API {built[0]}.{built[1]}, but jaxlib "
            f"{jaxlib.version.__version__} offers {runtime[0]}.{runtime[1]}; upgrade jaxlib, or "
            "rebuild jax_fp8 against this one with 'pip install --no-build-isolation .'"
        )
    for (target, platform), handler in _ffi.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform=platform)


Targets = Callable[..., tuple[str, dict[str, Any]]]


def register_lowerings(
    primitive: Primitive, operation: str, target: Targets, reference: Callable[..., Any]
) -> None:
    """Gives `primitive` a rule per platform.

    Args:
      primitive: a primitive with a parameter `execution`.
      operation: name of its kernel table: "gemm" or "quantize".
      target: maps the primitive's parameters and `num_operands` to the FFI target and attributes.
      reference: the same function in jnp.
    """

    def kernel_rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        register()
        name, attributes = target(num_operands=len(operands), **params)
        execution: Execution = params["execution"]
        table = execution.operation if operation == "gemm" else operation
        attributes["kernel"] = row_name(table, execution)
        return jax.ffi.ffi_lowering(name)(ctx, *operands, **attributes)

    def reference_rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        execution: Execution = params["execution"]
        what = f"{primitive} on {', '.join(aval.str_short() for aval in ctx.avals_in)}"
        platforms = "/".join(ctx.module_context.platforms)
        if operation == "gemm" and execution.operation == "emulate":
            raise NotImplementedError(
                f"{what}: accumulation {execution.accumulation!r} is emulated by CPU kernels only, "
                f"and this is the platform {platforms}: run it under "
                "jax.default_device(jax.devices('cpu')[0])"
            )
        if execution.require_kernel:
            raise NotImplementedError(
                f"{what}: there is no kernel for the platform {platforms}; kernels "
                f"exist for {', '.join(PLATFORMS)}. The jnp reference would run here, but "
                f"{REQUIRE_KERNEL_VARIABLE}=1 or require_kernel() forbids it"
            )
        if execution.kernel:
            raise NotImplementedError(
                f"{what}: kernel {execution.kernel!r} was forced, but there is no kernel for the "
                f"platform {platforms}; kernels exist for {', '.join(PLATFORMS)}"
            )
        lower = mlir.lower_fun(reference, multiple_results=primitive.multiple_results)
        return lower(ctx, *operands, **params)

    mlir.register_lowering(primitive, reference_rule)
    for platform in PLATFORMS.values():
        mlir.register_lowering(primitive, kernel_rule, platform=platform)


def row_name(operation: str, execution: Execution) -> str:
    """The forced row if this operation has one of that name, else "" (the first that accepts)."""
    rows = {row.name for row in kernel_table() if row.operation == operation}
    return execution.kernel if execution.kernel in rows else ""
