"""The linear half of the derivative rule: the tangent of a product, and its transpose.

Operands of both primitives, with s running over the sides in `wrt`:

    moving      tangent_p: the tangent of each s;   gradient_p: the cotangent of y
    key         only for stochastic rounding: data of a random key
    residuals   for each s what is kept of the *other* side: values and scale of its backward-axis
                copy, if `Contraction.uses_copy(s)`, then its high-precision array

The result of tangent_p is y' (*b, m, n), those of gradient_p are the gradient of each s. The
derivatives of these primitives themselves use the high-precision arrays: without them second-order
terms would lose half of their cross terms. Where nobody differentiates twice and a copy is kept,
XLA drops them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from jax_fp8 import primitive
from jax_fp8._compat import zero_tangent
from jax_fp8.contraction import Contraction, cotangent_axis, dense, in_memory_order, other_axis
from jax_fp8.fold import fold_batch_into_axis, folded_length
from jax_fp8.gemm import Matrix, gemm
from jax_fp8.reference import expand_scale

__all__ = ["fp8_gradient", "gradient_p", "sides_of", "tangent_p"]

Array = jax.Array
Axes = tuple[int, ...]


def sides_of(wrt: Sequence[bool]) -> list[int]:
    """The sides with respect to which something is differentiated."""
    return [side for side in (0, 1) if wrt[side]]


class _Residual(NamedTuple):
    copy: tuple[Any, ...]  # (values, scale), or nothing
    exact: Any

    @property
    def flat(self) -> tuple[Any, ...]:
        return (*self.copy, self.exact)


class _Operands(NamedTuple):
    moving: tuple[Any, ...]
    key: tuple[Any, ...]
    residuals: tuple[_Residual, ...]


def _split(c: Contraction, wrt: Sequence[bool], operands: Sequence[Any]) -> _Operands:
    """Operands (or their tangents) by what they are; residuals come last."""
    rest = list(operands)
    residuals: list[_Residual] = []
    for s in reversed(sides_of(wrt)):
        exact = rest.pop()
        copy = (rest.pop(-2), rest.pop()) if c.uses_copy(s) else ()
        residuals.insert(0, _Residual(copy, exact))
    key = (rest.pop(),) if c.key_impl else ()
    return _Operands(tuple(rest), key, tuple(residuals))


def _fixed(c: Contraction, s: int, residual: _Residual) -> Matrix:
    """The quantised operand that the gradient of side s multiplies the cotangent with."""
    if residual.copy:
        return c.backward_copy(1 - s, *residual.copy)
    (copy,) = c.quantize(residual.exact, c.roles[1 - s], [other_axis(c.axes[1 - s])])
    return copy


def _common_batch(operands: _Operands) -> Axes:
    arrays = [*operands.moving, *(x for r in operands.residuals for x in r.flat)]
    batches = [tuple(x.shape[:-2]) for x in arrays]
    rank = len(batches[0])
    batches += [(*key.shape[:-1], *(1,) * (rank - key.ndim + 1)) for key in operands.key]
    return np.broadcast_shapes(*batches)


def _product(c: Contraction, side: int, moving: Array, fixed: Array) -> Array:
    """High-precision product in which the operand of `side` moves: y' (*b, m, n) in out_dtype."""
    lhs, rhs = (moving, fixed) if side == 0 else (fixed, moving)
    return dense(lhs, c.axes[0], rhs, c.axes[1]).astype(c.out_dtype)


# --- Evaluation ---------------------------------------------------------------------------------


def _tangent_impl(*operands: Array, wrt: tuple[bool, bool], contraction: Contraction) -> Array:
    # Forward tangents use the operands of the gradients, dequantised: jvp and vjp are adjoint.
    c, split = contraction, _split(contraction, wrt, operands)
    terms = []
    for s, moving, residual in zip(sides_of(wrt), split.moving, split.residuals, strict=True):
        if c.is_fp8_gradient(s):
            q = _fixed(c, s, residual)
            fixed = q.values.astype(jnp.float32) * expand_scale(q.scale, q.values.shape, q.tile)
        else:
            fixed = residual.exact.astype(jnp.bfloat16)
        terms.append(_product(c, s, moving, fixed))
    out = functools.reduce(operator.add, terms)
    return jnp.broadcast_to(out, (*_common_batch(split), *out.shape[-2:]))


def _tangent_abstract(*operands: Any, wrt: tuple[bool, bool], contraction: Contraction) -> Any:
    c, side, split = contraction, sides_of(wrt)[0], _split(contraction, wrt, operands)
    moving, fixed = split.moving[0], split.residuals[0].exact
    lhs, rhs = (moving, fixed) if side == 0 else (fixed, moving)
    m, n = lhs.shape[other_axis(c.axes[0])], rhs.shape[other_axis(c.axes[1])]
    shape = (*_common_batch(split), m, n)
    return moving.update(shape=shape, dtype=np.dtype(c.out_dtype), weak_type=False)


