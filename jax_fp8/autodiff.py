"""The differentiable FP8 GEMM: E4M3 forward, E5M2 gradients, one rule for forward and reverse mode.

With x^ and w^ the quantised operands and g^ the quantised cotangent, each quantised along the axis
that its GEMM contracts:

    y  = x^ · w^          contracts k
    dx = g^ · w^          contracts n
    dw = g^ · x^          contracts m

The rule is a custom_jvp whose tangent y' = x' · w^ + x^ · w' goes through the linear primitive
`tangent_p`; its transpose `gradient_p` holds the two E5M2 GEMMs. Both quantise nothing twice: the
backward-axis copies of x and w are made in the same pass as the forward copies, and are all that is
kept of x and w. Both also take the high-precision operands, which only *their* derivatives use (a
second-order term loses half of its cross terms without them); XLA drops them elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from jax_fp8 import primitive
from jax_fp8._compat import zero_tangent
from jax_fp8.config import Execution
from jax_fp8.gemm import Matrix, fold_batch_into_axis, gemm
from jax_fp8.quantize import quantize_matrix, quantize_two_axes
from jax_fp8.recipes import Recipe, Role, resolve_tile
from jax_fp8.reference import expand_scale

__all__ = ["Contraction", "contract"]

Array = jax.Array
Axes = tuple[int, ...]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Contraction:
    """Static facts of one differentiable GEMM.

    Attributes:
      axes: contracting axis of lhs and of rhs in memory, -1 or -2.
      roles: role of lhs and of rhs.
      recipe: formats and tiles.
      out_dtype: name of the result's dtype.
      execution: kernel and accumulation.
    """

    axes: tuple[int, int]
    roles: tuple[Role, Role]
    recipe: Recipe
    out_dtype: str
    execution: Execution


def contract(lhs: Array, rhs: Array, contraction: Contraction) -> Array:
    """(*b, m, n) product of two high-precision matrices, whose batch dims are equal or 1."""
    out: Array = _product(contraction, lhs, rhs)
    return out


def other_axis(axis: int) -> int:
    """The other one of the matrix axes -1 and -2."""
    return -3 - axis


def cotangent_axis(side: int) -> int:
    """Axis of the cotangent (*b, m, n) that the gradient of lhs (0) or rhs (1) contracts."""
    return -1 if side == 0 else -2


def in_memory_order(g: _T, fixed: _T, axis: int) -> tuple[_T, _T]:
    """Order of the operands of a gradient's GEMM, so that its result lies as the operand does.

    Args:
      g: the cotangent, whose uncontracted axis becomes the operand's rows.
      fixed: the other operand, whose uncontracted axis becomes the operand's k.
      axis: contracting axis of the operand in memory: k last (-1) or first (-2).
    """
    return (g, fixed) if axis == -1 else (fixed, g)


# --- Quantisation along one or both axes ----------------------------------------------------------


def _tile(c: Contraction, role: Role, shape: Axes, contracted: int) -> tuple[int, int]:
    """Tile in memory order of an operand whose axis `contracted` a GEMM sums over."""
    rows, k = c.recipe.tile(role)
    return resolve_tile((rows, k) if contracted == -1 else (k, rows), shape)


def _quantize(
    c: Contraction, x: Array, role: Role, contracted: Sequence[int]
) -> tuple[Matrix, ...]:
    """Copies of x, one per contracted axis, in one pass over x (one copy where the tiles agree)."""
    fmt, power_of_two = c.recipe.format(role), c.recipe.power_of_two
    tiles = [_tile(c, role, x.shape, axis) for axis in contracted]
    if len(set(tiles)) == 1:
        static = c.recipe.static_scale(role)
        scale = None if static is None else jnp.float32(static)
        values, scales = quantize_matrix(
            x, fmt, tiles[0], c.execution, scale=scale, power_of_two=power_of_two and scale is None
        )
        return (Matrix(values, scales, tiles[0]),) * len(tiles)
    pair = (tiles[0], tiles[1])
    out = quantize_two_axes(x, fmt, pair, c.execution, power_of_two=power_of_two)
    return Matrix(out[0], out[1], pair[0]), Matrix(out[2], out[3], pair[1])


# --- Forward ------------------------------------------------------------------------------------


def _forward(c: Contraction, keep: tuple[bool, bool], lhs: Array, rhs: Array) -> Any:
    """The product, and per side to be kept the (values, scale) of its backward-axis copy."""
    copies = []
    for x, role, axis, kept in zip((lhs, rhs), c.roles, c.axes, keep, strict=True):
        copies.append(_quantize(c, x, role, (axis, other_axis(axis)) if kept else (axis,)))
    out = gemm(
        copies[0][0],
        c.axes[0],
        copies[1][0],
        c.axes[1],
        out_dtype=c.out_dtype,
        execution=c.execution,
    )
    kept_arrays = [(q[1].values, q[1].scale) for q, kept in zip(copies, keep, strict=True) if kept]
    return out, kept_arrays


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(c: Contraction, lhs: Array, rhs: Array) -> Any:
    return _forward(c, (False, False), lhs, rhs)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product_and_copies(c: Contraction, keep: tuple[bool, bool], lhs: Array, rhs: Array) -> Any:
    return _forward(c, keep, lhs, rhs)


def _rule(c: Contraction, primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
    out, _, tangent = _evaluate(c, (False, False), primals, tangents)
    return out, tangent


def _rule_and_copies(
    c: Contraction, keep: tuple[bool, bool], primals: Sequence[Array], tangents: Sequence[Any]
) -> Any:
    out, copies, tangent = _evaluate(c, keep, primals, tangents)
    return (out, copies), (tangent, jax.tree.map(jnp.zeros_like, copies))


def _evaluate(
    c: Contraction, keep: tuple[bool, bool], primals: Sequence[Array], tangents: Sequence[Any]
) -> Any:
    """The product, the copies that the caller wants, and the tangent of the product."""
    wrt = tuple(not isinstance(t, SymbolicZero) for t in tangents)
    needed = (keep[0] or wrt[1], keep[1] or wrt[0])
    out, arrays = _product_and_copies(c, needed, *primals)
    copies = dict(zip((side for side in (0, 1) if needed[side]), arrays, strict=True))
    if any(wrt):
        residuals = [
            (*map(jax.lax.stop_gradient, copies[1 - s]), primals[1 - s]) for s in _sides(wrt)
        ]
        moving = [_straight_through(c, s, primals[s], tangents[s]) for s in _sides(wrt)]
        tangent = tangent_p.bind(*moving, *sum(residuals, ()), wrt=wrt, contraction=c)
    else:
        tangent = jnp.zeros_like(out)
    return out, [copies[side] for side in (0, 1) if keep[side]], tangent


def _straight_through(c: Contraction, side: int, x: Array, tangent: Array) -> Array:
    """Tangent of x behind the quantiser, by the recipe's `ste`."""
    scale = c.recipe.static_scale(c.roles[side])
    if c.recipe.ste == "pass" or scale is None:  # a computed scale never saturates
        return tangent
    threshold = c.recipe.format(c.roles[side]).saturation_threshold
    magnitude = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32) / np.float32(scale))
    return jnp.where(magnitude >= threshold, jnp.zeros_like(tangent), tangent)


