"""Derivative rules with one thing wrong: what the gradient checks must notice.

Each fault is a row of `FAULTS`. `mutate(op, fault, ...)` keeps the op's forward pass and replaces
its gradients by a rule that is built from the library's own quantiser and scaled GEMM, with that
one fault in it; without a fault the rule gives the library's bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8 import formats
from jax_fp8.config import Execution
from jax_fp8.contraction import Contraction, cotangent_axis, dense, in_memory_order, other_axis
from jax_fp8.fold import fold_batch_into_axis, folded_length
from jax_fp8.gemm import Matrix, gemm
from jax_fp8.quantize_primitive import quantize_matrix
from jax_fp8.reference import expand_scale
from jax_fp8.testing.form import Form, form_of
from jax_fp8.testing.products import Intent

__all__ = ["FAULTS", "Fault", "mutate"]

Array = jax.Array


class _Gradient(NamedTuple):
    """What enters the GEMM of one gradient, g · fixed.

    `exact` and `other` are the high-precision operand that was quantised to `fixed`, and the one
    whose gradient this is. Every matrix here has its k last.
    """

    contraction: Contraction
    side: int
    ct: Array
    g: Matrix
    fixed: Matrix
    exact: Array
    other: Array
    execution: Execution


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that a derivative rule can do wrong.

    Attributes:
      description: what, in a sentence.
      contraction: changes what is static: formats, accumulation.
      operands: changes what enters the GEMM of a gradient.
      result: changes what leaves it.
      dense: the GEMM multiplies the unquantised cotangent.
    """

    description: str
    contraction: Callable[[Contraction], Contraction] = lambda c: c
    operands: Callable[[_Gradient], _Gradient] = lambda gradient: gradient
    result: Callable[[Array], Array] = lambda out: out
    dense: bool = False


# --- The faults -----------------------------------------------------------------------------------


def _wrong_format(c: Contraction) -> Contraction:
    other = formats.E4M3FN if c.recipe.gradient_format is formats.E5M2 else formats.E5M2
    return dataclasses.replace(c, recipe=dataclasses.replace(c.recipe, gradient_format=other))


def _never_promoted(c: Contraction) -> Contraction:
    changed = (
        dataclasses.replace(e, accumulation="hopper_wgmma", promotion_interval=0)
        for e in c.executions
    )
    return dataclasses.replace(c, executions=type(c.executions)(*changed))


def _nearest(c: Contraction) -> Contraction:
    return dataclasses.replace(
        c, key_impl="", recipe=dataclasses.replace(c.recipe, rounding="nearest")
    )


def _scaled(matrix: Matrix, factor: float) -> Matrix:
    return dataclasses.replace(matrix, scale=matrix.scale * np.float32(factor))


def _forgotten_scale(gradient: _Gradient) -> _Gradient:
    if gradient.side == 1:
        return gradient
    fixed = dataclasses.replace(gradient.fixed, scale=jnp.ones_like(gradient.fixed.scale))
    return gradient._replace(fixed=fixed)


def _requantised(gradient: _Gradient, scale: Array, bits: Array | None) -> _Gradient:
    c, tile = gradient.contraction, gradient.g.tile
    values, scales = quantize_matrix(
        gradient.ct, c.recipe.format("gradient"), tile, c.quantize_execution, scale=scale, bits=bits
    )
    return gradient._replace(g=Matrix(values, scales, tile))


def _stale_amax(gradient: _Gradient) -> _Gradient:
    return _requantised(gradient, gradient.g.scale * np.float32(1 / 8), None)


def _truncated(gradient: _Gradient) -> _Gradient:
    # Noise of all ones never rounds up: no dropped fraction exceeds it.
    never_up = jnp.full(gradient.ct.shape, 2**32 - 1, jnp.uint32)
    return _requantised(gradient, gradient.g.scale, never_up)


