"""The independent oracle: quantiser and GEMM in NumPy, by the numbers contract and nothing else.

Nothing here calls a kernel of this package or jnp, which XLA compiles with flush-to-zero. Casts are
those of ml_dtypes; the rest is float64, or float32 exactly as the contract says. It is slow and
plain on purpose: tests compare everything else with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = [
    "dequantize_np",
    "expand_scale_np",
    "fma_np",
    "gemm_bound_np",
    "gemm_chain_np",
    "gemm_np",
    "quantize_np",
    "sum_of_pieces_np",
]

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Fma = Callable[[int, Float32], Float32]

_DTYPES: Final[dict[str, npt.DTypeLike]] = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
#: Largest finite values, from OFP8 1.0 table 1; both are 1.75 times a power of two.
_MAX: Final = {"e4m3fn": 448.0, "e5m2": 57344.0}
#: Mantissa bits and exponent of the smallest normal number.
_NARROW_OUTPUTS: Final = {"bfloat16": (7, -126), "float16": (10, -14)}
_FP8_LATTICES: Final = {"e4m3fn": (3, -6), "e5m2": (2, -14)}
_SMALLEST_SCALE: Final = np.float32(2.0**-126)


def quantize_np(
    x: npt.ArrayLike,
    fmt: str,
    tile: tuple[int, ...],
    *,
    scale: npt.ArrayLike | None = None,
    power_of_two: bool = False,
    saturate: bool = True,
    bits: npt.ArrayLike | None = None,
) -> tuple[Array, Float32]:
    """Quantises by lines 3 and 4 of the numbers contract.

    Args:
      x: float32, bfloat16 or float16 array of any shape.
      fmt: "e4m3fn" or "e5m2".
      tile: what one scale covers: a size per trailing dim of x, -1 for the whole dim; dims before
        those have tile 1.
      scale: float32 of shape ceil(x.shape / tile) to divide by, instead of the one from amax.
      power_of_two: round computed scales up to powers of two.
      saturate: False leaves what rounds above the largest value to the cast: NaN or infinity.
      bits: uint32 of x.shape, which turns rounding to nearest even into stochastic rounding: away
        from zero where the dropped fraction of an ulp, in units of 2^-32 and cut to an integer,
        exceeds the bits.

    Returns:
      FP8 values of x.shape, and float32 scale of shape ceil(x.shape / tile).

    >>> values, scale = quantize_np(np.float32([[1.0, -896.0]]), "e4m3fn", (1, 2))
    >>> values.astype(np.float32).tolist(), scale.tolist()
    ([[0.5, -448.0]], [[2.0]])

    9.25 lies a quarter of an ulp above 9:

    >>> x, bits = np.full((1, 2), 9.25, np.float32), np.uint32([[2**30 - 1, 2**30]])
    >>> values, _ = quantize_np(x, "e4m3fn", (1, 2), scale=[[1.0]], bits=bits)
    >>> values.astype(np.float32).tolist()
    [[10.0, 9.0]]
    """
    x = np.asarray(x).astype(np.float32)
    sizes = _full_tile(tile, x.shape)
    if scale is None:
        scale = _scale_of(_tile_amax(x, sizes), fmt, power_of_two)
    scale = np.asarray(scale, np.float32)
    with np.errstate(all="ignore"):
        y = x / expand_scale_np(scale, x.shape, tile)
        if saturate:
            # Infinity is decided on x: the quotient of a finite x may overflow, and must saturate.
            y = np.where(np.isfinite(x), np.clip(y, -_MAX[fmt], _MAX[fmt]), y)
        if bits is not None:
            y = _round_stochastically(y, fmt, np.asarray(bits, np.uint32))
        return y.astype(np.float32).astype(_DTYPES[fmt]), scale


def dequantize_np(values: Array, scale: npt.ArrayLike, tile: tuple[int, ...]) -> Float64:
    """Returns values · scale in float64, which is exact.

    Args:
      values: FP8 array of any shape.
      scale: float32 of shape ceil(values.shape / tile).
      tile: as in `quantize_np`.

    >>> values = np.ones((1, 3), ml_dtypes.float8_e5m2)
    >>> dequantize_np(values, np.float32([[2.0, 4.0]]), (1, 2)).tolist()
    [[2.0, 2.0, 4.0]]
    """
    with np.errstate(invalid="ignore"):
        expanded = expand_scale_np(scale, values.shape, tile).astype(np.float64)
        real: Float64 = values.astype(np.float64) * expanded
        return real


def expand_scale_np(scale: npt.ArrayLike, shape: tuple[int, ...], tile: tuple[int, ...]) -> Array:
    """Repeats each scale over its tile, along the dims that `tile` has a size for.

    Args:
      scale: array of any dtype; its trailing dims are those of ceil(shape / tile), its others are
        kept, so that they may be 1 or absent where they broadcast.
      shape: shape of the values.
      tile: as in `quantize_np`.

    Returns:
      Array that broadcasts against `shape`.

    >>> expand_scale_np([1, 2], (5,), (3,)).tolist()
    [1, 1, 1, 2, 2]
    """
    scale, rank = np.asarray(scale), len(tile)
    dims, sizes = shape[len(shape) - rank :], _full_tile(tile, shape)[len(shape) - rank :]
    expected = tuple(-(-dim // size) for dim, size in zip(dims, sizes, strict=True))
    if scale.shape[scale.ndim - rank :] != expected:
        raise ValueError(f"scale has shape {scale.shape}; {shape} and tile {tile} need {expected}")
    for axis, (dim, size) in enumerate(zip(dims, sizes, strict=True), scale.ndim - rank):
        scale = np.take(scale, np.arange(dim) // size, axis=axis)
    return scale


def gemm_np(
    lhs: Array,
    rhs: Array,
    lhs_scale: npt.ArrayLike,
    rhs_scale: npt.ArrayLike,
    lhs_tile: tuple[int, int],
    rhs_tile: tuple[int, int],
) -> Float64:
    """The product of the dequantised operands in float64.

    Exact for E4M3FN · E4M3FN with power-of-two scales up to k = 2^17: products are multiples of
    2^-18 and their sum stays below 2^35, which 53 bits hold. Else its error is some 2^-53.

    Args:
      lhs: (*batch, m, k) FP8.
      rhs: (*batch, n, k) FP8; batch dims broadcast.
      lhs_scale: (*batch, ceil(m / tile_m), ceil(k / tile_k)) float32; batch dims broadcast too.
      rhs_scale: (*batch, ceil(n / tile_n), ceil(k / tile_k)) float32.
      lhs_tile: (tile_m, tile_k).
      rhs_tile: (tile_n, tile_k).

    Returns:
      (*batch, m, n) float64.

    >>> x, one = np.float64([[1.0, 2.0]]).astype(ml_dtypes.float8_e4m3fn), np.float32([[0.5]])
    >>> gemm_np(x, x, one, one, (1, 2), (1, 2)).tolist()
    [[1.25]]
    """
    lhs_real = dequantize_np(lhs, lhs_scale, lhs_tile)
    rhs_real = dequantize_np(rhs, rhs_scale, rhs_tile)
    return _matmul_nt(lhs_real, rhs_real)


def gemm_bound_np(
    lhs: Array,
    rhs: Array,
    lhs_scale: npt.ArrayLike,
    rhs_scale: npt.ArrayLike,
    lhs_tile: tuple[int, int],
    rhs_tile: tuple[int, int],
    *,
    out: npt.DTypeLike = np.float32,
) -> Float64:
    """Largest |kernel - gemm_np| that the contract's fp32 model allows, for each output.

    Contract line 5 cuts k into P pieces of at most L terms, at the tile edges of both operands.
    With u = 2^-24, half the relative distance between float32 numbers, the roundings on the way of
    a product into the result are
      L  of the chain partial = fma(lhs, rhs, partial), products themselves being exact,
      1  of the product of both scales,
      P  of acc = fma(partial, scales, acc); with one piece, 1 of partial · scales,
    so that each product arrives multiplied by at most (1 + u)^(L + P + 1), and
      |error| <= c · 2^-24 · sum |lhs| |rhs|   with c · 2^-24 = (1 + 2^-24)^(L + P + 1) - 1,
    where lhs and rhs are dequantised. Where a scale product or an acc is subnormal its rounding is
    2^-150 instead of a relative u: the first counts once per unit of |partial|, that is sum |lhs|
    |rhs| of the codes' values, the second once per piece. gemm_np itself errs by (k + 1) · 2^-53 of
    sum |lhs| |rhs|. One rounding to `out` adds half a unit in its last place. Overflow is not
    covered.

    Args:
      lhs, rhs, lhs_scale, rhs_scale, lhs_tile, rhs_tile: as in `gemm_np`.
      out: dtype of the kernel's result.

    Returns:
      (*batch, m, n) float64 bounds.

    >>> x, one = np.ones((1, 8), ml_dtypes.float8_e4m3fn), np.float32([[1.0]])
    >>> bound = gemm_bound_np(x, x, one, one, (1, 8), (1, 8))
    >>> bool(80 * 2.0**-24 < bound[0, 0] < 90 * 2.0**-24)
    True
    """
    pieces = _pieces(lhs.shape[-1], lhs_tile[1], rhs_tile[1])
    roundings = max((end - begin for begin, end in pieces), default=0) + len(pieces) + 1
    relative = math.expm1(roundings * math.log1p(2.0**-24)) + (lhs.shape[-1] + 1) * 2.0**-53

    def magnitudes(operand: Array, scale: npt.ArrayLike, tile: tuple[int, int]) -> Float64:
        real: Float64 = np.abs(dequantize_np(operand, scale, tile))
        return real

    scaled = _matmul_nt(magnitudes(lhs, lhs_scale, lhs_tile), magnitudes(rhs, rhs_scale, rhs_tile))
    unscaled = _matmul_nt(np.abs(lhs.astype(np.float64)), np.abs(rhs.astype(np.float64)))
    error: Float64 = relative * scaled + 2.0**-150 * (unscaled + len(pieces))
    if np.dtype(out) == np.float32:
        return error  # the model's own roundings are those of float32
    exact = np.abs(gemm_np(lhs, rhs, lhs_scale, rhs_scale, lhs_tile, rhs_tile))
    return error + _half_ulp(exact + error, out)


def gemm_chain_np(
    lhs: Array,
    rhs: Array,
    lhs_scale: npt.ArrayLike,
    rhs_scale: npt.ArrayLike,
    lhs_tile: tuple[int, int],
    rhs_tile: tuple[int, int],
) -> Float32:
    """The bits of the contract's fp32 model: a chain of FP32 FMAs per piece of k, then the scales.

    For small sizes: every k costs an emulated FMA over the whole result.

    Args:
      lhs, rhs, lhs_scale, rhs_scale, lhs_tile, rhs_tile: as in `gemm_np`.

    Returns:
      (*batch, m, n) float32 before the one rounding to the result's dtype, which is `astype`.

    >>> x, one = np.ones((1, 3), ml_dtypes.float8_e4m3fn), np.float32([[0.5]])
    >>> gemm_chain_np(x, x, one, one, (1, 3), (1, 3)).tolist()
    [[0.75]]
    """
    return sum_of_pieces_np(_add_in_order, lhs, rhs, lhs_scale, rhs_scale, lhs_tile, rhs_tile)


def _add_in_order(fma: Fma, begin: int, end: int) -> Float32:
    partial = np.zeros((), np.float32)
    for i in range(begin, end):
        partial = fma(i, partial)
    return partial


def sum_of_pieces_np(
    add_up: Callable[[Fma, int, int], Float32],
    lhs: Array,
    rhs: Array,
    lhs_scale: npt.ArrayLike,
    rhs_scale: npt.ArrayLike,
    lhs_tile: tuple[int, int],
    rhs_tile: tuple[int, int],
) -> Float32:
    """`gemm_chain_np` with another order of sums within the pieces of k.

    Args:
      add_up: maps (fma, begin, end) to the sum of the products begin … end - 1, (*batch, m, n) or
        a scalar 0, where fma(i, x) is x plus product i, rounded once.
      lhs, rhs, lhs_scale, rhs_scale, lhs_tile, rhs_tile: as in `gemm_np`.
    """
    (m, k), n = lhs.shape[-2:], rhs.shape[-2]
    lhs_scale, rhs_scale = np.asarray(lhs_scale, np.float32), np.asarray(rhs_scale, np.float32)
    lhs32, rhs32 = lhs.astype(np.float32), rhs.astype(np.float32)
    lhs_scales = expand_scale_np(lhs_scale, lhs.shape, lhs_tile)
    rhs_scales = expand_scale_np(rhs_scale, rhs.shape, rhs_tile)
    batch = np.broadcast_shapes(*(x.shape[:-2] for x in (lhs, rhs, lhs_scale, rhs_scale)))
    acc = np.zeros((*batch, m, n), np.float32)
    scales_vary = lhs_scale.shape[-1] > 1 or rhs_scale.shape[-1] > 1

    def fma(i: int, sums: Float32) -> Float32:
        return fma_np(lhs32[..., :, None, i], rhs32[..., None, :, i], sums)

    for begin, end in _pieces(k, lhs_tile[1], rhs_tile[1]):
        partial = add_up(fma, begin, end)
        with np.errstate(all="ignore"):
            scales = lhs_scales[..., :, None, begin] * rhs_scales[..., None, :, begin]
            scaled = fma_np(partial, scales, acc) if scales_vary else partial * scales
        # A zero partial contributes nothing, whatever the scales.
        acc = np.where(partial == 0, acc, scaled)
    return acc


def fma_np(a: Float32, b: Float32, c: Float32) -> Float32:
    """float32(a · b + c) with one rounding to nearest even, subnormals kept, for arrays.

    The product of two float32 numbers is exact in float64. The sum is rounded to odd there: 53 bits
    rounded to odd, then rounded to nearest at 24 bits or fewer, give what one rounding gives
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).

    >>> float(fma_np(np.float32(3), np.float32(2.0**-24), np.float32(1)) - 1) == 2.0**-22
    True
    """
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.broadcast_to(np.asarray(c, np.float64), product.shape)
        total = product + addend
        # Knuth's two-sum: total + error == product + addend exactly.
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        bits = np.asarray(total).view(np.int64)
        away_from_zero = (error > 0) == (total > 0)
        inexact_even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        odd = bits + np.where(inexact_even, np.where(away_from_zero, 1, -1), 0)
        return odd.view(np.float64).astype(np.float32)


# --- Helpers --------------------------------------------------------------------------------------


def _full_tile(tile: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """One size >= 1 per dim of `shape`."""
    if len(tile) > len(shape):
        raise ValueError(f"tile {tile} has {len(tile)} sizes, the array has {len(shape)} dims")
    sizes = (1,) * (len(shape) - len(tile)) + tile
    return tuple(
        max(dim, 1) if size == -1 else size for dim, size in zip(shape, sizes, strict=True)
    )


def _tile_amax(x: Float32, sizes: tuple[int, ...]) -> Float32:
    """Largest finite magnitude of each tile; 0 where there is none."""
    amax = np.where(np.isfinite(x), np.abs(x), np.float32(0))
    for axis, size in enumerate(sizes):
        if amax.shape[axis]:
            starts = np.arange(0, amax.shape[axis], size)
            amax = np.maximum.reduceat(amax, starts, axis=axis)
    return amax


def _scale_of(amax: Float32, fmt: str, power_of_two: bool) -> Float32:
    if power_of_two:
        # amax <= max · 2^p, compared as mantissas and exponents, so that nothing is rounded.
        mantissa, exponent = np.frexp(amax.astype(np.float64))
        max_mantissa, max_exponent = math.frexp(_MAX[fmt])
        exponent = exponent - max_exponent + (mantissa > max_mantissa)
        scale = np.ldexp(1.0, exponent).astype(np.float32)
    else:
        scale = amax / np.float32(_MAX[fmt])
    scale = np.maximum(scale, _SMALLEST_SCALE)
    return np.where(amax == 0, np.float32(1), scale)


def _round_stochastically(y: Array, fmt: str, bits: Array) -> Float64:
    """Finite y to a neighbour on the format's lattice, which goes on above its largest value."""
    mantissa_bits, lowest_exponent = _FP8_LATTICES[fmt]
    magnitude = np.where(np.isfinite(y), np.abs(y), 0).astype(np.float64)
    _, exponent = np.frexp(magnitude)  # magnitude < 2^exponent
    ulp_exponent = np.maximum(exponent - 1, lowest_exponent) - mantissa_bits
    ulps = np.ldexp(magnitude, -ulp_exponent)
    whole = np.floor(ulps)
    up = np.floor(np.ldexp(ulps - whole, 32)) > bits
    return np.where(np.isfinite(y), np.copysign(np.ldexp(whole + up, ulp_exponent), y), y)


def _pieces(k: int, lhs_tile_k: int, rhs_tile_k: int) -> list[tuple[int, int]]:
    """[begin, end) of k between the tile edges of both operands."""
    edges = {0, k}
    for size in (lhs_tile_k, rhs_tile_k):
        edges.update(range(0, k, size if size != -1 else max(k, 1)))
    ordered = sorted(edges)
    return list(itertools.pairwise(ordered))


def _matmul_nt(lhs: Float64, rhs: Float64) -> Float64:
    with np.errstate(all="ignore"):
        product: Float64 = np.matmul(lhs, np.swapaxes(rhs, -1, -2))
        return product


def _half_ulp(magnitude: Float64, dtype: npt.DTypeLike) -> Float64:
    mantissa_bits, lowest_exponent = _NARROW_OUTPUTS[np.dtype(dtype).name]
    _, exponent = np.frexp(magnitude)  # magnitude < 2^exponent
    binade = np.maximum(exponent - 1, lowest_exponent)
    half_ulp: Float64 = np.ldexp(1.0, binade - mantissa_bits - 1)
    return half_ulp
