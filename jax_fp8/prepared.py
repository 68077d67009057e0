"""PreparedArray: FP8 weights (k, n) in the order in which kernels read them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jax_fp8 import formats
from jax_fp8.array import ScaledArray, check_scale_dtype, is_tile_size, scale_shape
from jax_fp8.gemm import Matrix, check_panels
from jax_fp8.panels import from_panels, matrix_shape
from jax_fp8.scaling import scale_to_float32

__all__ = ["PreparedArray"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no single truth value
class PreparedArray:
    """FP8 weights (*batch, k, n) with their scale, laid out for products with few rows.

    Made by `prepare`, taken as rhs by `matmul`, `dot_general`, `einsum`, `scaled_dot_general`,
    `scaled_matmul` and `explain`. The codes lie in panels of 64 columns, one after another, so that
    a kernel streams them in order; the last panel is filled up with zeros.

    A pytree with the leaves `values` and `scale`, so it passes through jit, vmap, scan,
    `jax.device_put` and `jax.tree.map`; `n` and `tile` are static. Leading dims may be taken away
    (scan over stacked weights, vmap over axis 0, `jax.tree.map(lambda x: x[0], w)`), no others.

    NumPy's files forget FP8 dtypes. To save one, store `np.asarray(w.values).view(np.uint8)`,
    `w.scale`, `w.n` and `w.tile`, and view the bytes as `w.dtype` after loading:

    >>> from jax_fp8 import prepare
    >>> w = prepare(np.ones((3, 100), np.float32))
    >>> saved = np.asarray(w.values).view(np.uint8), np.asarray(w.scale)
    >>> again = PreparedArray(saved[0].view(w.dtype), saved[1], n=100, tile=w.tile)
    >>> again.shape, float(again.dequantize()[2, 99])
    ((3, 100), 1.0)

    Attributes:
      values: FP8 (*batch, ceil(n / 64), k, 64).
      scale: float32 (or float8_e8m0fnu) (*batch, ceil(k / tile[0]), ceil(n / tile[1])), the
        dequantizing factor.
      n: columns.
      tile: sizes along k and n that one scale covers.
    """

    values: jax.Array
    scale: jax.Array
    n: int = dataclasses.field(metadata={"static": True})
    tile: tuple[int, int] = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        if isinstance(self.tile, list):  # static, so it must be hashable
            object.__setattr__(self, "tile", tuple(self.tile))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights, (*batch, k, n)."""
        return matrix_shape(tuple(self.values.shape), self.n)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the codes."""
        return np.dtype(self.values.dtype)

    @property
    def format(self) -> formats.Format:
        """Format of the codes."""
        return formats.lookup(self.dtype, call="PreparedArray.format")

    @property
    def nbytes(self) -> int:
        """Bytes of codes, filled-up columns included, and scales."""
        leaves = (self.values, self.scale)
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in leaves)

    def check(self, call: str, side: str) -> None:
        """Raises if the parts do not belong together.

        Args:
          call: name of the public function, for messages.
          side: which operand this is, for messages.
        """
        formats.lookup(self.dtype, call=f"{call}: {side}")
        if isinstance(self.n, bool) or not isinstance(self.n, int | np.integer) or self.n < 0:
            raise ValueError(f"{call}: {side} has n={self.n!r}; it must be an integer >= 0")
        check_panels(tuple(self.values.shape), self.n, f"{call}: {side}")
        is_pair = isinstance(self.tile, tuple) and len(self.tile) == 2
        if not is_pair or not all(map(is_tile_size, self.tile)):
            raise ValueError(
                f"{call}: {side} has the tile {self.tile!r}; it must be two sizes >= 1, along k "
                "and n"
            )
        expected = (*self.shape[:-2], *scale_shape(self.shape[-2:], self.tile))
        if tuple(self.scale.shape) != expected:
            raise ValueError(
                f"{call}: {side} scale has shape {tuple(self.scale.shape)}; weights of shape "
                f"{self.shape} with tile {self.tile} need {expected}"
            )
        check_scale_dtype(self.scale.dtype, call, side)

    def unprepare(self) -> ScaledArray:
        """The same codes and scales as a ScaledArray of shape (*batch, k, n).

        Raises:
          TypeError: parts of another dtype.
          ValueError: parts that do not belong together.
        """
        self.check("unprepare", "w")
        return ScaledArray(from_panels(self.values, self.n), self.scale, self.tile)

    def dequantize(self, dtype: npt.DTypeLike = np.float32) -> jax.Array:
        """Real numbers of these codes, (*batch, k, n), see `jax_fp8.dequantize`."""
        return self.unprepare().dequantize(dtype)

    def with_ndim(self, ndim: int) -> PreparedArray:
        """The same weights with `ndim` dims, new leading ones of size 1."""
        new = (1,) * (ndim - self.ndim)
        values, scale = (x.reshape(new + x.shape) for x in (self.values, self.scale))
        return dataclasses.replace(self, values=values, scale=scale)

    def operand(self) -> Matrix:
        """What `gemm` takes as rhs, with `rhs_axis=-2` and `rhs_n=self.n`."""
        return Matrix(self.values, scale_to_float32(self.scale), self.tile)
