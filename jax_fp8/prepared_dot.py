"""Products with prepared weights, and their derivative with respect to the other operand.

    y  = x^ · w^          w^ as it was prepared
    dx = E5M2(g) · w^ᵀ    the same codes; g is quantised along n

Where tiles of weights are square or the whole tensor, dx has the bits of the call with unprepared
weights. Other recipes quantise the original weights once more along n, which nobody has here: dx is
then a product with scales for every n, exact but slow. Reverse mode only, and once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_fp8 import _compat, dimension_numbers
from jax_fp8.autodiff import straight_through
from jax_fp8.contraction import Contraction, cotangent_axis
from jax_fp8.gemm import Matrix, gemm
from jax_fp8.linear import fp8_gradient
from jax_fp8.panels import from_panels
from jax_fp8.prepared import PreparedArray
from jax_fp8.primitive import refuse

__all__ = ["DGRAD_SCOPE", "check_plan", "contract_prepared"]

Array = jax.Array

#: Where the name stack has this, `diagnose` sees a gradient.
DGRAD_SCOPE: Final = "fp8_dgrad"


def check_plan(plan: dimension_numbers.Plan, call: str) -> None:
    """Raises unless a plan takes the dims of a prepared rhs in their order: batch dims, k, n."""
    rhs, ndim = plan.rhs, len(plan.rhs.shape)
    if rhs.contracting != (ndim - 2,) or rhs.batch != tuple(range(ndim - 2)):
        raise ValueError(
            f"{call}: dimension_numbers contract dims {rhs.contracting} of rhs and take "
            f"{rhs.batch} as batch dims; a PreparedArray of shape {rhs.shape} contracts dim "
            f"{ndim - 2} alone and has the batch dims {tuple(range(ndim - 2))} in this order: "
            "prepare the weights in another order (k_axis=), or give rhs.dequantize(), in scaled "
            "calls rhs.unprepare()"
        )


@dataclasses.dataclass(frozen=True)
class _Static:
    contraction: Contraction
    n: int
    tile: tuple[int, int]
    lhs_shape: tuple[int, ...]
    lhs_dtype: str


def contract_prepared(
    lhs: Array, rhs: PreparedArray, contraction: Contraction, key_data: Array | None = None
) -> Array:
    """(*b, m, n) product of a high-precision matrix and prepared weights.

    Args:
      lhs: (*b, m, k) or (*b, k, m), by `contraction.axes`.
      rhs: (*b, k, n); batch dims are equal or 1.
      contraction: formats and tiles of lhs and its cotangent, layouts and execution.
      key_data: data of the random key for stochastic rounding of the cotangent.
    """
    operand = rhs.operand()
    lhs, values, scale = _compat.equalize_varying_axes(lhs, operand.values, operand.scale)
    static = _Static(contraction, rhs.n, rhs.tile, tuple(lhs.shape), lhs.dtype.name)
    key = () if key_data is None else (key_data,)
    out: Array = _product(static, lhs, values, scale, *key)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(s: _Static, lhs: Array, values: Array, scale: Array, *key: Array) -> Array:
    c = s.contraction
    (x,) = c.quantize(lhs, c.roles[0], [c.axes[0]])
    return gemm(
        x,
        c.axes[0],
        Matrix(values, scale, s.tile),
        -2,
        out_dtype=c.out_dtype,
        execution=c.executions.forward,
        rhs_n=s.n,
    )


def _forward(s: _Static, lhs: Any, values: Any, scale: Any, *key: Any) -> Any:
    for name, x in (("values", values), ("scale", scale)):
        if x.perturbed:
            refuse(
                f"the {name} of rhs, a PreparedArray",
                "jax_fp8",
                "prepared weights are constants: differentiate with respect to unprepared ones, or "
                "stop the gradient with jax.lax.stop_gradient",
            )
    operands = [x.value for x in (lhs, values, scale, *key)]
    c = s.contraction
    is_masked = c.recipe.ste != "pass" and c.recipe.static_scale(c.roles[0]) is not None
    return _product(s, *operands), (operands if is_masked else [None, *operands[1:]])


def _backward(s: _Static, residuals: Any, ct: Any) -> Any:
    lhs, values, scale, *key = residuals
    nothing = (None,) * (2 + len(key))
    if isinstance(ct, SymbolicZero):
        return (jnp.zeros(s.lhs_shape, s.lhs_dtype), *nothing)
    return (_input_gradient(s, ct, lhs, values, scale, *key), *nothing)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _input_gradient(
    s: _Static, ct: Array, lhs: Array | None, values: Array, scale: Array, *key: Array
) -> Array:
    c = s.contraction
    ndim = ct.ndim
    summed = tuple(i - ndim for i in range(ndim - 2) if s.lhs_shape[i] == 1 < ct.shape[i])
    with jax.named_scope(DGRAD_SCOPE):
        (g,) = c.quantize(ct, "gradient", [cotangent_axis(0)], *key)
        w = Matrix(from_panels(values, s.n), scale, s.tile)
        dx = jnp.broadcast_to(fp8_gradient(c, 0, g, w, summed, s.lhs_dtype), s.lhs_shape)
    return dx if lhs is None else straight_through(c, 0, lhs, dx)


def _second_derivative(s: _Static, primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], SymbolicZero):
        refuse(
            "the gradient of a product with prepared weights",
            "jax_fp8",
            "second derivatives need the weights from before prepare: multiply with those",
        )
    out = _input_gradient(s, *primals)
    return out, jnp.zeros_like(out)


_input_gradient.defjvp(_second_derivative, symbolic_zeros=True)

_product.defvjp(_forward, _backward, symbolic_zeros=True)
