"""ScaledArray: FP8 codes with the factors that turn them back into real numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jax_fp8 import formats

__all__ = ["ScaledArray"]


def resolve_tile(
    tile: tuple[int, ...] | None, shape: tuple[int, ...], call: str
) -> tuple[int, ...]:
    """Replaces -1 by the size of the dim, None by the whole shape, and aligns to trailing dims.

    Returns one size >= 1 per dim of `shape`.
    """
    if tile is None:
        return tuple(max(size, 1) for size in shape)
    if not isinstance(tile, tuple | list):
        raise TypeError(
            f"{call}: tile is {tile!r}; give a tuple with a size per trailing dim, such as (1, 128)"
        )
    if len(tile) > len(shape):
        raise ValueError(
            f"{call}: tile {tile} has {len(tile)} sizes, the array of shape {shape} has only "
            f"{len(shape)} dims; give one size per trailing dim"
        )
    for size in tile:
        if (
            isinstance(size, bool)
            or not isinstance(size, int | np.integer)
            or (size < 1 and size != -1)
        ):
            raise ValueError(
                f"{call}: tile {tile} has the size {size!r}; sizes are integers >= 1, or -1 for a "
                "whole dim"
            )
    full = (1,) * (len(shape) - len(tile)) + tuple(int(size) for size in tile)
    return tuple(max(dim, 1) if size == -1 else size for size, dim in zip(full, shape, strict=True))


def scale_shape(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scale of an array of `shape` with one tile size per dim: ceil(shape / tile)."""
    return tuple(-(-dim // size) for dim, size in zip(shape, tile, strict=True))


def check_scale_dtype(dtype: npt.DTypeLike, call: str, side: str) -> None:
    """Raises unless scales may have this dtype."""
    if np.dtype(dtype) not in (np.dtype(np.float32), formats.E8M0):
        raise TypeError(
            f"{call}: {side} scale has dtype {np.dtype(dtype).name}; scales are "
            "float32 (or float8_e8m0fnu): convert with scale.astype(jnp.float32)"
        )


def is_tile_size(size: object) -> bool:
    """Whether a tile may have this size along a dim."""
    return not isinstance(size, bool) and isinstance(size, int | np.integer) and int(size) >= 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no single truth value
class ScaledArray:
    """FP8 values and their scale: real number = value · scale.

    A pytree with the leaves `values` and `scale`, so it passes through jit, vmap, scan and
    `jax.tree.map`; `tile` is static. A transformation that takes away leading dims (scan over
    stacked weights, vmap) leaves `tile` as it is: it counts from the trailing dim.

    NumPy's files forget FP8 dtypes. To save one, store `np.asarray(q.values).view(np.uint8)` and
    `q.scale`, and view the bytes as `q.dtype` after loading.

    Attributes:
      values: FP8 array of any shape.
      scale: float32 (or float8_e8m0fnu) array of shape ceil(values.shape / tile).
      tile: what one scale covers: a size per trailing dim of `values`. Dims before those have size
    1."""

    values: jax.Array
    scale: jax.Array
    tile: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        if isinstance(self.tile, list):  # static, so it must be hashable
            object.__setattr__(self, "tile", tuple(self.tile))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

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
        return formats.lookup(self.dtype, call="ScaledArray.format")

    def full_tile(self) -> tuple[int, ...]:
        """`tile` with one size per dim of `values`."""
        missing = self.ndim - len(self.tile)
        return (1,) * missing + self.tile[max(0, -missing) :]

    def check(self, call: str, side: str) -> None:
        """Raises if the parts do not belong together.

        Args:
          call: name of the public function, for messages.
          side: which operand this is, for messages.
        """
        formats.lookup(self.dtype, call=f"{call}: {side}")
        if not isinstance(self.tile, tuple) or not all(map(is_tile_size, self.tile)):
            raise ValueError(
                f"{call}: {side} has the tile {self.tile!r}; it must be a tuple of sizes >= 1, one "
                "per trailing dim"
            )
        dropped = self.tile[: max(0, len(self.tile) - self.ndim)]
        if any(size != 1 for size in dropped):
            raise ValueError(
                f"{call}: {side} has {self.ndim} dims, but its tile {self.tile} covers "
                f"{len(self.tile)}; only dims with tile 1 can be sliced away"
            )
        tile = self.full_tile()
        expected = scale_shape(self.shape, tile)
        if tuple(self.scale.shape) != expected:
            raise ValueError(
                f"{call}: {side} scale has shape {tuple(self.scale.shape)}; values of shape "
                f"{self.shape} with tile {tile} need {expected}"
            )
        check_scale_dtype(self.scale.dtype, call, side)

    def dequantize(self, dtype: npt.DTypeLike = np.float32) -> jax.Array:
        """Real numbers of these codes, see `jax_fp8.dequantize`."""
        from jax_fp8.quantize import dequantize

        return dequantize(self, dtype)
