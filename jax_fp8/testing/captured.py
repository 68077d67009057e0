"""The values that the FP8 GEMMs of a function really multiply, for checks on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jax_fp8.contraction import Contraction
from jax_fp8.diagnosis import capture

__all__ = ["Values", "values_of"]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


class Values(NamedTuple):
    """Operands and cotangent of one GEMM.

    Attributes:
      lhs: (batch or 1, m, k).
      rhs: (batch or 1, n, k).
      g: (batch, m, n), None where no gradient was seen.
    """

    lhs: Array
    rhs: Array
    g: Array | None

    def laid_out(
        self, c: Contraction, lhs: Any, rhs: Any
    ) -> tuple[Array, Array, Array | None] | None:
        """lhs, rhs and g as a contraction of these shapes and dtypes takes them.

        Returns:
          None if they are those of another GEMM, or if nothing can be learnt from them: zeros only,
          or values that are not finite.
        """
        sides = []
        for x, aval, axis in ((self.lhs, lhs, c.axes[0]), (self.rhs, rhs, c.axes[1])):
            batch, matrix = aval.shape[:-2], aval.shape[-2:]
            if x.shape != (math.prod(batch), *(matrix if axis == -1 else matrix[::-1])):
                return None
            if not np.isfinite(x).all() or not x.any():
                return None
            x = x.reshape(*batch, *x.shape[-2:])
            sides.append((x if axis == -1 else np.swapaxes(x, -1, -2)).astype(aval.dtype))
        batch = np.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
        g = self.g
        if g is not None and (g.shape[0] != math.prod(batch) or not np.isfinite(g).all()):
            g = None
        if g is not None and g.any():
            return sides[0], sides[1], g.reshape(*batch, *g.shape[-2:])
        return sides[0], sides[1], None


def values_of(fn: Callable[..., Any], *args: Any) -> list[Values]:
    """Runs fn and its gradient once; the values of every forward GEMM whose operands were seen."""
    gemms = capture.capture(fn, *args).gemms
    found = []
    for gemm in gemms:
        if gemm.direction == "forward" and gemm.lhs.exact is not None:
            if gemm.rhs.exact is None:
                continue
            roles = gemm.lhs.role, gemm.rhs.role
            shape = gemm.lhs.exact.shape[-2], gemm.rhs.exact.shape[-2]
            own = (other for other in gemms if other.layer == gemm.layer)
            g = next(_cotangents(own, roles, shape), None)
            found.append(Values(gemm.lhs.exact, gemm.rhs.exact, g))
    return found


def _cotangents(
    gemms: Iterator[capture.Gemm], roles: tuple[str, str], shape: Shape
) -> Iterator[Array]:
    """Cotangents (batch, m, n) among the operands of the gradients' GEMMs.

    The gradient of lhs contracts n, that of rhs m. Which it is the role says, or else the shape.
    """
    for gemm in gemms:
        for x in (gemm.lhs, gemm.rhs):
            if x.role != "gradient" or x.exact is None:
                continue
            of_weight = gemm.direction == "wgrad"
            if roles == ("input", "weight"):
                turned = of_weight
            elif shape[0] != shape[1]:
                turned = x.exact.shape[-2:] != shape
            else:
                continue
            yield np.swapaxes(x.exact, -1, -2) if turned else x.exact
