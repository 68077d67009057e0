"""Quantisation to FP8 and back: the public functions, for arrays and tiles of any rank."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8 import config, formats
from jax_fp8.array import ScaledArray, resolve_tile, scale_shape
from jax_fp8.formats import FormatLike
from jax_fp8.operands import (
    FLOAT_DTYPES,
    OFFERED,
    as_float_array,
    check_rounding,
    check_scaled_array,
)
from jax_fp8.panels import by_bytes
from jax_fp8.primitive import refuse_explicit
from jax_fp8.quantize_primitive import bind_quantize, dequantize_p, quantize_p
from jax_fp8.scaling import scale_to_e8m0, scale_to_float32

__all__ = ["dequantize", "dequantize_p", "quantize", "quantize_p"]

Array = jax.Array
Tile = tuple[int, int]


def quantize(
    x: jax.typing.ArrayLike,
    format: FormatLike = "e4m3fn",
    tile: tuple[int, ...] | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    scale_dtype: npt.DTypeLike = np.float32,
    power_of_two: bool = False,
    saturate: bool = True,
    rounding: str = "nearest",
    key: Array | None = None,
) -> ScaledArray:
    """Rounds `x` to FP8 with one scale per tile.

    `scale = max(amax / format.max, 2^-126)`, where amax is the largest finite magnitude of the tile
    (1 where that is 0), and `values = round_to_nearest_even(x / scale)`. NaN stays NaN; infinity
    becomes NaN in E4M3FN and stays infinity in E5M2. A non-finite entry does not change the scale
    of its neighbours.

    Args:
      x: float32, bfloat16 or float16 array of any shape.
      format: format of the values: a name ("e4m3", "e5m2"), a dtype or a `Format`.
      tile: what one scale covers: a size per trailing dim of `x`, -1 for a whole dim; dims before
        those have tile 1. None is the whole array.
      scale: float32 scale of shape ceil(x.shape / tile) to divide by, instead of the one from amax.
        A scalar serves every tile.
      scale_dtype: float32, or float8_e8m0fnu for MX: computed scales are then powers of two.
      power_of_two: round computed scales up to powers of two; nothing saturates.
      saturate: with a given scale: clip finite values to the largest one. False: a magnitude that
        rounds above it becomes NaN (E4M3FN) or infinity (E5M2), as an `astype` would do. Nothing
        saturates under a computed scale.
      rounding: "nearest" (even), or "stochastic": up or down with a probability that makes the
        result unbiased. Needs `key`.
      key: `jax.random.key` for stochastic rounding.

    Returns:
      ScaledArray with `values` of x.shape and `scale` of shape ceil(x.shape / tile).

    Raises:
      TypeError: wrong dtype of x or scale, unknown format, or a gradient asked of x.
      ValueError: tile or scale do not fit x, or stochastic rounding without a key.

    >>> q = quantize(jnp.ones((2, 256)), "e4m3", (1, 128))
    >>> q.values.dtype.name, q.scale.shape
    ('float8_e4m3fn', (2, 2))
    """
    fmt = formats.lookup(format, call="quantize")
    x = as_float_array(x, "quantize", "x")
    refuse_explicit(x, "quantize", "x")
    execution = config.without_sums("quantize")
    full = resolve_tile(tile, x.shape, "quantize")
    scales = scale_shape(x.shape, full)
    narrow = _is_e8m0(scale_dtype)
    if scale is not None:
        if power_of_two or narrow:
            raise ValueError(
                "quantize: power_of_two and scale_dtype are about computed scales; with scale= "
                "they must be left alone"
            )
        scale = _given_scale(scale, scales)
        refuse_explicit(scale, "quantize", "scale")
    kept = full if tile is None else full[x.ndim - len(tile) :]
    shape, canonical, restore = _canonical_tiles(x, full)
    operands = [shape(x)]
    if scale is not None:
        operands.append(scale.reshape(scale_shape(operands[0].shape, (1, *canonical))))
    if check_rounding(rounding, key, "quantize") and key is not None:
        operands.append(shape(jax.random.bits(key, x.shape, jnp.uint32)))
    out = bind_quantize(
        operands,
        fmt,
        (canonical,),
        execution,
        power_of_two=power_of_two or narrow,
        saturate=saturate,
        rounding=rounding,
    )
    values = restore(out[0])
    if scale is None:
        scale = out[1].reshape(scales)
    return ScaledArray(values, scale_to_e8m0(scale) if narrow else scale, kept)


def dequantize(q: ScaledArray, dtype: npt.DTypeLike = np.float32) -> Array:
    """Returns the real numbers `values · scale`, multiplied in FP32 and rounded once to `dtype`.

    Args:
      q: scaled array of any shape.
      dtype: float32, bfloat16 or float16.

    Raises:
      TypeError: a dtype that is not offered, or a gradient asked of q.

    >>> dequantize(quantize(jnp.array([0.0, 0.5, 448.0]))).tolist()
    [0.0, 0.5, 448.0]
    """
    check_scaled_array(q, "dequantize", "q")
    if np.dtype(dtype) not in FLOAT_DTYPES:
        raise TypeError(f"dequantize: dtype {np.dtype(dtype).name} is not offered; {OFFERED}")
    full = q.full_tile()
    shape, canonical, restore = _canonical_tiles(q.values, full)
    values = shape(q.values)
    scale = scale_to_float32(q.scale).reshape(scale_shape(values.shape, (1, *canonical)))
    execution = config.without_sums("dequantize")
    out = dequantize_p.bind(
        values, scale, tile=canonical, out_dtype=np.dtype(dtype).name, execution=execution
    )
    return restore(out)


def _is_e8m0(dtype: npt.DTypeLike) -> bool:
    dtype = np.dtype(dtype)
    if dtype not in (np.dtype(np.float32), formats.E8M0):
        raise TypeError(
            f"quantize: scale_dtype is {dtype.name}; it must be float32 or float8_e8m0fnu"
        )
    return dtype == formats.E8M0


def _given_scale(scale: Any, shape: tuple[int, ...]) -> Array:
    if isinstance(scale, float | int):  # under x64 a Python float would become float64
        scale = np.float32(scale)
    scale = jnp.asarray(scale)
    if np.dtype(scale.dtype) == formats.E8M0:
        scale = scale_to_float32(scale)
    if np.dtype(scale.dtype) != np.dtype(np.float32):
        raise TypeError(
            f"quantize: scale has dtype {scale.dtype}; scales are float32: convert with "
            "scale.astype(jnp.float32)"
        )
    if scale.ndim == 0:
        return jnp.broadcast_to(scale, shape)
    if scale.shape != shape:
        raise ValueError(f"quantize: scale has shape {scale.shape}; x and tile need {shape}")
    return scale


def _canonical_tiles(x: Array, tile: tuple[int, ...]) -> tuple[Any, Tile, Any]:
    """How an array of any rank with a tile size per dim becomes (b, rows, cols) with a 2-D tile.

    Returns:
      function to the canonical array, its tile, and the function back to x.shape. Scales of the
      canonical array, in row-major order, are those of x.
    """
    shape = x.shape
    tile = tuple(min(size, max(dim, 1)) for size, dim in zip(tile, shape, strict=True))
    first = next((i for i, size in enumerate(tile) if size != 1), len(tile))
    first = min(first, max(len(shape) - 1, 0))
    dims, sizes = list(shape[first:]), list(tile[first:])
    while len(dims) > 2 and sizes[-1] >= dims[-1]:  # whole trailing dims join the one before
        last = dims.pop()
        sizes.pop()
        sizes[-1] *= max(last, 1)
        dims[-1] *= last
    lead = math.prod(shape[:first])
    if len(dims) <= 2:
        if len(dims) == 2:
            canonical, pair = (lead, *dims), (sizes[0], sizes[1])
        else:  # rows that each have their own scales: leading dims are rows
            canonical, pair = (1, lead, *(dims or [1])), (1, (sizes or [1])[0])
        return (lambda y: y.reshape(canonical)), pair, (lambda y: y.reshape(shape))
    # Three or more tiled dims: gather each tile into a row, padding with zeros, which no amax sees.
    counts = [-(-dim // size) for dim, size in zip(dims, sizes, strict=True)]
    padded = [count * size for count, size in zip(counts, sizes, strict=True)]
    blocks = [lead, *(n for pair in zip(counts, sizes, strict=True) for n in pair)]
    order = [0, *range(1, len(blocks), 2), *range(2, len(blocks), 2)]
    tiles, volume = lead * math.prod(counts), math.prod(sizes)

    def gather(y: Array) -> Array:
        y = y.reshape(lead, *dims)
        y = jnp.pad(y, [(0, 0), *((0, p - d) for p, d in zip(padded, dims, strict=True))])
        return y.reshape(blocks).transpose(order).reshape(1, tiles, volume)

    def scatter(y: Array) -> Array:
        y = y.reshape([blocks[i] for i in order]).transpose(np.argsort(order))
        y = y.reshape(lead, *padded)[(slice(None), *(slice(dim) for dim in dims))]
        return y.reshape(shape)

    return by_bytes(gather), (1, volume), by_bytes(scatter)