def _gradient_impl(
    *operands: Array,
    wrt: tuple[bool, bool],
    contraction: Contraction,
    reduce: tuple[Axes, Axes],
    dtypes: tuple[str, str],
) -> list[Array]:
    c, split, sides = contraction, _split(contraction, wrt, operands), sides_of(wrt)
    (ct,) = split.moving
    for key in split.key:  # an example per key
        lead = np.broadcast_shapes(key.shape[:-1], ct.shape[: key.ndim - 1])
        ct = jnp.broadcast_to(ct, (*lead, *ct.shape[key.ndim - 1 :]))
    axes = [cotangent_axis(s) for s in sides if c.is_fp8_gradient(s)]
    copies = iter(c.quantize(ct, "gradient", axes, *split.key) if axes else ())
    gradients = []
    for s, residual in zip(sides, split.residuals, strict=True):
        if c.is_fp8_gradient(s):
            out = fp8_gradient(c, s, next(copies), _fixed(c, s, residual), reduce[s], dtypes[s])
        else:
            out = _bfloat16_gradient(c, s, ct, residual.exact, reduce[s]).astype(dtypes[s])
        gradients.append(
            jnp.broadcast_to(out, (*_gradient_batch(split, reduce[s]), *out.shape[-2:]))
        )
    return gradients


def fp8_gradient(
    c: Contraction, s: int, g: Matrix, fixed: Matrix, reduced: Axes, dtype: str
) -> Array:
    if reduced:  # the GEMM sums over these batch dims too
        fixed = _repeat_batch(fixed, g.values.shape, reduced)
    g_axis, fixed_axis = cotangent_axis(s), other_axis(c.axes[1 - s])
    length = folded_length(g.values.shape[g_axis], g.tile[g_axis], fixed.tile[fixed_axis])
    (lhs, lhs_axis), (rhs, rhs_axis) = in_memory_order(
        (fold_batch_into_axis(g, g_axis, reduced, length), g_axis),
        (fold_batch_into_axis(fixed, fixed_axis, reduced, length), fixed_axis),
        c.axes[s],
    )
    return gemm(lhs, lhs_axis, rhs, rhs_axis, out_dtype=dtype, execution=c.gradient_execution(s))


def _bfloat16_gradient(c: Contraction, s: int, g: Array, fixed: Array, reduced: Axes) -> Array:
    (lhs, lhs_axis), (rhs, rhs_axis) = in_memory_order(
        (g, cotangent_axis(s)), (fixed, other_axis(c.axes[1 - s])), c.axes[s]
    )
    out = dense(lhs, lhs_axis, rhs, rhs_axis, jnp.bfloat16)
    return jnp.sum(out, axis=reduced, keepdims=True) if reduced else out


def _repeat_batch(x: Matrix, shape: Axes, dims: Axes) -> Matrix:
    def repeat(y: Array) -> Array:
        sizes = [shape[i] if i - y.ndim in dims else size for i, size in enumerate(y.shape)]
        return jnp.broadcast_to(y, sizes)

    return Matrix(repeat(x.values), repeat(x.scale), x.tile)


def _gradient_abstract(
    *operands: Any,
    wrt: tuple[bool, bool],
    contraction: Contraction,
    reduce: tuple[Axes, Axes],
    dtypes: tuple[str, str],
) -> list[Any]:
    c, split = contraction, _split(contraction, wrt, operands)
    (ct,) = split.moving
    out = []
    for s, residual in zip(sides_of(wrt), split.residuals, strict=True):
        rows, k = ct.shape[-2 + s], residual.exact.shape[c.axes[1 - s]]
        matrix = (rows, k) if c.axes[s] == -1 else (k, rows)
        shape = (*_gradient_batch(split, reduce[s]), *matrix)
        out.append(ct.update(shape=shape, dtype=np.dtype(dtypes[s]), weak_type=False))
    return out


def _gradient_batch(operands: _Operands, reduced: Axes) -> Axes:
    """Batch dims of a gradient: those of all operands together, without the ones summed over.

    Under vmap a gradient may need only operands that are not mapped; it is the same for each
    example.
    """
    batch = _common_batch(operands)
    return tuple(1 if i - len(batch) - 2 in reduced else size for i, size in enumerate(batch))


tangent_p = primitive.make("jax_fp8.tangent", _tangent_abstract, multiple_results=False)
gradient_p = primitive.make("jax_fp8.gradient", _gradient_abstract, multiple_results=True)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent_impl, multiple_results=False))
mlir.register_lowering(gradient_p, mlir.lower_fun(_gradient_impl, multiple_results=True))


# --- Batching -----------------------------------------------------------------------------------


def _batch_tangent(operands: Sequence[Array], dims: Sequence[int | None], **params: Any) -> Any:
    return tangent_p.bind(*primitive.to_front(operands, dims), **params), 0