def _transposed_scale(gradient: _Gradient) -> _Gradient:
    fixed = gradient.fixed
    if fixed.scale.shape[-2:] == (1, 1):
        return gradient
    # Element (i, j) takes the scale of the tile that (j, i) lies in, wrapped where there is none.
    (rows, cols), (count_r, count_c) = fixed.values.shape[-2:], fixed.scale.shape[-2:]
    i = (jnp.arange(cols) // fixed.tile[0]) % count_r
    j = (jnp.arange(rows) // fixed.tile[1]) % count_c
    scale = fixed.scale[..., i[None, :], j[:, None]]
    return gradient._replace(fixed=Matrix(fixed.values, scale, (1, 1)))


def _swapped_residual(gradient: _Gradient) -> _Gradient:
    c, axis = gradient.contraction, other_axis(_forward_axis(gradient))
    role = c.roles[1 - gradient.side]
    wrong = jnp.resize(gradient.other, gradient.exact.shape).astype(gradient.exact.dtype)
    (fixed,) = c.quantize(wrong, role, (axis,))
    return gradient._replace(fixed=fixed)


def _forward_axis(gradient: _Gradient) -> int:
    """Axis of the fixed operand that the forward pass contracts."""
    return gradient.contraction.axes[1 - gradient.side]


def _forward_axis_copy(gradient: _Gradient) -> _Gradient:
    c = gradient.contraction
    (fixed,) = c.quantize(gradient.exact, c.roles[1 - gradient.side], (_forward_axis(gradient),))
    return gradient._replace(fixed=fixed)


#: Every fault by its name.
FAULTS: Final[dict[str, Fault]] = {
    "zeros": Fault(description="gradients are zero", result=lambda out: out * 0),
    "sign flipped": Fault(description="gradients have the wrong sign", result=lambda out: -out),
    "wrong format": Fault(
        description="g in E4M3 where E5M2 is meant, or the reverse", contraction=_wrong_format
    ),
    "quantiser off": Fault(description="g is not quantised", dense=True),
    "scale of w forgotten": Fault(
        description="the codes of rhs are multiplied without their scale", operands=_forgotten_scale
    ),
    "scale of g ×2": Fault(
        description="the scale of g is twice what it should be",
        operands=lambda gradient: gradient._replace(g=_scaled(gradient.g, 2)),
    ),
    "stale amax": Fault(
        description="g is scaled by an amax that is 8 times too small", operands=_stale_amax
    ),
    "g truncated": Fault(description="g is rounded toward zero", operands=_truncated),
    "transposed scale": Fault(
        description="scales of the residual are looked up as those of its transpose",
        operands=_transposed_scale,
    ),
    "missing promotion": Fault(
        description="gradients add up in a Hopper accumulator that is never promoted",
        contraction=_never_promoted,
    ),
    "swapped residual": Fault(
        description="lhs where rhs belongs, and the reverse", operands=_swapped_residual
    ),
    "forward-axis copy": Fault(
        description="the copy that is quantised along k in a GEMM that contracts the other axis",
        operands=_forward_axis_copy,
    ),
    "nearest": Fault(
        description="g is rounded to nearest where stochastic rounding is meant",
        contraction=_nearest,
    ),
}


# --- The rule -------------------------------------------------------------------------------------


def mutate(
    op: Callable[..., Any], fault: str | Fault | None, intent: Intent, x: Any, w: Any
) -> Callable[..., Any]:
    """`op` with gradients that have a fault; forward pass and signature are the op's own.

    Args:
      op: function of two arrays (and a key, if the intent has one) with one FP8 GEMM.
      fault: a name in `FAULTS`, a Fault, or None for none.
      intent: recipe, roles and accumulation of the op.
      x: first argument, or its shape and dtype.
      w: second argument.

    >>> import jax_fp8 as fp8
    >>> from jax_fp8.testing.vjp import intent_of
    >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    >>> zeros = mutate(fp8.matmul, "zeros", intent_of(None, fp8.matmul, x, w), x, w)
    >>> float(jnp.abs(jax.grad(lambda x: zeros(x, w).sum())(x)).max())
    0.0
    """
    chosen = Fault(description="") if fault is None else FAULTS.get(str(fault)) or fault
    if not isinstance(chosen, Fault):
        raise ValueError(f"mutate: there is no fault {fault!r}; there are {', '.join(FAULTS)}")
    key = () if intent.key is None else (intent.key,)
    form = form_of(lambda x, w: op(x, w, *key), x, w)
    out_dtype = jax.eval_shape(op, x, w, *key).dtype
    contraction = Contraction(
        axes=(-1, -1),
        roles=intent.roles,
        recipe=intent.recipe,
        out_dtype=np.dtype(out_dtype).name,
        executions=intent.executions,
        key_impl="" if intent.key is None else str(jax.random.key_impl(intent.key)),
    )

    @jax.custom_vjp
    def faulty(x: Array, w: Array, *key: Array) -> Any:
        return op(x, w, *key)

    def forward(x: Array, w: Array, *key: Array) -> Any:
        return faulty(x, w, *key), (x, w, key)

    def backward(saved: Any, ct: Array) -> Any:
        x, w, key = saved
        gradients = _gradients(chosen, contraction, form, x, w, ct, *key)
        return (*gradients, *(None for _ in key))

    faulty.defvjp(forward, backward)
    return faulty


def _gradients(
    fault: Fault, contraction: Contraction, form: Form, x: Array, w: Array, ct: Array, *key: Array
) -> list[Array]:
    c = fault.contraction(contraction)
    lhs, rhs, g = (y.reshape(-1)[index] for y, index in zip((x, w, ct), form.indices, strict=True))
    data = [jax.random.key_data(k) for k in key] if c.key_impl else []
    axes = [cotangent_axis(side) for side in (0, 1) if c.is_fp8_gradient(side)]
    copies = dict(zip(axes, c.quantize(g, "gradient", axes, *data), strict=True))
    out = []
    for side, own, other in ((0, lhs, rhs), (1, rhs, lhs)):
        reduced = tuple(i - g.ndim for i in range(g.ndim - 2) if own.shape[i] == 1 < g.shape[i])
        axis = cotangent_axis(side)
        if not c.is_fp8_gradient(side):
            got = dense(g, axis, other, -2, jnp.bfloat16)
            got = jnp.sum(got, axis=reduced, keepdims=True) if reduced else got
            gradient = got.astype(own.dtype)
        else:
            (fixed,) = c.quantize(other, c.roles[1 - side], (-2,))
            what = _Gradient(
                c, side, g, copies[axis], fixed, other, own, c.gradient_execution(side)
            )
            gradient = _multiply(fault, fault.operands(what), reduced, own.dtype)
        gradient = fault.result(gradient)
        order = np.argsort(form.indices[side].reshape(-1))
        out.append(gradient.reshape(-1)[order].reshape(form.shapes[side]))
    return out


def _multiply(fault: Fault, what: _Gradient, reduced: tuple[int, ...], dtype: Any) -> Array:
    axis, fixed = cotangent_axis(what.side), what.fixed
    if fault.dense:
        scale = expand_scale(fixed.scale, fixed.values.shape, fixed.tile)
        out = dense(what.ct, axis, fixed.values.astype(jnp.float32) * scale, -2)
        return (jnp.sum(out, axis=reduced, keepdims=True) if reduced else out).astype(dtype)
    if reduced:
        batch = what.g.values.shape[:-2]
        values, scale = (
            jnp.broadcast_to(y, (*batch, *y.shape[-2:])) for y in (fixed.values, fixed.scale)
        )
        fixed = Matrix(values, scale, fixed.tile)
    length = folded_length(fixed.values.shape[-2], what.g.tile[axis], fixed.tile[-2])
    (lhs, lhs_axis), (rhs, rhs_axis) = in_memory_order(
        (fold_batch_into_axis(what.g, axis, reduced, length), axis),
        (fold_batch_into_axis(fixed, -2, reduced, length), -2),
        -1,
    )
    return gemm(lhs, lhs_axis, rhs, rhs_axis, out_dtype=dtype, execution=what.execution)
