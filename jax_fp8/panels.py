"""Panels: how prepared weights lie in memory.

The codes (*b, k, n) lie as (*b, ceil(n / 64), k, 64): panels of 64 columns, one after another, so
that a kernel which needs a few columns and all of k reads memory strictly in order. Missing columns
of the last panel are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["PANEL_COLS", "by_bytes", "from_panels", "matrix_shape", "num_panels", "to_panels"]

Array = jax.Array
Shape = tuple[int, ...]

#: Columns of a panel: a cache line of codes, kPanelCols of ffi/common/gemm_desc.h.
PANEL_COLS: Final = 64


def num_panels(n: int) -> int:
    """Panels that hold n columns."""
    return -(-n // PANEL_COLS)


def matrix_shape(panels: Shape, n: int) -> Shape:
    """(*b, k, n) of panels of shape (*b, ceil(n / 64), k, 64)."""
    return (*panels[:-3], panels[-2], n)


@jax.jit
def to_panels(matrix: Array) -> Array:
    """(*b, k, n) -> (*b, ceil(n / 64), k, 64).

    >>> to_panels(jnp.ones((2, 130))).shape
    (3, 2, 64)
    """

    def move(x: Array) -> Array:
        *batch, k, n = x.shape
        x = jnp.pad(x, [(0, 0)] * (len(batch) + 1) + [(0, -n % PANEL_COLS)])
        return x.reshape(*batch, k, num_panels(n), PANEL_COLS).swapaxes(-3, -2)

    return by_bytes(move)(matrix)


def from_panels(panels: Array, n: int) -> Array:
    """(*b, ceil(n / 64), k, 64) -> (*b, k, n), the inverse of `to_panels`."""

    def move(x: Array) -> Array:
        *batch, count, k, cols = x.shape
        x = x.swapaxes(-3, -2).reshape(*batch, k, count * cols)
        return jax.lax.slice_in_dim(x, 0, n, axis=-1)

    return by_bytes(move)(panels)


def by_bytes(move: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Moves FP8 codes as bytes: XLA on CPU would turn them into float16 and back, changing NaNs."""

    def moved(y: Array) -> Array:
        if not np.dtype(y.dtype).name.startswith("float8"):
            return move(y)
        codes = move(jax.lax.bitcast_convert_type(y, jnp.uint8))
        return jax.lax.bitcast_convert_type(codes, y.dtype)

    return moved