def _batch_gradient(operands: Sequence[Array], dims: Sequence[int | None], **params: Any) -> Any:
    # `reduce` counts batch dims from the last, so a new leading dim leaves it as it is.
    out = gradient_p.bind(*primitive.to_front(operands, dims), **params)
    return out, [0] * len(out)


batching.primitive_batchers[tangent_p] = _batch_tangent
batching.primitive_batchers[gradient_p] = _batch_gradient


# --- Derivatives --------------------------------------------------------------------------------


def _match_batch(x: Array, shape: Axes) -> Array:
    """Sums or repeats x (*b, m, n) over batch dims so that it gets `shape`."""
    summed = [i for i in range(x.ndim - 2) if shape[i] == 1 < x.shape[i]]
    return jnp.broadcast_to(jnp.sum(x, axis=summed, keepdims=True) if summed else x, shape)


def _nonzero(tangent: Any) -> bool:
    return not isinstance(tangent, ad.Zero)


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    wrt, c = params["wrt"], params["contraction"]
    split, dots = _split(c, wrt, primals), _split(c, wrt, tangents)
    out = tangent_p.bind(*primals, **params)
    terms = []
    if any(map(_nonzero, dots.moving)):
        moving = [ad.instantiate_zeros(t) for t in dots.moving]
        terms.append(tangent_p.bind(*moving, *primals[len(moving) :], **params))
    for s, moving, residual in zip(sides_of(wrt), split.moving, dots.residuals, strict=True):
        if _nonzero(residual.exact):
            terms.append(_match_batch(_product(c, s, moving, residual.exact), out.shape))
    return out, functools.reduce(operator.add, terms) if terms else zero_tangent(out)


def _gradient_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    wrt, c = params["wrt"], params["contraction"]
    dots = _split(c, wrt, tangents)
    out = gradient_p.bind(*primals, **params)
    terms: list[list[Any]] = [[] for _ in out]
    if _nonzero(tangents[0]):
        linear = gradient_p.bind(tangents[0], *primals[1:], **params)
        terms = [[term] for term in linear]
    for i, (s, residual) in enumerate(zip(sides_of(wrt), dots.residuals, strict=True)):
        if _nonzero(residual.exact):
            product = functools.partial(_product, c, s, fixed=residual.exact)
            ct = _match_batch(primals[0], jax.eval_shape(product, out[i]).shape)
            terms[i] += jax.linear_transpose(product, out[i])(ct)
    sums = [
        functools.reduce(operator.add, t) if t else zero_tangent(y)
        for t, y in zip(terms, out, strict=True)
    ]
    return out, sums


def _tangent_transpose(
    ct: Any, *operands: Any, wrt: tuple[bool, bool], contraction: Contraction
) -> list[Any]:
    split, sides = _split(contraction, wrt, operands), sides_of(wrt)
    linear = [ad.is_undefined_primal(x) for x in split.moving]
    rest = [None] * (len(operands) - len(sides))
    if isinstance(ct, ad.Zero):
        return [
            ad.Zero(x.aval) if u else None for x, u in zip(split.moving, linear, strict=True)
        ] + rest
    asked, dtypes = [False, False], ["float32", "float32"]
    reduce: list[Axes] = [(), ()]
    residuals: list[Any] = []
    for s, x, undefined, residual in zip(sides, split.moving, linear, split.residuals, strict=True):
        if undefined:
            ndim, asked[s] = len(x.aval.shape), True
            reduce[s] = tuple(
                i - ndim for i in range(ndim - 2) if x.aval.shape[i] == 1 < ct.shape[i]
            )
            dtypes[s] = np.dtype(x.aval.dtype).name
            residuals += residual.flat
    gradients = iter(
        gradient_p.bind(
            ct,
            *split.key,
            *residuals,
            wrt=tuple(asked),
            contraction=contraction,
            reduce=tuple(reduce),
            dtypes=tuple(dtypes),
        )
    )
    return [next(gradients) if undefined else None for undefined in linear] + rest


def _gradient_transpose(
    cts: Sequence[Any],
    ct: Any,
    *operands: Any,
    wrt: tuple[bool, bool],
    contraction: Contraction,
    reduce: tuple[Axes, Axes],
    dtypes: tuple[str, str],
) -> list[Any]:
    split, rest = _split(contraction, wrt, (ct, *operands)), [None] * len(operands)
    moving: list[Any] = []
    residuals: list[Any] = []
    asked = [False, False]
    for s, tangent, residual in zip(sides_of(wrt), cts, split.residuals, strict=True):
        if _nonzero(tangent):
            asked[s] = True
            moving.append(tangent)
            residuals += residual.flat
    if not moving:
        return [ad.Zero(ct.aval), *rest]
    out = tangent_p.bind(*moving, *split.key, *residuals, wrt=tuple(asked), contraction=contraction)
    return [_match_batch(out, ct.aval.shape), *rest]


ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_jvps[gradient_p] = _gradient_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[gradient_p] = _gradient_transpose
