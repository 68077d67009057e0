"""The scaled calls: FP8 values and the scales that belong to them in, real numbers out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8 import config, dimension_numbers, formats, gemm
from jax_fp8.accumulation import UNSET, Sums, Unset
from jax_fp8.array import ScaledArray, resolve_tile, scale_shape
from jax_fp8.dot import check_k, plan_of
from jax_fp8.emulation.machines import MACHINES
from jax_fp8.emulation.overflow import warn_of_overflow
from jax_fp8.operands import NOT_LHS, check_prepared, check_scaled_array
from jax_fp8.prepared import PreparedArray
from jax_fp8.prepared_dot import check_plan
from jax_fp8.primitive import refuse_explicit
from jax_fp8.scaling import scale_to_float32

__all__ = ["scaled_dot_general", "scaled_matmul"]

Array = jax.Array
ArrayLike = jax.typing.ArrayLike


def scaled_dot_general(
    lhs: ScaledArray,
    rhs: ScaledArray | PreparedArray,
    dimension_numbers: Any,
    preferred_element_type: npt.DTypeLike = np.float32,
    *,
    accumulation: str | Unset = UNSET,
    promotion_interval: int | Unset | None = UNSET,
    split_k: int | Unset = UNSET,
) -> Array:
    """Multiplies scaled FP8 operands: `dequantize(lhs) · dequantize(rhs)`, added in FP32.

    Not differentiable: codes and scales are constants. For gradients use `dot_general`.

    Args:
      lhs: scaled array, E4M3FN or E5M2.
      rhs: scaled array, E4M3FN or E5M2; the formats may differ. Or prepared weights, with dims in
        their order: batch dims, k, n.
      dimension_numbers: as for `jax.lax.dot_general`.
      preferred_element_type: float32, bfloat16 or float16: the FP32 result is rounded to it once.
      accumulation: accumulation model to emulate on a CPU, a name of `emulation.MACHINES`; explicit
        argument > context > "native".
      promotion_interval: k after which a short accumulator is added to an FP32 sum, a multiple of
        the model's step; None is never. Left out everywhere, the model's default. The native CPU
        kernels accumulate in FP32 throughout and ignore it.
      split_k: parts of k that are added up apart from each other, and at the end in FP32.

    Returns:
      Array of shape (batch..., lhs free..., rhs free...).

    Raises:
      TypeError: operands, scales or preferred_element_type of another dtype.
      ValueError: shapes, tiles or scale kinds that do not fit, see `jax_fp8.gemm.SCALE_PAIRS`.

    >>> from jax_fp8 import quantize
    >>> q = quantize(jnp.ones((4, 8)), "e4m3", (1, -1))
    >>> scaled_dot_general(q, q, (((1,), (1,)), ((), ()))).shape
    (4, 4)
    """
    call = "scaled_dot_general"
    check_scaled_array(lhs, call, "lhs")
    if isinstance(rhs, PreparedArray):
        check_prepared(rhs, call)
    else:
        check_scaled_array(rhs, call, "rhs")
    plan = plan_of(dimension_numbers, lhs, rhs, call)
    execution = _execution(Sums(accumulation, promotion_interval, split_k), call)
    _check_scale_kinds(plan, lhs, rhs, execution, call)
    rhs_n = None
    if isinstance(rhs, PreparedArray):
        check_plan(plan, call)
        w, w_axis, rhs_n = rhs.operand(), -2, rhs.n
    else:
        w, w_axis = plan.rhs.canonical_scaled(_with_float32(rhs), call, "rhs"), plan.rhs.axis
    out = gemm.gemm(
        plan.lhs.canonical_scaled(_with_float32(lhs), call, "lhs"),
        plan.lhs.axis,
        w,
        w_axis,
        out_dtype=gemm.check_out_dtype(preferred_element_type, call),
        execution=execution,
        rhs_n=rhs_n,
    )
    return out.reshape(plan.out_shape)


def scaled_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike | PreparedArray,
    lhs_scale: ArrayLike,
    rhs_scale: ArrayLike | None = None,
    *,
    lhs_tile: tuple[int, int] | None = None,
    rhs_tile: tuple[int, int] | None = None,
    preferred_element_type: npt.DTypeLike = np.float32,
    accumulation: str | Unset = UNSET,
    promotion_interval: int | Unset | None = UNSET,
    split_k: int | Unset = UNSET,
) -> Array:
    """Multiplies raw FP8 matrices with scales that you computed yourself.

    Args:
      lhs: (m, k) or (*batch, m, k) FP8 values.
      rhs: (k, n) or (*batch, k, n) FP8 values, or prepared weights, which bring their scale.
      lhs_scale: dequantizing float32 scale (any value; IEEE arithmetic decides): a scalar or (1,)
        for the whole operand, (m, 1) per row, or a grid (ceil(m / tile), ceil(k / tile)). With
        batch dims: (*batch or 1s, …) before those.
      rhs_scale: the same on (k, n): a scalar, (1, n) per column, or a grid. None only for prepared
        weights.
      lhs_tile: (m, k) sizes that one scale covers, -1 for a whole dim. Needed where the grid does
        not divide the dim, or where more than one usual tile explains it.
      rhs_tile: (k, n) sizes that one scale covers.
      preferred_element_type: float32, bfloat16 or float16.
      accumulation: see `scaled_dot_general`. "cdna3_mfma" takes FNUZ values too.
      promotion_interval: see `scaled_dot_general`.
      split_k: see `scaled_dot_general`.

    Returns:
      (*batch, m, n) array.

    Raises:
      TypeError: operands that are not FP8, scales that are not float32.
      ValueError: shapes that do not fit, or a scale whose tile is ambiguous.

    >>> lhs, rhs = jnp.ones((2, 8), jnp.float8_e4m3fn), jnp.ones((8, 3), jnp.float8_e5m2)
    >>> scaled_matmul(lhs, rhs, 0.5, 2.0)[0].tolist()
    [8.0, 8.0, 8.0]
    """
    call = "scaled_matmul"
    execution = _execution(Sums(accumulation, promotion_interval, split_k), call)
    if isinstance(lhs, PreparedArray):
        raise TypeError(f"{call}: lhs is {NOT_LHS}")
    if isinstance(rhs, PreparedArray):
        check_prepared(rhs, call)
    lhs, rhs = jnp.asarray(lhs), rhs if isinstance(rhs, PreparedArray) else jnp.asarray(rhs)
    for side, array in (("lhs", lhs), ("rhs", rhs)):
        gemm.check_codes(array.dtype, MACHINES.get(execution.accumulation), f"{call}: {side}")
        if array.ndim < 2:
            raise ValueError(f"{call}: {side} has shape {array.shape}; it must be a matrix")
    check_k(lhs, lhs.ndim - 1, rhs, rhs.ndim - 2, call)
    rank, rhs_n = max(lhs.ndim, rhs.ndim), None
    x = _raw_matrix(lhs, lhs_scale, lhs_tile, rank, call, "lhs")
    if isinstance(rhs, PreparedArray):
        if rhs_scale is not None or rhs_tile is not None:
            raise ValueError(
                f"{call}: rhs is a PreparedArray, which has its scale and tile within; leave "
                "rhs_scale and rhs_tile None"
            )
        rhs, rhs_n = rhs.with_ndim(rank), rhs.n
        w = gemm.Matrix(rhs.values, rhs.scale, rhs.tile)
    elif rhs_scale is None:
        raise ValueError(
            f"{call}: rhs_scale is None; only prepared weights bring a scale of theirs"
        )
    else:
        w = _raw_matrix(rhs, rhs_scale, rhs_tile, rank, call, "rhs")
    lhs_kind = gemm.scale_kind(x.scale.dtype, x.scale.shape[-1], x.scale.shape[-2])
    rhs_kind = gemm.scale_kind(w.scale.dtype, w.scale.shape[-2], w.scale.shape[-1])
    gemm.check_scale_pair(call, lhs_kind, rhs_kind)
    gemm.check_mx_scales(execution, lhs_kind, f"{call}: lhs")
    x, w = (dataclasses.replace(q, scale=scale_to_float32(q.scale)) for q in (x, w))
    out_dtype = gemm.check_out_dtype(preferred_element_type, call)
    gemm.validate(
        x.values,
        w.values,
        x.scale,
        w.scale,
        lhs_axis=-1,
        rhs_axis=-2,
        lhs_tile=x.tile,
        rhs_tile=w.tile[::-1],
        out_dtype=out_dtype,
        execution=execution,
        rhs_n=rhs_n,
        call=call,
    )
    return gemm.gemm(x, -1, w, -2, out_dtype=out_dtype, execution=execution, rhs_n=rhs_n)


def _raw_matrix(
    x: Array,
    scale: ArrayLike,
    tile: tuple[int, int] | None,
    rank: int,
    call: str,
    side: str,
) -> gemm.Matrix:
    """Raw values and their scale, in `rank` dims."""
    refuse_explicit(x, call, side)
    scale, tile = _scale_and_tile(scale, tile, x.shape, call, side)
    refuse_explicit(scale, call, f"{side}_scale")
    x, scale = (y.reshape((1,) * (rank - y.ndim) + y.shape) for y in (x, scale))
    return gemm.Matrix(x, scale, tile)


def _with_float32(q: ScaledArray) -> ScaledArray:
    return ScaledArray(q.values, scale_to_float32(q.scale), q.tile)


def _execution(sums: Sums, call: str) -> config.Execution:
    execution = config.executions(sums, call=call).forward
    warn_of_overflow([execution], call)
    return execution


def _check_scale_kinds(
    plan: dimension_numbers.Plan,
    lhs: ScaledArray,
    rhs: ScaledArray | PreparedArray,
    execution: config.Execution,
    call: str,
) -> None:
    kinds = []
    for side, q in ((plan.lhs, lhs), (plan.rhs, rhs)):
        k, rows = (
            any(q.scale.shape[d] > 1 for d in dims) for dims in (side.contracting, side.free)
        )
        kinds.append(gemm.scale_kind(q.scale.dtype, 1 + k, 1 + rows))
    gemm.check_scale_pair(call, kinds[0], kinds[1])
    gemm.check_mx_scales(execution, kinds[0], f"{call}: lhs")


#: Tile sizes in common use; a scale that two of them explain is ambiguous without an explicit tile.
_USUAL_TILES = (32, 64, 128)


def _scale_and_tile(
    scale: ArrayLike, tile: tuple[int, int] | None, shape: tuple[int, ...], call: str, side: str
) -> tuple[Array, tuple[int, int]]:
    """Checks a raw scale and finds what one of its entries covers on the last two dims."""
    if isinstance(scale, float | int):  # under x64 a Python float would become float64
        scale = np.float32(scale)
    scale = jnp.asarray(scale)
    if scale.dtype not in (np.dtype(np.float32), formats.E8M0):
        raise TypeError(
            f"{call}: {side}_scale has dtype {scale.dtype}; scales are float32 (or "
            "float8_e8m0fnu): convert with scale.astype(jnp.float32)"
        )
    if scale.shape in ((), (1,)):
        scale = scale.reshape(1, 1)
    if not 2 <= scale.ndim <= len(shape):
        raise ValueError(
            f"{call}: {side}_scale has shape {scale.shape}; for {side} of shape {shape} give a "
            f"scalar, or dims for batch, rows, columns such as {_row_scale_example(side, shape)} "
            f"for one scale per {'row' if side == 'lhs' else 'column'}"
        )
    for axis in (-2, -1):  # one scale for all of nothing is no scale
        if shape[axis] == 0 and scale.shape[axis] == 1:
            scale = jax.lax.slice_in_dim(scale, 0, 0, axis=axis)
    if tile is None:
        sizes = [
            _guess_tile(dim, count, i, scale, shape, call, side)
            for i, (dim, count) in enumerate(zip(shape[-2:], scale.shape[-2:], strict=True))
        ]
        return scale, (sizes[0], sizes[1])
    if not isinstance(tile, tuple | list) or len(tile) != 2:
        raise ValueError(
            f"{call}: {side}_tile is {tile!r}; give two sizes, one for each of the last two dims"
        )
    pair = resolve_tile(tuple(tile), shape[-2:], f"{call}: {side}_tile")
    expected = scale_shape(shape[-2:], pair)
    if scale.shape[-2:] != expected:
        raise ValueError(
            f"{call}: {side}_scale has shape {scale.shape}; {side} of shape {shape} with "
            f"{side}_tile {tuple(tile)} needs {expected} in its last two dims"
        )
    return scale, (pair[0], pair[1])


def _row_scale_example(side: str, shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[-2], 1) if side == "lhs" else (1, shape[-1])


def _guess_tile(
    dim: int, count: int, axis: int, scale: Array, shape: tuple[int, ...], call: str, side: str
) -> int:
    """Tile size where `count` scales lie along a dim of size `dim`, if there is only one answer."""
    if count == 1 or count == dim:
        return max(dim, 1) if count == 1 else 1
    where = (
        f"{call}: {side}_scale has shape {scale.shape}; its {count} entries along dim "
        f"{len(shape) - 2 + axis} (size {dim}) of {side}"
    )
    remedy = f"say what one covers with {side}_tile=(rows, columns)"
    if count == 0 or count > dim or dim % count:
        raise ValueError(f"{where} do not divide it evenly; {remedy}")
    even = dim // count
    others = [t for t in _USUAL_TILES if t != even and -(-dim // t) == count]
    if others:
        raise ValueError(f"{where} may mean tiles of {even} or of {others[0]}; {remedy}")
    return even
