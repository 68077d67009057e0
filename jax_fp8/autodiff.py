"""The differentiable FP8 GEMM: E4M3 forward, E5M2 gradients, one rule for forward and reverse mode.

The rule is a custom_jvp whose tangent y' = x' · w^ + x^ · w' goes through a linear primitive
(linear.py); its transpose holds the two gradient GEMMs. Nothing is quantised twice: the
backward-axis copies of x and w are made in the same pass as the forward copies, and are all that is
kept of x and w (unless the recipe keeps high-precision residuals).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jax_fp8.contraction import Contraction, other_axis
from jax_fp8.gemm import gemm
from jax_fp8.linear import sides_of, tangent_p

__all__ = ["contract", "straight_through"]

Array = jax.Array
Flags = tuple[bool, bool]


def contract(
    lhs: Array, rhs: Array, contraction: Contraction, key_data: Array | None = None
) -> Array:
    """(*b, m, n) product of two high-precision matrices, whose batch dims are equal or 1.

    Args:
      lhs: (*b, m, k) or (*b, k, m), by `contraction.axes`.
      rhs: (*b, n, k) or (*b, k, n).
      contraction: formats, tiles, layouts and execution.
      key_data: data of the random key for stochastic rounding of the cotangent.
    """
    out: Array = _product(contraction, lhs, rhs, *(() if key_data is None else (key_data,)))
    return out


def _forward(c: Contraction, keep: Flags, lhs: Array, rhs: Array) -> Any:
    """The product, and per side to be kept the (values, scale) of its backward-axis copy."""
    copies = [
        c.quantize(x, role, (axis, other_axis(axis)) if kept else (axis,))
        for x, role, axis, kept in zip((lhs, rhs), c.roles, c.axes, keep, strict=True)
    ]
    out = gemm(
        copies[0][0],
        c.axes[0],
        copies[1][0],
        c.axes[1],
        out_dtype=c.out_dtype,
        execution=c.executions.forward,
    )
    return out, [(q[1].values, q[1].scale) for q, kept in zip(copies, keep, strict=True) if kept]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(c: Contraction, lhs: Array, rhs: Array, *key: Array) -> Any:
    return _forward(c, (False, False), lhs, rhs)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product_and_copies(c: Contraction, keep: Flags, lhs: Array, rhs: Array, *key: Array) -> Any:
    return _forward(c, keep, lhs, rhs)


def _rule(c: Contraction, primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
    out, _, tangent = _evaluate(c, (False, False), primals, tangents)
    return out, tangent


def _rule_and_copies(
    c: Contraction, keep: Flags, primals: Sequence[Array], tangents: Sequence[Any]
) -> Any:
    out, copies, tangent = _evaluate(c, keep, primals, tangents)
    return (out, copies), (tangent, jax.tree.map(jnp.zeros_like, copies))


def _evaluate(
    c: Contraction, keep: Flags, primals: Sequence[Array], tangents: Sequence[Any]
) -> Any:
    """The product, the copies that the caller wants, and the tangent of the product."""
    operands, key = primals[:2], primals[2:]
    wrt = tuple(not isinstance(t, SymbolicZero) for t in tangents[:2])
    uses = [wrt[s] and c.uses_copy(s) for s in (0, 1)]  # the other side's backward-axis copy
    needed = (keep[0] or uses[1], keep[1] or uses[0])
    out, arrays = _product_and_copies(c, needed, *primals)
    copies = dict(zip((side for side in (0, 1) if needed[side]), arrays, strict=True))
    kept = [copies[side] for side in (0, 1) if keep[side]]
    if not any(wrt):
        return out, kept, jnp.zeros_like(out)
    moving = [straight_through(c, s, operands[s], tangents[s]) for s in sides_of(wrt)]
    residuals: list[Array] = []
    for s in sides_of(wrt):
        if uses[s]:
            residuals += map(jax.lax.stop_gradient, copies[1 - s])
        residuals.append(operands[1 - s])
    return out, kept, tangent_p.bind(*moving, *key, *residuals, wrt=wrt, contraction=c)


def straight_through(c: Contraction, side: int, x: Array, tangent: Array) -> Array:
    """Tangent of x behind the quantiser, by the recipe's `ste`."""
    scale = c.recipe.static_scale(c.roles[side])
    if c.recipe.ste == "pass" or scale is None:  # a computed scale never saturates
        return tangent
    threshold = c.recipe.format(c.roles[side]).saturation_threshold
    magnitude = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32) / np.float32(scale))
    return jnp.where(magnitude >= threshold, jnp.zeros_like(tangent), tangent)


_product.defjvp(_rule, symbolic_zeros=True)
_product_and_copies.defjvp(_rule_and_copies, symbolic_zeros=True)
