"""Quantisation to FP8 and back: the primitive, its public functions, and the two-axis form.

One pass over x finds each tile's amax and writes codes and scales. A GEMM that is differentiated
needs an operand quantised along both of its axes; the two-axis form writes both copies in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.interpreters import batching

from jax_fp8 import config, formats, lowering, primitive, reference
from jax_fp8.array import ScaledArray, resolve_tile, scale_shape
from jax_fp8.config import Execution
from jax_fp8.formats import Format, FormatLike

__all__ = ["dequantize", "quantize"]

Array = jax.Array
Tile = tuple[int, int]

#: dtypes of real numbers that kernels read and write.
FLOAT_DTYPES = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


def quantize(
    x: jax.typing.ArrayLike,
    format: FormatLike = "e4m3fn",
    tile: tuple[int, ...] | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    power_of_two: bool = False,
    saturate: bool = True,
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
      power_of_two: round computed scales up to powers of two; nothing saturates.
      saturate: with a given scale: clip finite values to the largest one. False: a magnitude that
        rounds above it becomes NaN (E4M3FN) or infinity (E5M2), as an `astype` would do. Nothing
        saturates under a computed scale.

    Returns:
      ScaledArray with `values` of x.shape and float32 `scale` of shape ceil(x.shape / tile).

    Raises:
      TypeError: wrong dtype of x or scale, unknown format, or a gradient asked of x.
      ValueError: tile or scale do not fit x.

    >>> q = quantize(jnp.ones((2, 256)), "e4m3", (1, 128))
    >>> q.values.dtype.name, q.scale.shape
    ('float8_e4m3fn', (2, 2))
    """
    fmt = formats.lookup(format, call="quantize")
    x = as_float_array(x, "quantize", "x")
    primitive.refuse_explicit(x, "quantize", "x")
    execution = config.current(call="quantize")
    full = resolve_tile(tile, x.shape, "quantize")
    scales = scale_shape(x.shape, full)
    if scale is not None:
        if power_of_two:
            raise ValueError(
                "quantize: power_of_two rounds computed scales; with scale= it must be off"
            )
        scale = _given_scale(scale, scales)
        primitive.refuse_explicit(scale, "quantize", "scale")
    kept = full if tile is None else full[x.ndim - len(tile) :]
    shape, canonical, restore = _canonical_tiles(x, full)
    operands = [shape(x)]
    if scale is not None:
        operands.append(scale.reshape(scale_shape(operands[0].shape, (1, *canonical))))
    out = bind_quantize(
        operands, fmt, (canonical,), execution, power_of_two=power_of_two, saturate=saturate
    )
    values = restore(out[0])
    return ScaledArray(values, scale if scale is not None else out[1].reshape(scales), kept)


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
        raise TypeError(f"dequantize: dtype {np.dtype(dtype).name} is not offered; {_offered()}")
    full = q.full_tile()
    shape, canonical, restore = _canonical_tiles(q.values, full)
    values = shape(q.values)
    scale = scale_to_float32(q.scale).reshape(scale_shape(values.shape, (1, *canonical)))
    execution = config.current(call="dequantize")
    out = dequantize_p.bind(
        values, scale, tile=canonical, out_dtype=np.dtype(dtype).name, execution=execution
    )
    return restore(out)


def quantize_two_axes(
    x: Array, fmt: Format, tiles: tuple[Tile, Tile], execution: Execution, *, power_of_two: bool
) -> tuple[Array, Array, Array, Array]:
    """Quantises (..., r, c) with two tiles in one pass.

    Returns:
      values and scale for the first tile, values and scale for the second.
    """
    lead, (rows, cols) = x.shape[:-2], x.shape[-2:]
    flat = x.reshape(math.prod(lead), rows, cols)
    out = bind_quantize([flat], fmt, tiles, execution, power_of_two=power_of_two)
    return tuple(y.reshape(*lead, *y.shape[1:]) for y in out)  # type: ignore[return-value]


