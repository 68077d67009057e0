"""Contexts and environment variables: which kernel runs, how it accumulates, whether a fallback is
allowed.

The contexts are one `jax.make_user_context`, so their state is part of jit's cache key: a jitted
function is traced again inside a context. A function compiled ahead of time keeps what it has.
Public calls read the state once, when they are traced, and pass it on as static parameters; so a
gradient taken outside a context still follows the forward call that was traced inside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import jax

from jax_fp8 import _ffi
from jax_fp8.accumulation import UNSET, PerGemm, Sums, Unset, check_interval
from jax_fp8.emulation.machines import MACHINES

__all__ = ["deterministic", "emulate", "force_kernel", "require_kernel"]

REQUIRE_KERNEL_VARIABLE: Final = "JAX_FP8_REQUIRE_KERNEL"
FORCE_KERNEL_VARIABLE: Final = "JAX_FP8_FORCE_KERNEL"
DETERMINISTIC_VARIABLE: Final = "JAX_FP8_DETERMINISTIC"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a GEMM is carried out: static parameters of the primitives.

    Attributes:
      kernel: name of the kernel row to use, "" for the first that accepts.
      require_kernel: whether a platform without a kernel is an error instead of the reference.
      deterministic: whether only kernels are chosen that add up in the order of the numbers
        contract, so that bits do not depend on the machine.
      accumulation: "native", or an accumulation model of `emulation.MACHINES`.
      promotion_interval: k after which the accumulator is added to an FP32 sum; 0 is never.
      split_k: parts of k that are added up apart from each other, and at the end in FP32.
    """

    kernel: str = ""
    require_kernel: bool = False
    deterministic: bool = True
    accumulation: str = "native"
    promotion_interval: int = 0
    split_k: int = 1

    @property
    def operation(self) -> str:
        """Name of the kernel table that a GEMM with these parameters goes to."""
        native = self.accumulation == "native" or (
            self.accumulation == "fp32" and self.split_k == 1
        )
        return "gemm" if native else "emulate"

    @property
    def without_sums(self) -> Execution:
        """The same for an operation that adds nothing up."""
        return Execution(kernel=self.kernel, require_kernel=self.require_kernel)


@dataclasses.dataclass(frozen=True)
class _State:
    kernel: str = ""
    require_kernel: bool = False
    deterministic: bool | None = None
    sums: Sums = dataclasses.field(default_factory=Sums)


_context = jax.make_user_context(_State())


def without_sums(call: str) -> Execution:
    """Resolves context > environment > default for an operation that adds nothing up."""
    state: _State = _context.value
    kernel, required = state.kernel, state.require_kernel
    if not kernel and (name := os.environ.get(FORCE_KERNEL_VARIABLE, "")):
        kernel = _check_kernel(name, f"{call}: {FORCE_KERNEL_VARIABLE}")
    if not required:
        required = os.environ.get(REQUIRE_KERNEL_VARIABLE, "0") not in ("", "0")
    order = state.deterministic
    if order is None:
        order = os.environ.get(DETERMINISTIC_VARIABLE, "1") not in ("", "0")
    return Execution(kernel=kernel, require_kernel=required, deterministic=order)


def executions(
    sums: Sums | None = None, recipe: Sums | None = None, *, call: str = "jax_fp8"
) -> PerGemm[Execution]:
    """Resolves explicit argument > context > recipe > environment or the model's default.

    Args:
      sums: what the call was given.
      recipe: what its recipe says.
      call: name of the public function, for messages.

    Raises:
      ValueError: no such accumulation model or kernel, a promotion interval that is no multiple of
        the model's step, or a split k without a model.
    """
    state: _State = _context.value
    kernel = without_sums(call)
    given = [s.checked(call) for s in (sums, state.sums, recipe) if s is not None]
    resolved = []
    for gemm in PerGemm._fields:
        accumulation = _first((s.accumulation for s in given), gemm, "native")
        machine = MACHINES.get(accumulation)
        default = None if machine is None else machine.default_interval
        interval = _first((s.promotion_interval for s in given), gemm, default)
        check_interval(accumulation, interval, call)
        split_k = _first((s.split_k for s in given), gemm, 1)
        if split_k > 1 and machine is None:
            raise ValueError(
                f"{call}: split_k is {split_k}, but native kernels add all k in order: name an "
                "accumulation model to emulate, such as accumulation='fp32'"
            )
        resolved.append(
            dataclasses.replace(
                kernel,
                accumulation=accumulation,
                promotion_interval=interval or 0,
                split_k=split_k,
            )
        )
    return PerGemm(*resolved)


