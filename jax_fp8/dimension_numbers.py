"""From any `dimension_numbers` to the canonical (*b, m, k)·(*b, n, k) and back.

An operand whose dims already come as (batch, free, contracting) or (batch, contracting, free) is
only reshaped: which of the two it is becomes the contracting axis, -1 or -2, of the matrix. Any
other order is transposed.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8.array import ScaledArray
from jax_fp8.gemm import Matrix

__all__ = ["Plan", "Side", "plan"]

Array = jax.Array
Dims = tuple[int, ...]
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


@dataclasses.dataclass(frozen=True)
class Side:
    """The dims of one operand by what becomes of them."""

    shape: Dims
    batch: Dims
    free: Dims
    contracting: Dims

    def sizes(self, dims: Dims) -> Dims:
        return tuple(self.shape[d] for d in dims)

    @property
    def axis(self) -> int:
        """Contracting axis of the canonical matrix: -2 where k lies before the rows in memory."""
        in_order = tuple(range(len(self.shape)))
        k_first = (*self.batch, *self.contracting, *self.free) == in_order
        return -2 if k_first and self.free and self.contracting else -1

    @property
    def order(self) -> Dims:
        """Permutation to canonical order."""
        if self.axis == -2:
            return (*self.batch, *self.contracting, *self.free)
        return (*self.batch, *self.free, *self.contracting)

    def canonical(self, x: Array) -> Array:
        """(batch..., m, k) or (batch..., k, m) of an operand, by `axis`."""
        rows, k = math.prod(self.sizes(self.free)), math.prod(self.sizes(self.contracting))
        matrix = (rows, k) if self.axis == -1 else (k, rows)
        if self.order != tuple(range(x.ndim)):
            x = x.transpose(self.order)
        return x.reshape(*self.sizes(self.batch), *matrix)

    def canonical_scaled(self, q: ScaledArray, call: str, side: str) -> Matrix:
        """The same for FP8 values with their scale; tiles of several dims become one tile.

        Raises:
          ValueError: tiles of several contracting dims that are no tiles of the merged dim.
        """
        tile, scale = list(q.full_tile()), q.scale
        for d in self.batch:
            if scale.shape[d] not in (1, q.shape[d]):
                scale, tile[d] = _repeat(scale, d, tile[d], q.shape[d]), 1
        rows_tile = self._merge(self.free, tile)
        if rows_tile is None:  # one scale per index says the same for any tile
            for d in self.free:
                scale, tile[d] = _repeat(scale, d, tile[d], q.shape[d]), 1
            rows_tile = 1
        k_tile = self._merge(self.contracting, tile)
        if k_tile is None:
            raise ValueError(
                f"{call}: the tile {q.full_tile()} of {side} does not tile its contracting dims "
                f"{self.contracting} of sizes {self.sizes(self.contracting)} as one dim of size "
                f"{math.prod(self.sizes(self.contracting))}; reshape them to one before quantising"
            )
        lead = tuple(scale.shape[d] for d in self.batch)
        rows, k = (
            math.prod(scale.shape[d] for d in dims) for dims in (self.free, self.contracting)
        )
        matrix = (rows, k) if self.axis == -1 else (k, rows)
        scale = scale.transpose(self.order).reshape(*lead, *matrix)
        pair = (rows_tile, k_tile) if self.axis == -1 else (k_tile, rows_tile)
        return Matrix(self.canonical(q.values), scale, pair)

    def _merge(self, dims: Dims, tile: Sequence[int]) -> int | None:
        """Tile of the dim that `dims` merge into, or None where there is no such tile.

        From the last dim on: a tile that covers a dim whole goes on into the dim before; a shorter
        one must end where its dim ends, and the dims before must have tile 1.
        """
        merged, whole, seamless = 1, True, True
        for d in reversed(dims):
            size = max(self.shape[d], 1)
            t = min(tile[d], size)
            if whole:
                merged, whole, seamless = merged * t, t == size, size % t == 0
            elif t != 1 or (size > 1 and not seamless):
                return None
        return merged


def _repeat(scale: Array, dim: int, tile: int, size: int) -> Array:
    """Scale with one entry per index of `dim` instead of one per tile."""
    return jax.lax.slice_in_dim(jnp.repeat(scale, tile, axis=dim), 0, size, axis=dim)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Both operands of a dot_general and the shape of its result."""

    lhs: Side
    rhs: Side

    @property
    def out_shape(self) -> Dims:
        """(batch..., lhs free..., rhs free...), as lax.dot_general."""
        lhs, rhs = self.lhs, self.rhs
        return (*lhs.sizes(lhs.batch), *lhs.sizes(lhs.free), *rhs.sizes(rhs.free))


def plan(dimension_numbers: Any, lhs_shape: Dims, rhs_shape: Dims, call: str) -> Plan:
    """Checks `dimension_numbers` against the shapes.

    Args:
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      lhs_shape: shape of lhs.
      rhs_shape: shape of rhs.
      call: name of the public function, for messages.

    Raises:
      TypeError: dimension_numbers is not such a nest of integers.
      ValueError: dims out of range, repeated, of different number or of different size.
    """
    try:
        (lhs_k, rhs_k), (lhs_b, rhs_b) = dimension_numbers
        groups = [tuple(operator.index(d) for d in dims) for dims in (lhs_k, rhs_k, lhs_b, rhs_b)]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{call}: dimension_numbers is {dimension_numbers!r}; it must be ((lhs contracting "
            "dims, rhs contracting dims), (lhs batch dims, rhs batch dims))"
        ) from error
    sides = []
    for side, shape, k, b in (
        ("lhs", lhs_shape, groups[0], groups[2]),
        ("rhs", rhs_shape, groups[1], groups[3]),
    ):
        for d in (*k, *b):
            if not -len(shape) <= d < len(shape):
                raise ValueError(f"{call}: {side} of shape {tuple(shape)} has no dim {d}")
        k, b = (tuple(d % len(shape) for d in dims) for dims in (k, b))
        if len({*k, *b}) != len(k) + len(b):
            raise ValueError(f"{call}: {side} contracting dims {k} and batch dims {b} repeat a dim")
        free = tuple(d for d in range(len(shape)) if d not in (*k, *b))
        sides.append(Side(tuple(shape), b, free, k))
    lhs, rhs = sides
    for kind, lhs_dims, rhs_dims in (
        ("contracting", lhs.contracting, rhs.contracting),
        ("batch", lhs.batch, rhs.batch),
    ):
        if len(lhs_dims) != len(rhs_dims):
            raise ValueError(
                f"{call}: lhs has {len(lhs_dims)} {kind} dims {lhs_dims}, rhs has {len(rhs_dims)} "
                f"{rhs_dims}; they must pair up"
            )
        for lhs_dim, rhs_dim in zip(lhs_dims, rhs_dims, strict=True):
            if lhs.shape[lhs_dim] != rhs.shape[rhs_dim]:
                raise ValueError(
                    f"{call}: lhs {kind} dim {lhs_dim} has size {lhs.shape[lhs_dim]}, rhs {kind} "
                    f"dim {rhs_dim} has size {rhs.shape[rhs_dim]}; they must be equal"
                )
    return Plan(lhs, rhs)
