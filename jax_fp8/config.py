"""Contexts and environment variables: which kernel runs, and whether a fallback is allowed.

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
from typing import Final

import jax

from jax_fp8 import _ffi

__all__ = ["emulate", "force_kernel", "require_kernel"]

REQUIRE_KERNEL_VARIABLE: Final = "JAX_FP8_REQUIRE_KERNEL"
FORCE_KERNEL_VARIABLE: Final = "JAX_FP8_FORCE_KERNEL"

#: Accumulation models that exist. "native" is whatever the platform's kernel does (on CPU: "fp32").
ACCUMULATIONS: Final = ("native", "fp32")


class Unset:
    """Type of `UNSET`, the default of arguments that a context or a recipe may also give."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a GEMM is carried out: static parameters of the primitives.

    Attributes:
      kernel: name of the kernel row to use, "" for the first that accepts.
      require_kernel: whether a platform without a kernel is an error instead of the reference.
      accumulation: model of the accumulator, one of `ACCUMULATIONS`.
      promotion_interval: k after which a short accumulator is added to FP32; 0 is never.
    """

    kernel: str = ""
    require_kernel: bool = False
    accumulation: str = "native"
    promotion_interval: int = 0


_DEFAULT = Execution()
_context = jax.make_user_context(_DEFAULT)


def current(
    accumulation: str | Unset = UNSET,
    promotion_interval: int | Unset | None = UNSET,
    *,
    call: str = "jax_fp8",
) -> Execution:
    """Resolves explicit argument > context > environment > default."""
    execution: Execution = _context.value
    changes: dict[str, object] = {}
    if not execution.kernel and (name := os.environ.get(FORCE_KERNEL_VARIABLE, "")):
        changes["kernel"] = _check_kernel(name, f"{call}: {FORCE_KERNEL_VARIABLE}")
    if not execution.require_kernel:
        changes["require_kernel"] = os.environ.get(REQUIRE_KERNEL_VARIABLE, "0") not in ("", "0")
    if not isinstance(accumulation, Unset):
        changes["accumulation"] = check_accumulation(accumulation, call)
    if not isinstance(promotion_interval, Unset):
        changes["promotion_interval"] = _check_interval(promotion_interval, call)
    return dataclasses.replace(execution, **changes)  # type: ignore[arg-type]


def check_accumulation(accumulation: str, call: str) -> str:
    """Returns `accumulation` if the model exists, else raises naming those that do."""
    if accumulation not in ACCUMULATIONS:
        raise NotImplementedError(
            f"{call}: there is no accumulation model {accumulation!r}; "
            f"available: {', '.join(ACCUMULATIONS)}"
        )
    return accumulation


def _check_interval(interval: int | None, call: str) -> int:
    """Returns the interval as the primitives want it (0 is never), or raises."""
    if interval is None:
        return 0
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ValueError(
            f"{call}: promotion_interval is {interval!r}; it must be None or an integer >= 1"
        )
    return interval


@contextlib.contextmanager
def _changed(**changes: object) -> Iterator[None]:
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


def emulate(
    accumulation: str, *, promotion_interval: int | None = None
) -> AbstractContextManager[None]:
    """Computes every GEMM with the accumulator of some hardware.

    Args:
      accumulation: name of the accumulation model. Only "native" and "fp32" exist so far.
      promotion_interval: k after which partial sums are added to an FP32 accumulator, or None.

    Raises:
      NotImplementedError: there is no such model.
    """
    check_accumulation(accumulation, "emulate")
    return _changed(
        accumulation=accumulation, promotion_interval=_check_interval(promotion_interval, "emulate")
    )
