"""The error that an FP8 product must have, and how far chance moves it.

The error of a · bᵀ is a sum over k of rank-one terms δa_k bᵀ_k + a_k δbᵀ_k. Rounding errors are
independent, so the terms have signs of their own: the square of the sum is expected to be the sum
of the squares, which for data of mean zero is (eps_a² + eps_b²) · ‖a · bᵀ‖². What chance adds are
the cross terms, whose variance is 2 Σ <term_i, term_j>² over i ≠ j.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["independent_error", "output_error"]

Float64 = npt.NDArray[np.float64]

#: rms error of rounding normal data to nearest, relative, in units of eps (2.65 % for E4M3).
_RMS_PER_EPS: Final = 0.212
EPS: Final = {"float32": 0.0, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def independent_error(
    a: Float64, b: Float64, used_a: Float64, used_b: Float64
) -> tuple[float, float]:
    """‖error‖ of used_a · used_bᵀ if rounding errors are independent, and its relative deviation.

    Args:
      a: (*b, m, k) unquantised operand.
      b: (*b, n, k) unquantised operand.
      used_a: a as it is multiplied.
      used_b: b as it is multiplied.

    >>> rng = np.random.default_rng(0)
    >>> a, b = rng.standard_normal((64, 256)), rng.standard_normal((64, 256))
    >>> used = a + 0.03 * rng.standard_normal(a.shape)
    >>> error, deviation = independent_error(a, b, used, b)
    >>> round(float(np.linalg.norm((used - a) @ b.T)) / error, 1), round(deviation, 2)
    (1.0, 0.01)
    """
    da, db = used_a - a, used_b - b
    squared, variance = 0.0, 0.0
    for at in np.ndindex(*np.broadcast_shapes(a.shape[:-2], b.shape[:-2])):
        rows = np.concatenate([_example(da, at), _example(a, at)], axis=-1)
        cols = np.concatenate([_example(b, at), _example(db, at)], axis=-1)
        inner = (rows.T @ rows) * (cols.T @ cols)
        diagonal = np.diag(inner)
        squared += float(diagonal.sum())
        variance += 2 * float((inner**2).sum() - (diagonal**2).sum())
    if squared == 0:
        return 0.0, 0.0
    return math.sqrt(squared), 0.5 * math.sqrt(variance) / squared


def _example(x: Float64, at: tuple[int, ...]) -> Float64:
    """The matrix of one index of the batch dims, each of which is common or 1."""
    index = tuple(0 if size == 1 else i for size, i in zip(x.shape[:-2], at, strict=True))
    return x[index]


def output_error(dtype: Any, size: float) -> float:
    """‖error‖ of rounding a result of norm `size` to its dtype."""
    return _RMS_PER_EPS * EPS[np.dtype(dtype).name] * size
