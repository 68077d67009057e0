"""FP16 accumulators overflow: a warning while tracing, and a count while running."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jax_fp8 import _ffi
from jax_fp8.emulation.machines import MACHINES

if TYPE_CHECKING:
    from jax_fp8.config import Execution

__all__ = ["OverflowCount", "OverflowWarning", "count_overflows", "warn_of_overflow"]


class OverflowWarning(UserWarning):
    """An accumulator's range is too small for the scales in use."""


class OverflowCount:
    """How many results overflowed since the context was entered, or within it once it is left."""

    def __init__(self) -> None:
        self._start = _ffi.fp16_overflow_count()
        self._end: int | None = None

    @property
    def count(self) -> int:
        end = _ffi.fp16_overflow_count() if self._end is None else self._end
        return end - self._start

    def _stop(self) -> None:
        self._end = _ffi.fp16_overflow_count()


@contextlib.contextmanager
def count_overflows() -> Iterator[OverflowCount]:
    """Counts results of FP16 accumulators that are infinite or NaN although no operand is.

    It counts what the whole process computes inside the context, jitted or not. JAX computes
    asynchronously: wait with `jax.block_until_ready` before you leave the context.

    Yields:
      OverflowCount, whose `count` is the number so far.

    >>> import jax, jax.numpy as jnp, jax_fp8 as fp8
    >>> x = jnp.full((4, 32), 448.0)
    >>> with count_overflows() as overflows:
    ...     _ = jax.block_until_ready(
    ...         fp8.matmul(x, x.T, recipe=fp8.StaticScaling(), accumulation="fp16")
    ...     )
    >>> overflows.count
    16
    """
    overflows = OverflowCount()
    try:
        yield overflows
    finally:
        overflows._stop()


def warn_of_overflow(executions: Iterable[Execution], call: str) -> None:
    """Warns, at the user's line, if a GEMM accumulates in FP16."""
    names = {execution.accumulation for execution in executions}
    short = sorted(name for name in names if name in MACHINES and MACHINES[name].is_fp16)
    if short:
        warnings.warn(
            f"{call}: sums of {', '.join(short)} overflow beyond 65504; with scales of amax / 448 "
            "one product may reach 200704 and most sums are infinite. Leave room in the scales "
            "with StaticScaling or quantize(scale=...), and count what overflows with "
            "emulation.count_overflows()",
            OverflowWarning,
            stacklevel=_outside_the_package(),
        )


def _outside_the_package() -> int:
    """`stacklevel` that makes a warning of our caller point at the first line that is not ours."""
    package = str(Path(__file__).parents[1])
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level
