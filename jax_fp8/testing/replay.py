"""Evaluates a jaxpr with other meanings for the FP8 primitives: the identity quantiser in float64.

A check that wants to know whether the derivative rule is plumbed right (dims, layouts, batches,
scales) takes the very jaxpr that the library traces, to any order of derivatives, and evaluates it
with `quantize_p` replaced by x → (x / scale, scale), so that nothing is rounded, `gemm_p` by a
float64 dot, and every other operation in float64. The library itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_fp8 import linear
from jax_fp8.array import scale_shape
from jax_fp8.gemm import gemm_p
from jax_fp8.panels import from_panels
from jax_fp8.quantize_primitive import dequantize_p, quantize_p
from jax_fp8.reference import expand_scale

__all__ = ["IDENTITY_RULES", "identity", "replay"]

Array = jax.Array
Rule = Callable[..., Any]
Rules = Mapping[core.Primitive, Rule]

#: Parameters of call-like equations that hold what they call.
_CALLED: Final = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CALLS: Final = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint"}
    | {"custom_vjp_call_jaxpr", "remat", "remat2"}
)
#: Primitives that hold how they combine two numbers, made anew for float64.
_SCATTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter_add": jax.lax.scatter_add,
}
#: Parameters that say which dtype a result has.
_DTYPES: Final = ("new_dtype", "preferred_element_type", "dtype")


def identity(fn: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    """`fn` with an identity quantiser in float64, derivative rules of the library included.

    Args:
      fn: function of arrays that traces to FP8 primitives, such as a vjp of `matmul`.
      examples: arrays or abstract values in the dtypes that `fn` takes.

    Returns:
      A function of NumPy float64 arrays of the same shapes; call it where float64 is enabled
      (`jax.enable_x64`).

    >>> import jax_fp8 as fp8
    >>> from jax_fp8._compat import enable_x64
    >>> x, w = np.float32([[0.3, 0.7]]), np.float32([[1.1], [0.9]])
    >>> product = identity(fp8.matmul, x, w)
    >>> with enable_x64():
    ...     y = product(np.float64([[0.3, 0.7]]), np.float64([[1.1], [0.9]]))
    >>> round(float(y[0, 0]), 12)
    0.96
    """
    return replay(fn, IDENTITY_RULES, *examples)


def replay(fn: Callable[..., Any], rules: Rules, *examples: Any) -> Callable[..., Any]:
    """`fn` in float64, with `rules` instead of the primitives that they name."""
    closed, out_tree = jax.make_jaxpr(fn, return_shape=True)(*examples)
    structure = jax.tree.structure(out_tree)

    def replayed(*args: Any) -> Any:
        flat = [_widen(x) for x in jax.tree.leaves(args)]
        return jax.tree.unflatten(structure, _evaluate(closed, flat, rules))

    return replayed


def _evaluate(closed: Any, args: Sequence[Any], rules: Rules) -> list[Any]:
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = {}

    def read(var: Any) -> Any:
        return _widen(var.val) if isinstance(var, core.Literal) else env[var]

    env.update(zip(jaxpr.constvars, map(_widen, closed.consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        out = _apply(eqn, [read(var) for var in eqn.invars], rules)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _apply(eqn: Any, operands: list[Any], rules: Rules) -> Sequence[Any]:
    primitive, params = eqn.primitive, eqn.params
    if primitive in rules:
        out = rules[primitive](*operands, **params)
    elif primitive in _IMPLEMENTATIONS:
        shapes = [var.aval for var in eqn.invars]
        body = jax.make_jaxpr(lambda *xs: _IMPLEMENTATIONS[primitive](*xs, **params))(*shapes)
        return _evaluate(body, operands, rules)
    elif primitive.name in _CALLS:
        called = next(params[name] for name in _CALLED if name in params)
        if not hasattr(called, "consts"):
            called = core.ClosedJaxpr(called, ())
        return _evaluate(called, operands, rules)
    elif primitive.name in _SCATTERS:
        how = {name: params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
        out = _SCATTERS[primitive.name](*operands, params["dimension_numbers"], **how)
    elif any(_holds_jaxpr(value) for value in params.values()):
        raise NotImplementedError(
            f"testing: {primitive.name} cannot be replayed in float64; check the function inside it"
        )
    else:
        out = primitive.bind(*operands, **_wide_params(params))
    return out if primitive.multiple_results else [out]


def _holds_jaxpr(value: Any) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return any(hasattr(v, "eqns") or hasattr(v, "jaxpr") for v in values)


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _widen(x: Any) -> Any:
    if hasattr(x, "dtype") and _is_float(x.dtype):
        return jnp.asarray(np.asarray(x).astype(np.float64) if _concrete(x) else x, jnp.float64)
    return x


def _concrete(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)


def _wide_params(params: dict[str, Any]) -> dict[str, Any]:
    wide = {
        name: np.dtype(np.float64)
        for name in _DTYPES
        if params.get(name) is not None and _is_float(params[name])
    }
    return params | wide


# --- The meanings of FP8 primitives ---------------------------------------------------------------


def _pattern(shape: tuple[int, ...]) -> Array:
    """Powers of two that no transposition or shift leaves as they are."""
    rows, cols = (jnp.arange(size)[:, None] if i == 0 else jnp.arange(size)[None, :]
                  for i, size in enumerate(shape[-2:]))  # fmt: skip
    return jnp.broadcast_to(jnp.exp2(((3 * rows + 7 * cols) % 5 - 1).astype(jnp.float64)), shape)


def _quantize(*operands: Any, tiles: Any, rounding: str, **params: Any) -> list[Any]:
    x, *rest = operands
    has_scale = len(rest) > (rounding == "stochastic")
    if has_scale:
        return [x / expand_scale(rest[0], x.shape, tiles[0])]
    out = []
    for tile in tiles:
        scale = _pattern(scale_shape(x.shape, (1, *tile)))
        out += [x / expand_scale(scale, x.shape, tile), scale]
    return out


def _dequantize(values: Any, scale: Any, *, tile: Any, **params: Any) -> Any:
    return values * expand_scale(scale, values.shape, tile)


def _gemm(
    lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, *, lhs_axis: int, rhs_axis: int,
    lhs_tile: Any, rhs_tile: Any, rhs_n: int | None, **params: Any,
) -> Any:  # fmt: skip
    rhs = rhs if rhs_n is None else from_panels(rhs, rhs_n)

    def real(x: Any, scale: Any, axis: int, tile: Any) -> Any:
        """(*b, rows, k), dequantised."""
        if axis == -2:
            x, scale = jnp.swapaxes(x, -1, -2), jnp.swapaxes(scale, -1, -2)
        return x * expand_scale(scale, x.shape, tile)

    x, w = real(lhs, lhs_scale, lhs_axis, lhs_tile), real(rhs, rhs_scale, rhs_axis, rhs_tile)
    return jnp.matmul(x, jnp.swapaxes(w, -1, -2), precision=jax.lax.Precision.HIGHEST)


#: Primitives that are made of others, and what of.
_IMPLEMENTATIONS: Final[Mapping[core.Primitive, Rule]] = {
    linear.tangent_p: linear._tangent_impl,
    linear.gradient_p: linear._gradient_impl,
}
#: The identity quantiser, with scales that are not all one: where one is forgotten or transposed,
#: the product changes.
IDENTITY_RULES: Final[Rules] = {quantize_p: _quantize, dequantize_p: _dequantize, gemm_p: _gemm}
