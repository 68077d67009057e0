"""The primitives behind quantize and dequantize, on (b, rows, cols) with a tile for rows and cols.

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
from jax.interpreters import batching

from jax_fp8 import formats, lowering, primitive, reference
from jax_fp8.array import scale_shape
from jax_fp8.config import Execution
from jax_fp8.formats import Format

__all__ = ["bind_quantize", "dequantize_p", "quantize_matrix", "quantize_p", "quantize_two_axes"]

Array = jax.Array
Tile = tuple[int, int]


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
    values0, scale0, values1, scale1 = (y.reshape(*lead, *y.shape[1:]) for y in out)
    return values0, scale0, values1, scale1


def quantize_matrix(
    x: Array,
    fmt: Format,
    tile: Tile,
    execution: Execution,
    *,
    scale: Array | None = None,
    power_of_two: bool = False,
    bits: Array | None = None,
) -> tuple[Array, Array]:
    """Quantises (..., r, c) with one tile for the last two dims; returns values and scale.

    With `bits`, uint32 of x.shape, it rounds stochastically.
    """
    lead, (rows, cols) = x.shape[:-2], x.shape[-2:]
    operands = [x.reshape(math.prod(lead), rows, cols)]
    if scale is not None:
        shape = scale_shape(operands[0].shape, (1, *tile))
        operands.append(jnp.broadcast_to(scale, shape))
    if bits is not None:
        operands.append(bits.reshape(operands[0].shape))
    out = bind_quantize(
        operands,
        fmt,
        (tile,),
        execution,
        power_of_two=power_of_two,
        rounding="nearest" if bits is None else "stochastic",
    )
    if scale is not None:
        out = [*out, operands[1]]
    values, scales = (y.reshape(*lead, *y.shape[1:]) for y in out)
    return values, scales


def bind_quantize(
    operands: Sequence[Array],
    fmt: Format,
    tiles: tuple[Tile, ...],
    execution: Execution,
    *,
    power_of_two: bool = False,
    saturate: bool = True,
    rounding: str = "nearest",
) -> list[Array]:
    """Binds quantize_p to x (b, r, c), then its scale (b, ceil(r/tr), ceil(c/tc)) if it is given,
    then uint32 noise (b, r, c) if rounding is stochastic."""
    out: list[Array] = quantize_p.bind(
        *operands,
        format=fmt.name,
        tiles=tiles,
        power_of_two=power_of_two,
        saturate=saturate,
        rounding=rounding,
        execution=execution,
    )
    return out


def _split(operands: Sequence[Any], rounding: str) -> tuple[Any, Any, Any]:
    """x, scale or None, noise or None."""
    x, *rest = operands
    bits = rest.pop() if rounding == "stochastic" else None
    return x, rest[0] if rest else None, bits


def _quantize_abstract(
    *operands: Any, format: str, tiles: tuple[Tile, ...], rounding: str, **params: Any
) -> list[Any]:
    fmt = formats.lookup(format)
    x, scale, _ = _split(operands, rounding)
    values = x.update(shape=x.shape, dtype=fmt.dtype, weak_type=False)
    if scale is not None:
        return [values]
    out = []
    for tile in tiles:
        shape = scale_shape(x.shape, (1, *tile))
        out += [values, x.update(shape=shape, dtype=np.dtype(np.float32), weak_type=False)]
    return out


def _quantize_reference(
    *operands: Array,
    format: str,
    tiles: tuple[Tile, ...],
    power_of_two: bool,
    saturate: bool,
    rounding: str,
    execution: Execution,
) -> list[Array]:
    fmt = formats.lookup(format)
    x, scale, bits = _split(operands, rounding)
    x = x.astype(jnp.float32)
    if scale is not None:
        return [reference.cast(x, scale, fmt, tiles[0], saturate, bits)]
    out = []
    for tile in tiles:
        computed = reference.compute_scale(x, fmt, tile, power_of_two)
        out += [reference.cast(x, computed, fmt, tile, saturate, bits), computed]
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
    ("x", "scale", "noise"),
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
    rounding: str,
    format: str,
    execution: Execution,
    num_operands: int,
) -> tuple[str, dict[str, Any]]:
    arrays = [np.array(tile, np.int64) for tile in tiles]
    stochastic = rounding == "stochastic"
    name = "quantize_stochastic" if stochastic else "quantize"
    if num_operands - stochastic == 2:
        return f"jax_fp8.{name}_with_scale.v1", {"tile": arrays[0], "saturate": saturate}
    if len(tiles) == 2:
        return "jax_fp8.quantize_two_axes.v1", {
            "tile0": arrays[0],
            "tile1": arrays[1],
            "power_of_two": power_of_two,
        }
    return f"jax_fp8.{name}.v1", {"tile": arrays[0], "power_of_two": power_of_two}


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
