"""The static facts of one differentiable GEMM, and how its operands are quantised and multiplied.

With x (*b, m, k) and w (*b, n, k) as lhs and rhs and g (*b, m, n) the cotangent of the product:

    y  = x^ · w^          contracts k
    dx = g^ · w^          contracts n
    dw = g^ · x^          contracts m

Each operand is quantised along the axis that the GEMM contracts. In memory, k may be the last axis
of an operand (-1) or the one before (-2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_fp8.accumulation import PerGemm
from jax_fp8.config import Execution
from jax_fp8.gemm import Matrix
from jax_fp8.quantize_primitive import quantize_matrix, quantize_two_axes
from jax_fp8.recipes import Recipe, Role, resolve_tile

__all__ = ["Contraction", "cotangent_axis", "dense", "in_memory_order", "other_axis"]

Array = jax.Array
Axes = tuple[int, ...]
_T = TypeVar("_T")


def other_axis(axis: int) -> int:
    """The other one of the matrix axes -1 and -2."""
    return -3 - axis


def cotangent_axis(side: int) -> int:
    """Axis of the cotangent (*b, m, n) that the gradient of lhs (0) or rhs (1) contracts."""
    return -1 if side == 0 else -2


def in_memory_order(g: _T, fixed: _T, axis: int) -> tuple[_T, _T]:
    """Order of the operands of a gradient's GEMM, so that its result lies as the operand does.

    Args:
      g: the cotangent, whose uncontracted axis becomes the operand's rows.
      fixed: the other operand, whose uncontracted axis becomes the operand's k.
      axis: contracting axis of the operand in memory: k last (-1) or first (-2).
    """
    return (g, fixed) if axis == -1 else (fixed, g)


def dense(lhs: Array, lhs_axis: int, rhs: Array, rhs_axis: int, dtype: Any = jnp.float32) -> Array:
    """(*b, m, n) float32 product of two matrices that are cast to `dtype`, by XLA's own dot."""
    lhs = lhs if lhs_axis == -1 else jnp.swapaxes(lhs, -1, -2)
    rhs = rhs if rhs_axis == -2 else jnp.swapaxes(rhs, -1, -2)
    return jnp.matmul(
        lhs.astype(dtype),
        rhs.astype(dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


@dataclasses.dataclass(frozen=True)
class Contraction:
    """Static facts of one differentiable GEMM. Sides are 0 (lhs) and 1 (rhs).

    Attributes:
      axes: contracting axis of lhs and of rhs in memory, -1 or -2.
      roles: role of lhs and of rhs.
      recipe: formats and tiles.
      out_dtype: name of the result's dtype.
      executions: kernel and accumulation of the product and of both gradients.
      key_impl: name of the random generator whose key data travels with the operands, or "".
    """

    axes: tuple[int, int]
    roles: tuple[Role, Role]
    recipe: Recipe
    out_dtype: str
    executions: PerGemm[Execution]
    key_impl: str = ""

    @property
    def quantize_execution(self) -> Execution:
        """Kernel of the quantisers."""
        return self.executions.forward.without_sums

    def gradient_execution(self, side: int) -> Execution:
        """Kernel and accumulation of the gradient of `side`."""
        is_weight = self.roles[side] == "weight"
        return self.executions.wgrad if is_weight else self.executions.dgrad

    def is_fp8_gradient(self, side: int) -> bool:
        """Whether the gradient of `side` is an FP8 GEMM."""
        return self.recipe.weight_gradient == "fp8" or self.roles[side] != "weight"

    def uses_copy(self, side: int) -> bool:
        """Whether the gradient of `side` takes the other side's copy from the forward pass."""
        return self.is_fp8_gradient(side) and self.recipe.residuals == "fp8"

    def tile(self, role: Role, shape: Axes, contracted: int) -> tuple[int, int]:
        """Tile in memory order of an operand whose axis `contracted` a GEMM sums over."""
        rows, k = self.recipe.tile(role)
        return resolve_tile((rows, k) if contracted == -1 else (k, rows), shape)

    def backward_copy(self, side: int, values: Array, scale: Array) -> Matrix:
        """The Matrix of a copy along the backward axis."""
        axis = other_axis(self.axes[side])
        return Matrix(values, scale, self.tile(self.roles[side], values.shape, axis))

    def quantize(
        self, x: Array, role: Role, contracted: Sequence[int], key: Array | None = None
    ) -> tuple[Matrix, ...]:
        """Copies of x, one per contracted axis, in one pass over x (one copy if the tiles agree).

        Args:
          x: (*b, r, c) high-precision matrix.
          role: decides format and tile.
          contracted: axes -1 or -2, one or two.
          key: key data (*kb, size) for stochastic rounding. Its dims before the last are the first
            batch dims of x: an example per key, and the same noise along dims of size 1.
        """
        fmt, power_of_two = self.recipe.format(role), self.recipe.power_of_two
        tiles = [self.tile(role, x.shape, axis) for axis in contracted]
        if len(set(tiles)) > 1 and key is None:
            pair = (tiles[0], tiles[1])
            out = quantize_two_axes(
                x, fmt, pair, self.quantize_execution, power_of_two=power_of_two
            )
            return Matrix(out[0], out[1], pair[0]), Matrix(out[2], out[3], pair[1])
        static = self.recipe.static_scale(role)
        scale = None if static is None else jnp.float32(static)
        copies: dict[tuple[int, int], Matrix] = {}
        for tile in dict.fromkeys(tiles):
            bits = None if key is None else self._noise(key, len(copies), x.shape)
            values, scales = quantize_matrix(
                x,
                fmt,
                tile,
                self.quantize_execution,
                scale=scale,
                power_of_two=power_of_two and scale is None,
                bits=bits,
            )
            copies[tile] = Matrix(values, scales, tile)
        return tuple(copies[tile] for tile in tiles)

    def _noise(self, key: Array, index: int, shape: Axes) -> Array:
        """uint32 of `shape`, for the copy number `index`."""
        lead = key.shape[:-1]

        def draw(data: Array) -> Array:
            k = jax.random.wrap_key_data(data, impl=self.key_impl)
            return jax.random.bits(jax.random.fold_in(k, index), shape[len(lead) :], jnp.uint32)

        flat = jax.vmap(draw)(key.reshape(-1, key.shape[-1]))
        return jnp.broadcast_to(flat.reshape(*lead, *shape[len(lead) :]), shape)
