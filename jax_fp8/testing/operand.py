"""One operand of a GEMM, quantised by the independent quantiser, and how far that may be off."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_fp8.formats import Format
from jax_fp8.recipes import Recipe, Role, resolve_tile
from jax_fp8.testing import oracle

__all__ = ["Operand"]

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
    """One operand of a GEMM, contracted along its last axis.

    Attributes:
      real: (*b, rows, k) high-precision values.
      role: decides format and tile.
      recipe: formats and tiles.
      bits: uint32 of the shape of `real` for stochastic rounding, or None.
    """

    real: Array
    role: Role
    recipe: Recipe
    bits: Array | None = None

    @property
    def format(self) -> Format:
        """Format of the codes."""
        return self.recipe.format(self.role)

    @property
    def tile(self) -> tuple[int, int]:
        """(rows, k) of one scale, limited to the matrix."""
        return resolve_tile(self.recipe.tile(self.role), self.real.shape)

    @functools.cached_property
    def quantised(self) -> tuple[Array, Array]:
        """Codes and scale."""
        static, shape = self.recipe.static_scale(self.role), self.real.shape
        scale = None
        if static is not None:
            counts = [-(-size // t) for size, t in zip(shape[-2:], self.tile, strict=True)]
            scale = np.full((*shape[:-2], *counts), static, np.float32)
        return oracle.quantize_np(
            self.real,
            self.format.name,
            self.tile,
            scale=scale,
            power_of_two=self.recipe.power_of_two and scale is None,
            bits=self.bits,
        )

    @functools.cached_property
    def scales(self) -> Float64:
        """The scale of each element."""
        scale: Float64 = oracle.expand_scale_np(self.quantised[1], self.real.shape, self.tile)
        return scale.astype(np.float64)

    @functools.cached_property
    def dequantised(self) -> Float64:
        """Real numbers of the codes."""
        return oracle.dequantize_np(*self.quantised, self.tile)

    @functools.cached_property
    def exact(self) -> Float64:
        """`real` in float64."""
        return self.real.astype(np.float64)

    @functools.cached_property
    def rounding_bound(self) -> Float64:
        """Largest |dequantised - real| of each element.

        Half an ulp (a whole one for stochastic rounding): relatively 2^-(mantissa bits + 1), and
        half the smallest subnormal times the scale; x / scale is itself rounded to float32. Where a
        scale known beforehand is too small, what saturation cuts off.
        """
        ulps = 0.5 if self.bits is None else 1.0
        relative = ulps * self.format.eps * (1 + 2.0**-22) + 2.0**-23
        size = np.abs(self.exact)
        bound: Float64 = relative * size + ulps * self.format.smallest_subnormal * self.scales
        return np.maximum(bound, size - self.format.max * self.scales)

    @property
    def saturated(self) -> int:
        """How many elements saturate: none, unless the scale was known beforehand."""
        limit = self.format.saturation_threshold * self.scales
        return int((np.abs(self.exact) >= limit).sum())
