"""The GEMM primitive: FP8 matrices and their scales in, real numbers out.

    out[*b, m, n] = sum over k of (lhs · lhs_scale)[*b, m, k] · (rhs · rhs_scale)[*b, n, k]

Each operand may lie in memory with k last (-1) or with k before its rows (-2): `lhs_axis` and
`rhs_axis` name its contracting axis, so no layout needs a transposing copy. With `rhs_n` the values
of rhs (not its scale) lie in panels of its n columns instead, see panels.py; its axis is then -2.
Batch dims of every operand, scales included, are 1 (shared) or the output's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.interpreters import batching

from jax_fp8 import _compat, formats, lowering, primitive, reference
from jax_fp8.array import scale_shape
from jax_fp8.config import Execution
from jax_fp8.emulation.machines import MACHINES, Machine
from jax_fp8.panels import PANEL_COLS, from_panels, matrix_shape, num_panels

__all__ = ["Matrix", "gemm", "gemm_p", "scale_kind", "validate"]

Array = jax.Array
Tile = tuple[int, int]

OUT_DTYPES: Final = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))

#: What the scales of one operand look like. "tensor": one. "row": one per row (or group of rows),
#: for all of k. "tile": they vary along k. "mx": E8M0 bytes.
SCALE_KINDS: Final = ("tensor", "row", "tile", "mx")
#: k that one E8M0 scale covers (OCP Microscaling Formats 1.0).
MX_BLOCK: Final = 32
#: Pairs of scale kinds (lhs, rhs) that a GEMM accepts. The table is symmetric.
SCALE_PAIRS: Final = frozenset(
    {
        ("tensor", "tensor"), ("tensor", "row"), ("tensor", "tile"),
        ("row", "tensor"), ("row", "row"), ("row", "tile"),
        ("tile", "tensor"), ("tile", "row"), ("tile", "tile"),
        ("mx", "mx"),
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Matrix:
    """FP8 values (*b, r, c) with the scale (*b, ceil(r/tile[0]), ceil(c/tile[1])).

    The values may also be the panels of such values, which `gemm` has to be told.
    """

    values: Array
    scale: Array
    tile: Tile  # along the last two axes of values, in their order


def scale_kind(scale_dtype: npt.DTypeLike, k_scales: int, row_scales: int) -> str:
    """Kind of the scales of one operand, from their dtype and how many lie along k and the rows."""
    if np.dtype(scale_dtype) == formats.E8M0:
        return "mx"
    if k_scales > 1:
        return "tile"
    return "row" if row_scales > 1 else "tensor"


def check_scale_pair(call: str, lhs_kind: str, rhs_kind: str) -> None:
    """Raises for a pair of scale kinds that is not in `SCALE_PAIRS`."""
    if (lhs_kind, rhs_kind) not in SCALE_PAIRS:
        partners = sorted(b for a, b in SCALE_PAIRS if a == lhs_kind)
        raise ValueError(
            f"{call}: lhs has scales of kind {lhs_kind!r} and rhs of kind {rhs_kind!r}; "
            f"{lhs_kind!r} goes with {', '.join(map(repr, partners))}. An E8M0 scale becomes an "
            "ordinary one with scale.astype(jnp.float32)"
        )


def gemm(
    lhs: Matrix,
    lhs_axis: int,
    rhs: Matrix,
    rhs_axis: int,
    *,
    out_dtype: npt.DTypeLike,
    execution: Execution,
    rhs_n: int | None = None,
) -> Array:
    """Contracts axis `lhs_axis` of `lhs` with `rhs_axis` of `rhs`; both are -1 or -2.

    Args:
      lhs: values, scale and tile.
      lhs_axis: contracting axis of lhs.
      rhs: values, scale and tile.
      rhs_axis: contracting axis of rhs.
      out_dtype: dtype of the result.
      execution: kernel and accumulation.
      rhs_n: columns of an rhs whose values lie in panels, None for one that does not.

    Returns:
      (*b, m, n) array of `out_dtype`.
    """
    operands = _compat.equalize_varying_axes(lhs.values, rhs.values, lhs.scale, rhs.scale)
    out: Array = gemm_p.bind(
        *operands,
        lhs_axis=lhs_axis,
        rhs_axis=rhs_axis,
        lhs_tile=_rows_and_k(lhs.tile, lhs_axis),
        rhs_tile=_rows_and_k(rhs.tile, rhs_axis),
        rhs_n=rhs_n,
        out_dtype=np.dtype(out_dtype).name,
        execution=execution,
    )
    return out


def _rows_and_k(pair: Sequence[Any], axis: int) -> tuple[Any, Any]:
    """(rows, k) of a pair that lies in the memory order of an operand."""
    return (pair[-2], pair[-1]) if axis == -1 else (pair[-1], pair[-2])


def validate(
    lhs: Any,
    rhs: Any,
    lhs_scale: Any,
    rhs_scale: Any,
    *,
    lhs_axis: int,
    rhs_axis: int,
    lhs_tile: Tile,
    rhs_tile: Tile,
    out_dtype: npt.DTypeLike,
    execution: Execution | None = None,
    rhs_n: int | None = None,
    call: str = "jax_fp8.gemm",
) -> tuple[int, ...]:
    """Checks everything that a GEMM needs; every caller and every platform relies on this alone.

    Args:
      lhs: array or abstract value, (*b, m, k) or (*b, k, m) by `lhs_axis`.
      rhs: array or abstract value, (*b, n, k) or (*b, k, n) by `rhs_axis`, or panels of the latter.
      lhs_scale: float32, dims in the order of lhs.
      rhs_scale: float32, dims in the order of rhs.
      lhs_axis: contracting axis of lhs, -1 or -2.
      rhs_axis: contracting axis of rhs.
      lhs_tile: (rows, k) that one scale of lhs covers.
      rhs_tile: (rows, k) that one scale of rhs covers.
      out_dtype: dtype of the result.
      execution: how the GEMM adds up, which decides about FNUZ codes and the tiles of MX machines.
      rhs_n: n, if rhs lies in panels.
      call: name of the public function, for messages.

    Returns:
      Shape of the result.

    Raises:
      TypeError: a dtype that does not fit.
      ValueError: a shape that does not fit.
    """
    check_out_dtype(out_dtype, call)
    machine = None if execution is None else MACHINES.get(execution.accumulation)
    lhs_shape, rhs_shape = tuple(lhs.shape), tuple(rhs.shape)
    if rhs_n is not None:
        check_panels(rhs_shape, rhs_n, f"{call}: rhs")
        rhs_shape = matrix_shape(rhs_shape, rhs_n)
    batches = []
    for side, x, shape, scale, axis, tile in (
        ("lhs", lhs, lhs_shape, lhs_scale, lhs_axis, lhs_tile),
        ("rhs", rhs, rhs_shape, rhs_scale, rhs_axis, rhs_tile),
    ):
        check_codes(x.dtype, machine, f"{call}: {side}")
        if axis not in (-1, -2):
            raise ValueError(f"{call}: {side} contracting axis is {axis}; it must be -1 or -2")
        if len(shape) < 2:
            raise ValueError(f"{call}: {side} has shape {shape}; it needs at least 2 dims")
        if np.dtype(scale.dtype) != np.dtype(np.float32):
            raise TypeError(
                f"{call}: {side} scale has dtype {scale.dtype}; scales are float32: convert with "
                "scale.astype(jnp.float32)"
            )
        if any(size < 1 for size in tile):
            raise ValueError(f"{call}: {side} tile {tile} has a size below 1")
        expected = scale_shape(shape[-2:], _rows_and_k(tile, axis))
        if len(scale.shape) != len(shape) or tuple(scale.shape[-2:]) != expected:
            raise ValueError(
                f"{call}: {side} scale has shape {tuple(scale.shape)}; values of shape "
                f"{shape} with tiles of {tile[0]} rows and {tile[1]} k need "
                f"(*batch, {expected[0]}, {expected[1]})"
            )
        if machine is not None and machine.scales_inside:
            _check_mx_tile(machine.name, tile[1], shape[axis], f"{call}: {side}")
        batches += [shape[:-2], tuple(scale.shape[:-2])]
    if len(lhs_shape) != len(rhs_shape):
        raise ValueError(
            f"{call}: lhs has {len(lhs_shape)} dims and rhs has {len(rhs_shape)}; give both the "
            "same number of batch dims (size 1 where shared)"
        )
    if lhs_shape[lhs_axis] != rhs_shape[rhs_axis]:
        raise ValueError(
            f"{call}: the contracting dim of lhs has size {lhs_shape[lhs_axis]}, that of rhs has "
            f"size {rhs_shape[rhs_axis]}; they must be equal"
        )
    batch = []
    for dim, sizes in enumerate(zip(*batches, strict=True)):
        distinct = {size for size in sizes if size != 1}
        if len(distinct) > 1:
            raise ValueError(
                f"{call}: batch dim {dim} has sizes {sizes[0]} (lhs), {sizes[2]} (rhs), {sizes[1]} "
                f"(lhs scale), {sizes[3]} (rhs scale); they must be equal or 1"
            )
        batch.append(distinct.pop() if distinct else 1)
    return (*batch, lhs_shape[-3 - lhs_axis], rhs_shape[-3 - rhs_axis])


def check_panels(shape: tuple[int, ...], n: int, what: str) -> None:
    """Raises unless `shape` is that of panels which hold n columns."""
    if len(shape) < 3 or shape[-3] != num_panels(n) or shape[-1] != PANEL_COLS:
        raise ValueError(
            f"{what} has values of shape {shape}; the panels of n={n} columns have the shape "
            f"(*batch, {num_panels(n)}, k, {PANEL_COLS}): only dims before those can be sliced or "
            "mapped away. To cut k or n, cut the weights and prepare them again"
        )


def check_codes(dtype: npt.DTypeLike, machine: Machine | None, what: str) -> None:
    """Raises unless a GEMM takes codes of `dtype`: OCP formats, FNUZ only if the machine does."""
    if machine is None or not machine.fnuz_operands or np.dtype(dtype) not in formats.FNUZ_DTYPES:
        formats.lookup(dtype, call=what)


def _check_mx_tile(machine: str, tile_k: int, k: int, what: str) -> None:
    if min(tile_k, k) != min(MX_BLOCK, k):
        raise ValueError(
            f"{what} has a scale for every {min(tile_k, k)} k, but {machine} takes one for every "
            f"{MX_BLOCK}: use MXScaling, or tiles of 1 × {MX_BLOCK} with E8M0 scales"
        )


def check_mx_scales(execution: Execution, kind: str, what: str) -> None:
    """Raises if a machine that multiplies by E8M0 scales itself would get others.

    Args:
      execution: how the GEMM adds up.
      kind: "mx" for E8M0 scales and for a recipe whose scales are powers of two.
      what: call and operand, for the message.
    """
    machine = MACHINES.get(execution.accumulation)
    if machine is not None and machine.scales_inside and kind != "mx":
        raise ValueError(
            f"{what} has scales that are not E8M0, but {machine.name} multiplies by powers of two: "
            "use MXScaling, or scales of dtype float8_e8m0fnu"
        )


def check_out_dtype(dtype: npt.DTypeLike, call: str) -> np.dtype[Any]:
    """Returns the dtype if a GEMM can write it, else raises."""
    dtype = np.dtype(dtype)
    if dtype not in OUT_DTYPES:
        raise TypeError(
            f"{call}: preferred_element_type {dtype.name} is not offered; use float32, bfloat16 or "
            "float16"
        )
    return dtype


def promote(*dtypes: npt.DTypeLike) -> np.dtype[Any]:
    """dtype of a product of these operands: theirs if they agree, else float32.

    What jnp.result_type gives, in every mode of jax_numpy_dtype_promotion.
    """
    distinct = {np.dtype(dtype) for dtype in dtypes}
    return distinct.pop() if len(distinct) == 1 else np.dtype(np.float32)


def _abstract(
    lhs: Any,
    rhs: Any,
    lhs_scale: Any,
    rhs_scale: Any,
    *,
    lhs_axis: int,
    rhs_axis: int,
    lhs_tile: Tile,
    rhs_tile: Tile,
    rhs_n: int | None,
    out_dtype: str,
    execution: Execution,
) -> Any:
    shape = validate(
        lhs,
        rhs,
        lhs_scale,
        rhs_scale,
        lhs_axis=lhs_axis,
        rhs_axis=rhs_axis,
        lhs_tile=lhs_tile,
        rhs_tile=rhs_tile,
        out_dtype=out_dtype,
        execution=execution,
        rhs_n=rhs_n,
    )
    # `update` keeps the mesh and the varying axes of lhs, which `gemm` has made those of all four.
    return lhs.update(shape=shape, dtype=np.dtype(out_dtype), weak_type=False)


gemm_p = primitive.make("jax_fp8.gemm", _abstract, multiple_results=False)

primitive.refuse_tangents(
    gemm_p,
    ("lhs", "rhs", "lhs_scale", "rhs_scale"),
    "raw FP8 operands and their scales are constants to jax_fp8: differentiate matmul, dot_general "
    "or einsum on the high-precision arrays, or stop the gradient with jax.lax.stop_gradient",
)


def _batch(operands: Sequence[Array], dims: Sequence[int | None], **params: Any) -> Any:
    return gemm_p.bind(*primitive.to_front(operands, dims), **params), 0


batching.primitive_batchers[gemm_p] = _batch


def _target(
    *,
    lhs_axis: int,
    rhs_axis: int,
    lhs_tile: Tile,
    rhs_tile: Tile,
    rhs_n: int | None,
    out_dtype: str,
    execution: Execution,
    num_operands: int,
) -> tuple[str, dict[str, Any]]:
    return "jax_fp8.gemm.v1", {
        "lhs_layout": lhs_layout(lhs_axis),
        "rhs_layout": rhs_layout(rhs_axis, in_panels=rhs_n is not None),
        "lhs_tile": np.array(lhs_tile, np.int64),
        "rhs_tile": np.array(rhs_tile, np.int64),
        "any_order": not execution.deterministic,
        "accumulation": execution.accumulation,
        "promotion_interval": np.int64(execution.promotion_interval),
        "split_k": np.int64(execution.split_k),
    }


def lhs_layout(axis: int) -> str:
    """The kernels' word for the memory order of lhs."""
    return "mk" if axis == -1 else "km"


def rhs_layout(axis: int, *, in_panels: bool = False) -> str:
    """The kernels' word for the memory order of rhs."""
    if in_panels:
        return "panels"
    return "nk" if axis == -1 else "kn"


def _reference(
    lhs: Array,
    rhs: Array,
    lhs_scale: Array,
    rhs_scale: Array,
    *,
    lhs_axis: int,
    rhs_axis: int,
    lhs_tile: Tile,
    rhs_tile: Tile,
    rhs_n: int | None,
    out_dtype: str,
    execution: Execution,
) -> Array:
    if rhs_n is not None:
        rhs = from_panels(rhs, rhs_n)

    def k_last(x: Array, axis: int) -> Array:
        return x if axis == -1 else jnp.swapaxes(x, -1, -2)

    return reference.gemm(
        k_last(lhs, lhs_axis),
        k_last(rhs, rhs_axis),
        k_last(lhs_scale, lhs_axis),
        k_last(rhs_scale, rhs_axis),
        lhs_tile=lhs_tile,
        rhs_tile=rhs_tile,
        out_dtype=np.dtype(out_dtype),
    )


lowering.register_lowerings(gemm_p, "gemm", _target, _reference)
