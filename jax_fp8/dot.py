"""The differentiable calls: real numbers in, quantised by a recipe, real numbers out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jax_fp8 import _compat, config, dimension_numbers, gemm, recipes
from jax_fp8.accumulation import UNSET, PerGemm, Sums, Unset
from jax_fp8.autodiff import contract
from jax_fp8.contraction import Contraction
from jax_fp8.emulation.machines import MACHINES
from jax_fp8.emulation.overflow import warn_of_overflow
from jax_fp8.operands import as_float_array, check_prepared, check_rounding
from jax_fp8.prepared import PreparedArray
from jax_fp8.prepared_dot import check_plan, contract_prepared
from jax_fp8.primitive import refuse_explicit
from jax_fp8.recipes import Recipe

__all__ = ["dot_general", "matmul"]

Array = jax.Array
ArrayLike = jax.typing.ArrayLike
ROLES = ("input", "weight")


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike | PreparedArray,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: npt.DTypeLike | None = None,
    *,
    recipe: Recipe | None = None,
    roles: tuple[str, str] = ROLES,
    key: Array | None = None,
    accumulation: str | PerGemm[str] | Unset = UNSET,
    promotion_interval: int | PerGemm[int | None] | Unset | None = UNSET,
    split_k: int | PerGemm[int] | Unset = UNSET,
    out_sharding: Any = None,
) -> Array:
    """`jax.lax.dot_general` through an FP8 GEMM: E4M3 forward, E5M2 gradients, FP32 accumulation.

    Operands are quantised by `recipe`, multiplied by an FP8 kernel and differentiated by FP8 GEMMs
    of their own; each cotangent has its operand's dtype.

    Args:
      lhs: float32, bfloat16 or float16 array of any shape.
      rhs: the same; its dtype may differ from that of lhs. Or weights that were prepared: their
        format and tile count then, not the recipe's, and the only gradient is that of lhs. Their
        dims must be batch dims, k, n.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      precision: None, "default", "highest" or their `jax.lax.Precision`. "highest" asks for sums in
        FP32, which an emulated short accumulator gives only if it is promoted.
      preferred_element_type: float32, bfloat16 or float16 of the result; None promotes lhs and rhs.
        That of prepared weights is the dtype of lhs.
      recipe: formats and scale tiles; None is `BlockScaling()`.
      roles: "input" or "weight" for lhs and rhs. Two activations are ("input", "input").
      key: `jax.random.key` for a recipe that rounds gradients stochastically, else None.
      accumulation: accumulation model to emulate on a CPU, a name of `emulation.MACHINES`, or
        "native"; a `PerGemm` gives forward pass, dgrad and wgrad their own. An argument goes before
        the context `emulate`, that before the recipe.
      promotion_interval: k after which a short accumulator is added to an FP32 sum and starts again
        from zero; None is never. Left out everywhere, the model's default.
      split_k: parts of k that are added up apart from each other, and at the end in FP32.
      out_sharding: must be None.

    Returns:
      Array of shape (batch..., lhs free..., rhs free...).

    Raises:
      TypeError: a dtype that is not offered, FP8 operands included, or no recipe.
      ValueError: shapes, dimension_numbers, roles, key or accumulation that do not fit.
      NotImplementedError: an operand sharded over an Explicit mesh axis, or no kernel where one is
        required.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    >>> dot_general(x, w, (((1,), (0,)), ((), ()))).shape
    (2, 4)
    """
    call = "dot_general"
    sums = Sums(accumulation, promotion_interval, split_k)
    request = _Request(call, recipe, roles, precision, preferred_element_type, key, sums)
    lhs, rhs = _operands(lhs, rhs, call)
    plan = plan_of(dimension_numbers, lhs, rhs, call)
    if isinstance(rhs, PreparedArray):
        check_plan(plan, call)
    check_out_sharding(out_sharding, call)
    return _contract_plan(lhs, rhs, plan, request)


def matmul(
    lhs: ArrayLike,
    rhs: ArrayLike | PreparedArray,
    *,
    recipe: Recipe | None = None,
    roles: tuple[str, str] = ROLES,
    precision: Any = None,
    preferred_element_type: npt.DTypeLike | None = None,
    key: Array | None = None,
    accumulation: str | PerGemm[str] | Unset = UNSET,
    promotion_interval: int | PerGemm[int | None] | Unset | None = UNSET,
    split_k: int | PerGemm[int] | Unset = UNSET,
    out_sharding: Any = None,
) -> Array:
    """`jnp.matmul` through an FP8 GEMM; see `dot_general` for arguments and errors.

    Args:
      lhs: (k,), (m, k) or (*batch, m, k).
      rhs: (k,), (k, n) or (*batch, k, n); batch dims broadcast. May be a PreparedArray.
      recipe: formats and scale tiles; None is `BlockScaling()`.
      roles: "input" or "weight" for lhs and rhs.
      precision: as for `dot_general`.
      preferred_element_type: dtype of the result; None promotes lhs and rhs.
      key: as for `dot_general`.
      accumulation: as for `dot_general`.
      promotion_interval: as for `dot_general`.
      split_k: as for `dot_general`.
      out_sharding: must be None.

    Returns:
      (*batch, m, n), without m or n where that operand is a vector.

    >>> import jax.numpy as jnp
    >>> matmul(jnp.ones((5, 2, 3)), jnp.ones((3, 4))).shape
    (5, 2, 4)
    """
    call = "matmul"
    sums = Sums(accumulation, promotion_interval, split_k)
    request = _Request(call, recipe, roles, precision, preferred_element_type, key, sums)
    lhs, rhs = _operands(lhs, rhs, call)
    check_out_sharding(out_sharding, call)
    if lhs.ndim == 0 or rhs.ndim == 0:
        raise ValueError(
            f"{call}: lhs has shape {lhs.shape} and rhs {rhs.shape}; scalars have no k"
        )
    lhs_k, rhs_k = lhs.ndim - 1, max(rhs.ndim - 2, 0)
    if rhs.ndim <= 2:  # lhs's batch dims are rows: one GEMM
        plan = plan_of((((lhs_k,), (rhs_k,)), ((), ())), lhs, rhs, call)
        return _contract_plan(lhs, rhs, plan, request)
    left = lhs[None, :] if lhs.ndim == 1 else lhs
    rank = max(left.ndim, rhs.ndim)
    left = left.reshape((1,) * (rank - left.ndim) + left.shape)
    new = (1,) * (rank - rhs.ndim)
    right = rhs.with_ndim(rank) if isinstance(rhs, PreparedArray) else rhs.reshape(new + rhs.shape)
    check_k(lhs, lhs_k, rhs, rhs_k, call)
    try:
        np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except ValueError:
        raise ValueError(
            f"{call}: batch dims of lhs {lhs.shape[:-2]} and rhs {rhs.shape[:-2]} do not broadcast"
        ) from None
    out = _contract(left, -1, right, -2, request)
    return out[..., 0, :] if lhs.ndim == 1 else out


@dataclasses.dataclass(frozen=True)
class _Request:
    """What a call was given beside its operands."""

    call: str
    recipe: Recipe | None
    roles: tuple[str, str]
    precision: Any
    preferred_element_type: npt.DTypeLike | None
    key: Array | None
    sums: Sums


def _contract_plan(
    lhs: Array, rhs: Array | PreparedArray, plan: dimension_numbers.Plan, request: _Request
) -> Array:
    lhs = plan.lhs.canonical(lhs)
    rhs = rhs if isinstance(rhs, PreparedArray) else plan.rhs.canonical(rhs)
    return _contract(lhs, plan.lhs.axis, rhs, plan.rhs.axis, request).reshape(plan.out_shape)


def _contract(
    lhs: Array, lhs_axis: int, rhs: Array | PreparedArray, rhs_axis: int, request: _Request
) -> Array:
    call, key, out_dtype = request.call, request.key, request.preferred_element_type
    if out_dtype is None:
        out_dtype = gemm.promote(lhs.dtype, *real_dtypes(rhs))
    recipe = recipes.check(request.recipe, call)
    roles = recipes.check_roles(request.roles, call)
    key_impl, key_data = "", None
    if check_rounding(recipe.rounding, key, call) and key is not None:
        key_impl, key_data = _compat.key_impl(key), _compat.key_data(key)
    executions = config.executions(request.sums, recipe.sums, call=call)
    check_sums(executions, recipe, request.precision, call)
    contraction = Contraction(
        axes=(lhs_axis, rhs_axis),
        roles=roles,
        recipe=recipe,
        out_dtype=gemm.check_out_dtype(out_dtype, call).name,
        executions=executions,
        key_impl=key_impl,
    )
    if isinstance(rhs, PreparedArray):
        return contract_prepared(lhs, rhs, contraction, key_data)
    lhs, rhs = _compat.equalize_varying_axes(lhs, rhs)
    return contract(lhs, rhs, contraction, key_data)


def check_sums(
    executions: PerGemm[config.Execution], recipe: Recipe, precision: Any, call: str
) -> None:
    """Raises if recipe or precision do not go with an accumulation model; warns of FP16 ones."""
    mx = recipe.power_of_two and all(
        recipe.tile(role)[1] == gemm.MX_BLOCK for role in recipes.ROLES
    )
    for execution in executions:
        gemm.check_mx_scales(execution, "mx" if mx else "tensor", f"{call}: recipe {recipe}")
    _check_precision(precision, executions.forward, recipe, call)
    if all(recipe.static_scale(role) is None for role in recipes.ROLES):
        warn_of_overflow(executions, call)


def plan_of(numbers: Any, lhs: Any, rhs: Any, call: str) -> dimension_numbers.Plan:
    return dimension_numbers.plan(numbers, tuple(lhs.shape), tuple(rhs.shape), call)


def real_dtypes(rhs: Any) -> tuple[Any, ...]:
    """What rhs contributes to the dtype of a product: that of real numbers, codes have none."""
    return () if isinstance(rhs, PreparedArray) else (rhs.dtype,)


def _operands(
    lhs: ArrayLike, rhs: ArrayLike | PreparedArray, call: str
) -> tuple[Array, Array | PreparedArray]:
    x = as_float_array(lhs, call, "lhs")
    refuse_explicit(x, call, "lhs")
    if isinstance(rhs, PreparedArray):
        check_prepared(rhs, call)
        return x, rhs
    w = as_float_array(rhs, call, "rhs")
    refuse_explicit(w, call, "rhs")
    return x, w


def check_k(lhs: Any, lhs_k: int, rhs: Any, rhs_k: int, call: str) -> None:
    if lhs.shape[lhs_k] != rhs.shape[rhs_k]:
        raise ValueError(
            f"{call}: lhs contracting dim {lhs_k} has size {lhs.shape[lhs_k]}, rhs contracting dim "
            f"{rhs_k} has size {rhs.shape[rhs_k]}; they must be equal"
        )


def _check_precision(
    precision: Any, execution: config.Execution, recipe: Recipe, call: str
) -> None:
    """Accepts what FP32 sums satisfy, and HIGHEST only where sums are FP32."""
    machine = MACHINES.get(execution.accumulation)
    short = machine is not None and machine.is_short and execution.promotion_interval == 0
    for entry in precision if isinstance(precision, tuple) else (precision,):
        name = entry.lower() if isinstance(entry, str) else getattr(entry, "name", "").lower()
        if entry is not None and not (
            isinstance(entry, jax.lax.Precision)
            or name in ("default", "highest", "high", "float32")
        ):
            raise ValueError(
                f"{call}: precision {precision!r} names an algorithm of its own; operands are FP8 "
                "and sums are FP32 here: leave it None, or use recipe= for formats"
            )
        promoted_by_tiles = any(recipe.tile(role)[1] != -1 for role in recipes.OPERAND_ROLES)
        if name in ("highest", "float32") and short and not promoted_by_tiles:
            raise ValueError(
                f"{call}: precision {precision!r} asks for FP32 sums, but those of "
                f"{execution.accumulation} are never promoted: give promotion_interval, or leave "
                "precision None"
            )


def check_out_sharding(out_sharding: Any, call: str) -> None:
    if out_sharding is not None:
        raise NotImplementedError(
            f"{call}: out_sharding is {out_sharding!r}; the partitioning rules do not exist yet: "
            "leave it None and call inside jax.shard_map"
        )
