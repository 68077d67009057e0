"""The semantics in plain jnp, and what runs on a platform that has no kernel.

Readable, not fast, and never an oracle for tests: XLA may flush subnormals, reorders sums, and may
divide by multiplying with a reciprocal, so a scale can be one unit in the last place off. The
oracle is `jax_fp8.testing.oracle`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.formats import Format

Array = jax.Array
Tile = tuple[int, int]

SMALLEST_SCALE = 2.0**-126


def expand_scale(scale: Array, shape: tuple[int, ...], tile: Tile) -> Array:
    """Repeats each scale over its tile: (*b, ceil(r / tile_r), ceil(c / tile_c)) -> (*b, r, c)."""
    for axis, size in ((-2, tile[0]), (-1, tile[1])):
        if scale.shape[axis] != 1:
            scale = jnp.repeat(scale, size, axis=axis)
        scale = jax.lax.slice_in_dim(scale, 0, min(scale.shape[axis], shape[axis]), axis=axis)
    return jnp.broadcast_to(scale, (*scale.shape[:-2], *shape[-2:]))


def compute_scale(x: Array, fmt: Format, tile: Tile, power_of_two: bool) -> Array:
    """amax over the finite entries of each tile, divided by the format's largest value."""
    rows, cols = x.shape[-2:]
    tile = (min(tile[0], max(rows, 1)), min(tile[1], max(cols, 1)))
    magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0)
    pad = [(0, 0)] * (x.ndim - 2) + [(0, -rows % tile[0]), (0, -cols % tile[1])]
    magnitude = jnp.pad(magnitude, pad)
    r, c = magnitude.shape[-2:]
    tiles = magnitude.reshape(*x.shape[:-2], r // tile[0], tile[0], c // tile[1], tile[1])
    amax = jnp.max(tiles, axis=(-3, -1), initial=0.0)
    scale = jnp.maximum(amax / np.float32(fmt.max), np.float32(SMALLEST_SCALE))
    if power_of_two:
        mantissa, exponent = jnp.frexp(scale)
        scale = jnp.ldexp(jnp.float32(1), exponent - (mantissa == 0.5))
    return jnp.where(amax == 0, np.float32(1), scale).astype(jnp.float32)


def cast(
    x: Array, scale: Array, fmt: Format, tile: Tile, saturate: bool, bits: Array | None = None
) -> Array:
    """Rounds x / scale to the format, saturating at the largest value where x is finite.

    To nearest even, or with `bits` (uint32 of x.shape) stochastically.
    """
    y = _round(x / expand_scale(scale, x.shape, tile), fmt, bits)
    if saturate:
        y = jnp.where(jnp.isfinite(x), jnp.clip(y, -fmt.max, fmt.max), x)
    return y.astype(fmt.dtype)


def _round(y: Array, fmt: Format, bits: Array | None) -> Array:
    """Rounds y to a value of the format, in float32 and beyond the largest one too.

    Not left to `astype`: that of jaxlib 0.7 rounds to float16 on the way, and so some values twice.
    """
    exponent = jnp.maximum(jnp.frexp(y)[1] - 1, int(np.log2(fmt.smallest_normal)))
    unit = jnp.ldexp(jnp.float32(1), exponent - fmt.mantissa_bits)
    steps = jnp.abs(y) / unit
    if bits is None:
        rounded = jnp.round(steps)  # half to even
    else:  # up with the probability of the fraction
        lower = jnp.floor(steps)
        rounded = lower + ((steps - lower) * np.float32(2.0**32) > bits.astype(jnp.float32))
    return jnp.where(jnp.isfinite(y), jnp.copysign(rounded * unit, y), y)


def gemm(
    lhs: Array,
    rhs: Array,
    lhs_scale: Array,
    rhs_scale: Array,
    *,
    lhs_tile: Tile,
    rhs_tile: Tile,
    out_dtype: np.dtype[np.generic],
) -> Array:
    """out[..., m, n] = sum over k of lhs[..., m, k] · rhs[..., n, k], both times their scales.

    Dequantises first and lets XLA's dot add in FP32.
    """
    x = lhs.astype(jnp.float32) * expand_scale(lhs_scale, lhs.shape, lhs_tile)
    w = rhs.astype(jnp.float32) * expand_scale(rhs_scale, rhs.shape, rhs_tile)
    out = jnp.einsum("...mk,...nk->...mn", x, w, precision=jax.lax.Precision.HIGHEST)
    return out.astype(out_dtype)