_product.defjvp(_rule, symbolic_zeros=True)
_product_and_copies.defjvp(_rule_and_copies, symbolic_zeros=True)


# --- The linear primitives ----------------------------------------------------------------------
# Operands of both, with s running over the sides in `wrt`: the moving ones, then for each s the
# residual of the *other* side: values and scale of its backward-axis copy, and its high-precision
# array, which only the JVP rules read.
#   tangent_p: moving = the tangent of each s;  result y' (*b, m, n)
#   gradient_p: moving = the cotangent of y;    results: the gradient of each s


def _sides(wrt: Sequence[bool]) -> list[int]:
    return [side for side in (0, 1) if wrt[side]]


def _residuals(operands: Sequence[Any], wrt: Sequence[bool]) -> list[tuple[Any, Any, Any]]:
    """The (values, scale, high-precision) triples at the end of `operands`."""
    flat = operands[-3 * len(_sides(wrt)) :]
    return [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]


def _copy_tile(c: Contraction, side: int, shape: Axes) -> tuple[int, int]:
    return _tile(c, c.roles[side], shape, other_axis(c.axes[side]))


def _plain(c: Contraction, side: int, moving: Array, fixed: Array) -> Array:
    """High-precision product in which the operand of `side` moves: y' (*b, m, n) in out_dtype."""
    pair = (moving, fixed) if side == 0 else (fixed, moving)
    lhs, rhs = (
        jnp.swapaxes(x, -1, -2) if turn else x
        for x, turn in zip(pair, (c.axes[0] == -2, c.axes[1] == -1), strict=True)
    )
    out = jnp.matmul(
        lhs.astype(jnp.float32), rhs.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return out.astype(c.out_dtype)


def _tangent_impl(*operands: Array, wrt: tuple[bool, bool], contraction: Contraction) -> Array:
    # Forward tangents use the stored copies, dequantised, so that jvp and vjp are adjoint.
    terms = []
    for s, moving, (values, scale, _) in zip(
        _sides(wrt), operands, _residuals(operands, wrt), strict=False
    ):
        tile = _copy_tile(contraction, 1 - s, values.shape)
        fixed = values.astype(jnp.float32) * expand_scale(scale, values.shape, tile)
        terms.append(_plain(contraction, s, moving, fixed))
    out = functools.reduce(operator.add, terms)
    return jnp.broadcast_to(out, (*_common_batch(operands), *out.shape[-2:]))


def _common_batch(operands: Sequence[Any]) -> Axes:
    return np.broadcast_shapes(*(x.shape[:-2] for x in operands))


def _tangent_abstract(*operands: Any, wrt: tuple[bool, bool], contraction: Contraction) -> Any:
    c, side = contraction, _sides(wrt)[0]
    moving, (values, _, _) = operands[0], _residuals(operands, wrt)[0]
    pair = (moving.shape, values.shape) if side == 0 else (values.shape, moving.shape)
    shape = (
        *_common_batch(operands),
        pair[0][other_axis(c.axes[0])],
        pair[1][other_axis(c.axes[1])],
    )
    return moving.update(shape=shape, dtype=np.dtype(c.out_dtype), weak_type=False)


def _gradient_impl(
    *operands: Array,
    wrt: tuple[bool, bool],
    contraction: Contraction,
    reduce: tuple[Axes, Axes],
    dtypes: tuple[str, str],
) -> list[Array]:
    c, ct = contraction, operands[0]
    sides = _sides(wrt)
    copies = _quantize(c, ct, "gradient", [cotangent_axis(s) for s in sides])
    gradients = []
    for s, g, (values, scale, _) in zip(sides, copies, _residuals(operands, wrt), strict=True):
        fixed = Matrix(values, scale, _copy_tile(c, 1 - s, values.shape))
        if reduce[s]:
            fixed = _broadcast_batch(fixed, ct.shape, reduce[s])
        g_axis, fixed_axis = cotangent_axis(s), other_axis(c.axes[1 - s])
        (lhs, lhs_axis), (rhs, rhs_axis) = in_memory_order(
            (fold_batch_into_axis(g, g_axis, reduce[s]), g_axis),
            (fold_batch_into_axis(fixed, fixed_axis, reduce[s]), fixed_axis),
            c.axes[s],
        )
        out = gemm(lhs, lhs_axis, rhs, rhs_axis, out_dtype=dtypes[s], execution=c.execution)
        gradients.append(
            jnp.broadcast_to(out, (*_gradient_batch(operands, reduce[s]), *out.shape[-2:]))
        )
    return gradients


def _broadcast_batch(x: Matrix, shape: Axes, dims: Axes) -> Matrix:
    """Repeats x along batch dims that are about to be summed over."""

    def repeat(y: Array) -> Array:
        return jnp.broadcast_to(
            y, [shape[i] if i - y.ndim in dims else size for i, size in enumerate(y.shape)]
        )

    return Matrix(repeat(x.values), repeat(x.scale), x.tile)


def _gradient_abstract(
    *operands: Any,
    wrt: tuple[bool, bool],
    contraction: Contraction,
    reduce: tuple[Axes, Axes],
    dtypes: tuple[str, str],
) -> list[Any]:
    c, ct = contraction, operands[0]
    out = []
    for s, (values, _, _) in zip(_sides(wrt), _residuals(operands, wrt), strict=True):
        rows, k = ct.shape[-2 + s], values.shape[c.axes[1 - s]]
        matrix = (rows, k) if c.axes[s] == -1 else (k, rows)
        shape = (*_gradient_batch(operands, reduce[s]), *matrix)
        out.append(ct.update(shape=shape, dtype=np.dtype(dtypes[s]), weak_type=False))
    return out


def _gradient_batch(operands: Sequence[Any], reduced: Axes) -> Axes:
    """Batch dims of a gradient: those of all operands together, without the ones summed over.

    Under vmap a gradient may need only operands that are not mapped; it is the same for each
    example."""
    batch = _common_batch(operands)
    return tuple(1 if i - len(batch) - 2 in reduced else size for i, size in enumerate(batch))


tangent_p = primitive.make("jax_fp8.tangent", _tangent_abstract, multiple_results=False)
gradient_p = primitive.make("jax_fp8.gradient", _gradient_abstract, multiple_results=True)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent_impl, multiple_results=False))
mlir.register_lowering(gradient_p, mlir.lower_fun(_gradient_impl, multiple_results=True))