def quantize_matrix(
    x: Array,
    fmt: Format,
    tile: Tile,
    execution: Execution,
    *,
    scale: Array | None = None,
    power_of_two: bool = False,
) -> tuple[Array, Array]:
    """Quantises (..., r, c) with one tile for the last two dims; returns values and scale."""
    lead, (rows, cols) = x.shape[:-2], x.shape[-2:]
    operands = [x.reshape(math.prod(lead), rows, cols)]
    if scale is not None:
        shape = scale_shape(operands[0].shape, (1, *tile))
        operands.append(jnp.broadcast_to(scale, shape))
    out = bind_quantize(operands, fmt, (tile,), execution, power_of_two=power_of_two)
    if scale is not None:
        out = [*out, operands[1]]
    values, scales = (y.reshape(*lead, *y.shape[1:]) for y in out)
    return values, scales


def scale_to_float32(scale: Array) -> Array:
    """float32 of a float32 or E8M0 scale, by integer operations.

    XLA may flush 2^-127, which E8M0 holds and which is subnormal in float32. Byte 255 is NaN.
    """
    if np.dtype(scale.dtype) != formats.E8M0:
        return scale
    byte = jax.lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
    bits = jnp.where(byte == 0, jnp.uint32(1 << 22), byte << 23)
    bits = jnp.where(byte == 255, jnp.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def check_scaled_array(q: Any, call: str, side: str) -> None:
    """Raises unless `q` is a sound ScaledArray that no Explicit mesh axis shards."""
    if not isinstance(q, ScaledArray):
        raise TypeError(
            f"{call}: {side} is {type(q).__name__}; it must be a ScaledArray: use quantize, or "
            "scaled_matmul for raw arrays"
        )
    q.check(call, side)
    primitive.refuse_explicit(q.values, call, side)
    primitive.refuse_explicit(q.scale, call, f"{side} scale")


def as_float_array(x: Any, call: str, side: str) -> Array:
    """Returns `x` as a JAX array of one of `FLOAT_DTYPES`, or raises."""
    x = jnp.asarray(x)
    check_float_dtype(x.dtype, call, side)
    return x


def check_float_dtype(dtype: npt.DTypeLike, call: str, side: str) -> None:
    """Raises unless `dtype` is one of real numbers that the kernels read."""
    dtype = np.dtype(dtype)
    if dtype in FLOAT_DTYPES:
        return
    if dtype.name.startswith("float8"):
        formats.lookup(dtype, call=f"{call}: {side}")
        raise TypeError(
            f"{call}: {side} has the FP8 dtype {dtype.name}; this call quantises real numbers "
            "itself. For FP8 operands with their scales use scaled_matmul or scaled_dot_general"
        )
    raise TypeError(f"{call}: {side} has dtype {dtype.name}; convert it with astype: {_offered()}")


def _offered() -> str:
    return "float32, bfloat16 and float16 are offered"


def _given_scale(scale: Any, shape: tuple[int, ...]) -> Array:
    if isinstance(scale, float | int):  # under x64 a Python float would become float64
        scale = np.float32(scale)
    scale = jnp.asarray(scale)
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
    first = next((i for i, size in enumerate(tile) if size != 1), len(tile))
    first = min(first, max(len(shape) - 1, 0))
    dims, sizes = list(shape[first:]), list(tile[first:])
    while len(dims) > 2 and sizes[-1] >= dims[-1]:  # whole trailing dims join the one before
        last = dims.pop()
        sizes.pop()
        sizes[-1] = min(sizes[-1], max(dims[-1], 1)) * max(last, 1)
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

    return gather, (1, volume), scatter


# --- The primitives -----------------------------------------------------------------------------


def bind_quantize(
    operands: Sequence[Array],
    fmt: Format,
    tiles: tuple[Tile, ...],
    execution: Execution,
    *,
    power_of_two: bool = False,
    saturate: bool = True,
) -> list[Array]:
    """Binds quantize_p to x (b, r, c) and, if given, its scale (b, ceil(r/tr), ceil(c/tc))."""
    out: list[Array] = quantize_p.bind(
        *operands,
        format=fmt.name,
        tiles=tiles,
        power_of_two=power_of_two,
        saturate=saturate,
        execution=execution,
    )
    return out


def _quantize_abstract(
    x: Any, *scale: Any, format: str, tiles: tuple[Tile, ...], **params: Any
) -> list[Any]:
    fmt = formats.lookup(format)
    values = x.update(shape=x.shape, dtype=fmt.dtype, weak_type=False)
    if scale:
        return [values]
    out = []
    for tile in tiles:
        shape = scale_shape(x.shape, (1, *tile))
        out += [values, x.update(shape=shape, dtype=np.dtype(np.float32), weak_type=False)]
    return out


def _quantize_reference(
    x: Array,
    *scale: Array,
    format: str,
    tiles: tuple[Tile, ...],
    power_of_two: bool,
    saturate: bool,
    execution: Execution,
) -> list[Array]:
    fmt, x = formats.lookup(format), x.astype(jnp.float32)
    if scale:
        return [reference.cast(x, scale[0], fmt, tiles[0], saturate)]
    out = []
    for tile in tiles:
        computed = reference.compute_scale(x, fmt, tile, power_of_two)
        out += [reference.cast(x, computed, fmt, tile, saturate), computed]
    return out


quantize_p = primitive.make("jax_fp8.quantize", _quantize_abstract, multiple_results=True)
dequantize_p = primitive.make(
    "jax_fp8.dequantize",
    lambda values, scale, *, out_dtype, **params: values.update(
        shape=values.shape, dtype=np.dtype(out_dtype), weak_type=False
    ),
    multiple_results=False,
)

primitive.refuse_tangents(
    quantize_p,
    ("x", "scale"),
    "FP8 codes are piecewise constant: differentiate matmul, dot_general or einsum, whose rule "
    "passes gradients straight through the quantiser, or quantise jax.lax.stop_gradient(x)",
)
primitive.refuse_tangents(
    dequantize_p,
    ("values", "scale"),
    "raw FP8 values and scales are constants to jax_fp8: use jax.lax.stop_gradient on them",
)


def _merge_batch(prim: Any) -> Any:
    """Batching rule of a primitive on (b, …): the new dim joins b."""

    def rule(operands: Sequence[Array], dims: Sequence[int | None], **params: Any) -> Any:
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        moved = primitive.to_front(operands, dims)
        merged = [
            jnp.broadcast_to(x, (size, *x.shape[1:])).reshape(size * x.shape[1], *x.shape[2:])
            for x in moved
        ]
        out = prim.bind(*merged, **params)

        def split(y: Array) -> Array:
            return y.reshape(size, moved[0].shape[1], *y.shape[1:])

        if prim.multiple_results:
            return [split(y) for y in out], [0] * len(out)
        return split(out), 0

    return rule


for _prim in (quantize_p, dequantize_p):
    batching.primitive_batchers[_prim] = _merge_batch(_prim)


def _quantize_target(
    *,
    tiles: tuple[Tile, ...],
    power_of_two: bool,
    saturate: bool,
    format: str,
    execution: Execution,
    num_operands: int,
) -> tuple[str, dict[str, Any]]:
    arrays = [np.array(tile, np.int64) for tile in tiles]
    if num_operands == 2:
        return "jax_fp8.quantize_with_scale.v1", {"tile": arrays[0], "saturate": saturate}
    if len(tiles) == 2:
        return "jax_fp8.quantize_two_axes.v1", {
            "tile0": arrays[0],
            "tile1": arrays[1],
            "power_of_two": power_of_two,
        }
    return "jax_fp8.quantize.v1", {"tile": arrays[0], "power_of_two": power_of_two}


def _dequantize_target(
    *, tile: Tile, out_dtype: str, execution: Execution, num_operands: int
) -> tuple[str, dict[str, Any]]:
    return "jax_fp8.dequantize.v1", {"tile": np.array(tile, np.int64)}


def _dequantize_reference(
    values: Array, scale: Array, *, tile: Tile, out_dtype: str, execution: Execution
) -> Array:
    expanded = reference.expand_scale(scale, values.shape, tile)
    return (values.astype(jnp.float32) * expanded).astype(out_dtype)


lowering.register_lowerings(quantize_p, "quantize", _quantize_target, _quantize_reference)
lowering.register_lowerings(dequantize_p, "quantize", _dequantize_target, _dequantize_reference)
