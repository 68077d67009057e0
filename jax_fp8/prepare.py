"""Weights prepared once: quantised as a forward pass would, and laid out for the kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8 import config, formats, recipes
from jax_fp8.array import ScaledArray, scale_shape
from jax_fp8.contraction import Contraction
from jax_fp8.operands import as_float_array, check_scaled_array
from jax_fp8.panels import by_bytes, to_panels
from jax_fp8.prepared import PreparedArray
from jax_fp8.primitive import refuse_explicit
from jax_fp8.recipes import Recipe

__all__ = ["prepare"]

Array = jax.Array


def prepare(
    w: jax.typing.ArrayLike | ScaledArray, *, recipe: Recipe | None = None, k_axis: int = -2
) -> PreparedArray:
    """Quantises weights and lays them out, once, for any number of products with them.

    A call with the result has the bits of the call with `w` itself under the same recipe, and saves
    quantising `w` again: one byte per weight is read instead of four, and nothing is written. Give
    the result to a jitted function as an argument: what a function closes over becomes a constant
    of the compiled program, which takes its memory again.

    Args:
      w: float32, bfloat16 or float16 weights (k, n), or FP8 ones as a `ScaledArray`, whose codes
        and scales are kept. Leading dims are batch dims, such as the layers of a stack that a scan
        goes through: each matrix gets its own scales.
      recipe: gives format, tile and scale of the role "weight"; None is `BlockScaling()`. Must be
        None for a `ScaledArray`.
      k_axis: the axis that products contract: -2 for (k, n), -1 for weights that are stored as
        (n, k), the (out_features, in_features) of PyTorch's checkpoints.

    Returns:
      PreparedArray of shape (*batch, k, n), whichever the axis.

    Raises:
      TypeError: a dtype that is not offered, no recipe, or a gradient asked of w.
      ValueError: shape or axis that do not fit, or a recipe for weights that are FP8 already.

    >>> import jax_fp8 as fp8
    >>> w = fp8.prepare(jnp.ones((256, 100)))
    >>> w.shape, w.values.shape, fp8.matmul(jnp.ones((1, 256)), w).shape
    ((256, 100), (2, 256, 64), (1, 100))
    >>> fp8.prepare(jnp.ones((100, 256)), k_axis=-1).shape
    (256, 100)
    """
    call = "prepare"
    if isinstance(w, ScaledArray):
        check_scaled_array(w, call, "w")
        if recipe is not None:
            raise ValueError(
                f"{call}: w is a ScaledArray, whose format and scales are kept; leave recipe None, "
                "or quantise again by giving w.dequantize()"
            )
        axis = _axis(k_axis, w.shape, call)
        values, scale, tile = w.values, *_matrix_scale(w)
    else:
        x = _weights(w, call)
        axis = _axis(k_axis, x.shape, call)
        values, scale, tile = _quantize(x, axis, recipes.check(recipe, call), call)
    if axis == -1:
        values, scale = _swap_axes(values), _swap_axes(scale)
        tile = (tile[1], tile[0])
    return PreparedArray(to_panels(values), scale, int(values.shape[-1]), tile)


def _weights(w: Any, call: str) -> Array:
    if isinstance(w, PreparedArray):
        raise TypeError(f"{call}: w is a PreparedArray already; use it as it is")
    dtype = getattr(w, "dtype", None)
    if dtype is not None and np.dtype(dtype).name.startswith("float8"):
        formats.lookup(dtype, call=f"{call}: w")
        raise TypeError(
            f"{call}: w has the FP8 dtype {np.dtype(dtype).name} and no scale; give "
            "ScaledArray(values, scale, tile)"
        )
    x = as_float_array(w, call, "w")
    refuse_explicit(x, call, "w")
    return x


def _axis(k_axis: int, shape: tuple[int, ...], call: str) -> int:
    if len(shape) < 2:
        raise ValueError(f"{call}: w has shape {shape}; it must be a matrix, or a stack of them")
    if isinstance(k_axis, bool) or k_axis not in (-1, -2, len(shape) - 1, len(shape) - 2):
        raise ValueError(
            f"{call}: k_axis is {k_axis!r} for w of shape {shape}; it must be -2 for (k, n) or -1 "
            "for (n, k): transpose other orders"
        )
    return k_axis if k_axis < 0 else k_axis - len(shape)


def _quantize(
    x: Array, axis: int, recipe: Recipe, call: str
) -> tuple[Array, Array, tuple[int, int]]:
    """What the forward pass of `matmul` makes of its weights."""
    contraction = Contraction(
        axes=(-1, axis),
        roles=("input", "weight"),
        recipe=recipe,
        out_dtype="float32",
        executions=config.executions(None, recipe.sums, call=call),
    )
    (copy,) = contraction.quantize(x, "weight", [axis])
    return copy.values, copy.scale, copy.tile


def _matrix_scale(q: ScaledArray) -> tuple[Array, tuple[int, int]]:
    """Scales and tile of each matrix of a stack: every leaf must have the stack's leading dims."""
    tile, scale = q.full_tile(), q.scale
    for axis, size in enumerate(q.shape[:-2]):
        if tile[axis] != 1:
            scale = by_bytes(_repeater(tile[axis], axis, size))(scale)
    rows, cols = (min(t, max(size, 1)) for t, size in zip(tile[-2:], q.shape[-2:], strict=True))
    assert scale.shape[-2:] == scale_shape(q.shape[-2:], (rows, cols))
    return scale, (rows, cols)


def _repeater(tile: int, axis: int, size: int) -> Any:
    return lambda scale: jax.lax.slice_in_dim(
        jnp.repeat(scale, tile, axis=axis), 0, size, axis=axis
    )


def _swap_axes(x: Array) -> Array:
    return by_bytes(lambda y: jnp.swapaxes(y, -1, -2))(x)