def _batch_tangent(operands: Sequence[Array], dims: Sequence[int | None], **params: Any) -> Any:
    return tangent_p.bind(*primitive.to_front(operands, dims), **params), 0


def _batch_gradient(operands: Sequence[Array], dims: Sequence[int | None], **params: Any) -> Any:
    # `reduce` counts batch dims from the last, so a new leading dim leaves it as it is.
    out = gradient_p.bind(*primitive.to_front(operands, dims), **params)
    return out, [0] * len(out)


batching.primitive_batchers[tangent_p] = _batch_tangent
batching.primitive_batchers[gradient_p] = _batch_gradient


def _match_batch(x: Array, shape: Axes) -> Array:
    """Sums or repeats x (*b, m, n) over batch dims so that it gets `shape`."""
    summed = [i for i in range(x.ndim - 2) if shape[i] == 1 < x.shape[i]]
    return jnp.broadcast_to(jnp.sum(x, axis=summed, keepdims=True) if summed else x, shape)


def _nonzero(tangent: Any) -> bool:
    return not isinstance(tangent, ad.Zero)


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    wrt, c = params["wrt"], params["contraction"]
    sides = _sides(wrt)
    out = tangent_p.bind(*primals, **params)
    terms = []
    if any(map(_nonzero, tangents[: len(sides)])):
        moving = [ad.instantiate_zeros(t) for t in tangents[: len(sides)]]
        terms.append(tangent_p.bind(*moving, *primals[len(sides) :], **params))
    for s, moving, (_, _, fixed) in zip(sides, primals, _residuals(tangents, wrt), strict=False):
        if _nonzero(fixed):
            terms.append(_match_batch(_plain(c, s, moving, fixed), out.shape))
    return out, functools.reduce(operator.add, terms) if terms else zero_tangent(out)


