"""Operands on which an FP8 GEMM and its gradients are exact: small integers times powers of two.

Every integer up to 7 times a power of two is a value of E4M3 and of E5M2, and the largest value of
each is 7 times a power of two. So where each tile's amax is 7 · 2^j, its scale is a power of two,
every element is a code, and sums of products are integers that FP32 holds below 2^24. The op is
bilinear there, and a finite difference is a derivative, to the last bit.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jax_fp8.recipes import Recipe, Role, resolve_tile

__all__ = ["lattice"]

Array = npt.NDArray[Any]

#: Mantissa of the largest value of E4M3 and E5M2.
LARGEST: Final = 7


def lattice(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    recipe: Recipe,
    role: Role,
    *,
    bound: int = LARGEST,
    spread: int = 1,
) -> Array:
    """A float32 matrix that the recipe quantises exactly, along either of its axes.

    Args:
      rng: random numbers.
      shape: (*b, rows, k) of a canonical matrix.
      recipe: whose tiles get an amax of 7 · 2^j.
      role: of the operand.
      bound: largest magnitude of ordinary elements, before `spread`.
      spread: rows and columns are multiplied by 2^0 … 2^spread, so that scales differ.

    >>> from jax_fp8 import TensorScaling
    >>> x = lattice(np.random.default_rng(0), (2, 3), TensorScaling(), "input", spread=0)
    >>> float(np.abs(x).max()), bool((x == np.round(x)).all())
    (7.0, True)
    """
    values = rng.integers(-bound, bound + 1, shape)
    exponents = np.zeros(shape, np.int64)
    exponents += rng.integers(0, spread + 1, (*shape[:-1], 1))
    exponents += rng.integers(0, spread + 1, (*shape[:-2], 1, shape[-1]))
    if not recipe.power_of_two and recipe.static_scale(role) is None:
        rows, k = recipe.tile(role)
        priority = exponents + rng.random(shape)
        largest = np.zeros(shape, bool)
        for tile in {resolve_tile((rows, k), shape), resolve_tile((k, rows), shape)}:
            largest |= _first_of_each_tile(priority, tile)
        values = np.where(largest, LARGEST * rng.choice((-1, 1), shape), values)
    return np.ldexp(values.astype(np.float32), exponents)


def _first_of_each_tile(priority: Array, tile: tuple[int, int]) -> Array:
    """Mask of the element of highest priority in each tile."""
    *lead, rows, cols = priority.shape
    pad = [(0, 0)] * len(lead) + [(0, -rows % tile[0]), (0, -cols % tile[1])]
    padded = np.pad(priority, pad, constant_values=-1)
    r, c = padded.shape[-2] // tile[0], padded.shape[-1] // tile[1]
    tiles = padded.reshape(*lead, r, tile[0], c, tile[1]).swapaxes(-3, -2)
    flat = tiles.reshape(*lead, r, c, -1)
    first = np.arange(flat.shape[-1]) == flat.argmax(-1)[..., None]
    mask = first.reshape(tiles.shape).swapaxes(-3, -2).reshape(padded.shape)
    return mask[..., :rows, :cols]