def _first(values: Iterator[Any], gemm: str, default: Any) -> Any:
    """The first value that is given for this GEMM."""
    for value in values:
        if isinstance(value, PerGemm):
            value = getattr(value, gemm)
        if not isinstance(value, Unset):
            return value
    return default


@contextlib.contextmanager
def _changed(**changes: Any) -> Iterator[None]:
    value = dataclasses.replace(_context.value, **changes)
    with _context(value):
        yield


def force_kernel(name: str) -> AbstractContextManager[None]:
    """Runs every operation that has a kernel row of this name on that row.

    Args:
      name: a row of `python -m jax_fp8 info`, such as "scalar" or "avx512bf16". A GEMM that the row
        refuses is an error; operations without such a row choose as usual.

    Raises:
      ValueError: no operation has a row of this name.

    >>> import jax.numpy as jnp, jax_fp8 as fp8
    >>> with fp8.force_kernel("scalar"):
    ...     y = fp8.matmul(jnp.ones((2, 3)), jnp.ones((3, 4)))
    """
    return _changed(kernel=_check_kernel(name, "force_kernel"))


def _check_kernel(name: str, call: str) -> str:
    """Returns `name` if some operation has a kernel row of that name, else raises."""
    names = sorted({row[1] for row in _ffi.kernels()})
    if name not in names:
        raise ValueError(f"{call}: there is no kernel {name!r}; there are {', '.join(names)}")
    return name


def require_kernel() -> AbstractContextManager[None]:
    """Makes a platform without a kernel an error, instead of running the jnp reference there.

    The environment variable JAX_FP8_REQUIRE_KERNEL=1 does the same for the whole process.
    """
    return _changed(require_kernel=True)


def deterministic(enabled: bool) -> AbstractContextManager[None]:
    """Whether only kernels are chosen whose sums have the same bits on every machine: the default.

    `deterministic(False)` also offers rows that add up in an order of their own, and are faster:
    on CPUs with AMX tiles the row "amx", from five rows of lhs on. Their bits still are the same
    from run to run and for any number of threads. The environment variable
    JAX_FP8_DETERMINISTIC=0 does the same for the whole process.

    >>> import jax.numpy as jnp, jax_fp8 as fp8
    >>> with fp8.deterministic(False):
    ...     y = fp8.matmul(jnp.ones((8, 3)), jnp.ones((3, 4)))
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"deterministic: enabled is {enabled!r}; it must be True or False")
    return _changed(deterministic=enabled)


def emulate(
    accumulation: str | PerGemm[Any],
    *,
    promotion_interval: int | Unset | PerGemm[Any] | None = UNSET,
    split_k: int | Unset | PerGemm[Any] = UNSET,
) -> AbstractContextManager[None]:
    """Computes every GEMM with the accumulator of some machine, bit for bit, on a CPU.

    A jitted function is traced again inside the context; one that was compiled ahead of time keeps
    what it has. Arguments of a call go before the context, the context before a recipe.

    Args:
      accumulation: name of a model of `emulation.MACHINES`, such as "hopper_wgmma", or "native" for
        the platform's own kernel; or a `PerGemm` of names for forward pass and gradients.
      promotion_interval: k after which the accumulator is added to an FP32 sum and starts again
        from zero, a multiple of the model's step; None is never. Left out: the recipe's, else the
        model's default (128 for Hopper's wgmma). Sums start anew at tile edges along k in any case.
      split_k: parts of k (cut at multiples of 128) that are added up apart from each other, and at
        the end in FP32.

    Raises:
      ValueError: there is no such model, or a value that does not fit.

    >>> import jax.numpy as jnp, jax_fp8 as fp8
    >>> x = jnp.array([[15.0, 0.125]]); w = jnp.array([[15.0], [0.0625]])
    >>> scale_one = fp8.StaticScaling()
    >>> float(fp8.matmul(x, w, recipe=scale_one)[0, 0])
    225.0078125
    >>> with fp8.emulate("hopper_wgmma"):
    ...     float(fp8.matmul(x, w, recipe=scale_one)[0, 0])
    225.0
    """
    sums = Sums(accumulation, promotion_interval, split_k).checked("emulate")
    return _changed(sums=sums)