def _gradient_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    wrt, c = params["wrt"], params["contraction"]
    out = gradient_p.bind(*primals, **params)
    terms: list[list[Any]] = [[] for _ in out]
    if _nonzero(tangents[0]):
        for term, t in zip(
            terms, gradient_p.bind(tangents[0], *primals[1:], **params), strict=True
        ):
            term.append(t)
    for i, (s, (_, _, fixed)) in enumerate(
        zip(_sides(wrt), _residuals(tangents, wrt), strict=True)
    ):
        if _nonzero(fixed):
            product = functools.partial(_plain, c, s, fixed=fixed)
            shape = jax.eval_shape(product, out[i]).shape
            ct = _match_batch(primals[0], shape)
            (term,) = jax.linear_transpose(product, out[i])(ct)
            terms[i].append(term)
    sums = [
        functools.reduce(operator.add, t) if t else zero_tangent(y)
        for t, y in zip(terms, out, strict=True)
    ]
    return out, sums


def _tangent_transpose(
    ct: Any, *operands: Any, wrt: tuple[bool, bool], contraction: Contraction
) -> list[Any]:
    sides, residuals = _sides(wrt), _residuals(operands, wrt)
    linear = [ad.is_undefined_primal(x) for x in operands[: len(sides)]]
    asked = (linear[0] if wrt[0] else False, linear[-1] if wrt[1] else False)
    kept = [r for r, asks in zip(residuals, linear, strict=True) if asks]
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    reduce: list[Axes] = [(), ()]
    dtypes = ["float32", "float32"]
    for s, x in zip(sides, operands, strict=False):
        if asked[s]:
            n = len(x.aval.shape)
            reduce[s] = tuple(i - n for i in range(n - 2) if x.aval.shape[i] == 1 < ct.shape[i])
            dtypes[s] = np.dtype(x.aval.dtype).name
    gradients = iter(
        gradient_p.bind(
            ct,
            *sum(kept, ()),
            wrt=asked,
            contraction=contraction,
            reduce=tuple(reduce),
            dtypes=tuple(dtypes),
        )
    )
    return [next(gradients) if asks else None for asks in linear] + [None] * (3 * len(sides))


def _gradient_transpose(
    cts: Sequence[Any],
    ct: Any,
    *operands: Any,
    wrt: tuple[bool, bool],
    contraction: Contraction,
    reduce: tuple[Axes, Axes],
    dtypes: tuple[str, str],
) -> list[Any]:
    sides, residuals = _sides(wrt), _residuals(operands, wrt)
    live = [_nonzero(t) for t in cts]
    moving = [t for t, alive in zip(cts, live, strict=True) if alive]
    kept = [r for r, alive in zip(residuals, live, strict=True) if alive]
    asked = tuple(
        s in {side for side, alive in zip(sides, live, strict=True) if alive} for s in (0, 1)
    )
    if not moving:
        return [ad.Zero(ct.aval)] + [None] * len(operands)
    out = tangent_p.bind(*moving, *sum(kept, ()), wrt=asked, contraction=contraction)
    return [_match_batch(out, ct.aval.shape)] + [None] * len(operands)


ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_jvps[gradient_p] = _gradient_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[gradient_p] = _gradient_transpose
