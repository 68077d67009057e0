"""Batch dims that a GEMM sums over: folded into the axis that it contracts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jax_fp8.gemm import Matrix

__all__ = ["fold_batch_into_axis", "folded_length"]

Array = jax.Array


def folded_length(size: int, *tiles: int) -> int:
    """What an axis of `size` is padded to in every example: to where tiles of all sizes end."""
    unit = math.lcm(*(tile for tile in tiles if tile < size))  # others cover the whole axis
    return -(-size // unit) * unit


def fold_batch_into_axis(x: Matrix, axis: int, dims: tuple[int, ...], length: int) -> Matrix:
    """Moves batch dims into a matrix axis, so that contracting the axis also sums over them.

    Args:
      x: (*b, r, c).
      axis: -1 or -2.
      dims: negative batch dims; a scale that has size 1 there is repeated.
      length: `folded_length` of the axis and of the tiles of both operands of a GEMM.

    Returns:
      Matrix whose dims `dims` have size 1 and whose `axis` is as many times longer. Each example is
      padded to whole tiles, so that no tile straddles two examples.
    """
    if not dims:
        return x
    values, ndim = x.values, x.values.ndim
    tile = x.tile[axis] if x.tile[axis] < values.shape[axis] else max(length, 1)
    values = _pad(values, axis, length)
    folded = {ndim + d for d in dims}
    scale = jnp.broadcast_to(
        x.scale, [values.shape[i] if i in folded else s for i, s in enumerate(x.scale.shape)]
    )
    scale = _pad(scale, axis, -(-length // tile))
    order = [i for i in range(ndim) if i not in folded]
    at = order.index(ndim + axis)
    order[at:at] = sorted(folded)

    def fold(y: Array) -> Array:
        shape = [1 if i in folded else size for i, size in enumerate(y.shape)]
        shape[axis] = y.shape[axis] * math.prod(y.shape[i] for i in folded)
        return y.transpose(order).reshape(shape)

    return Matrix(fold(values), fold(scale), (x.tile[0], tile) if axis == -1 else (tile, x.tile[1]))


def _pad(x: Array, axis: int, size: int) -> Array:
    """Zeros behind the entries of an axis."""
    missing = size - x.shape[axis]
    return jnp.pad(x, [(0, missing if i == x.ndim + axis else 0) for i in range(x.ndim)])
