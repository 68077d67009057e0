"""explain: which kernel takes each GEMM of a call, and why the others refuse."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jax_fp8 import _ffi, config, gemm, lowering, recipes
from jax_fp8.accumulation import UNSET, PerGemm, Sums, Unset
from jax_fp8.contraction import cotangent_axis, in_memory_order, other_axis
from jax_fp8.dot import ROLES, plan_of, real_dtypes
from jax_fp8.emulation.machines import MACHINES
from jax_fp8.operands import NOT_LHS, check_float_dtype, check_prepared
from jax_fp8.prepared import PreparedArray
from jax_fp8.prepared_dot import check_plan
from jax_fp8.recipes import Recipe, Role

__all__ = ["Explanation", "GemmChoice", "explain"]

_OUT_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclasses.dataclass(frozen=True)
class GemmChoice:
    """One GEMM of a call.

    Attributes:
      name: "forward", "lhs gradient" or "rhs gradient".
      request: sizes, formats, tiles and memory order.
      kernel: name of the row that takes it; "reference" is the jnp reference, "none" an error.
      refusals: (row, reason) for each row that does not take it.
    """

    name: str
    request: str
    kernel: str
    refusals: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found; `str()` of it is a table."""

    platform: str
    gemms: tuple[GemmChoice, ...]

    def __str__(self) -> str:
        lines = [f"platform {self.platform}"]
        for choice in self.gemms:
            lines.append(f"{choice.name:13} {choice.request} -> {choice.kernel}")
            lines += [f"{'':13}   not {row}: {reason}" for row, reason in choice.refusals]
        return "\n".join(lines)


def explain(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any = None,
    *,
    recipe: Recipe | None = None,
    roles: tuple[str, str] = ROLES,
    preferred_element_type: npt.DTypeLike | None = None,
    platform: str | None = None,
    accumulation: str | PerGemm[str] | Unset = UNSET,
    promotion_interval: int | PerGemm[int | None] | Unset | None = UNSET,
    split_k: int | PerGemm[int] | Unset = UNSET,
) -> Explanation:
    """Says which kernel takes each of the three GEMMs of a `dot_general`, and why others refuse.

    Nothing is computed; the contexts `force_kernel`, `require_kernel` and `emulate` count.

    Args:
      lhs: array or `jax.ShapeDtypeStruct` (float32, bfloat16 or float16).
      rhs: the same, or prepared weights, for which there is no rhs gradient.
      dimension_numbers: as for `dot_general`; None is the last dim of lhs with the first of rhs,
        or, for a stack of prepared weights, with k, where lhs has the stack's leading dims too.
      recipe: as for `dot_general`.
      roles: as for `dot_general`.
      preferred_element_type: as for `dot_general`.
      platform: "cpu", "cuda" or "rocm"; None is JAX's default.
      accumulation: as for `dot_general`.
      promotion_interval: as for `dot_general`.
      split_k: as for `dot_general`.

    Returns:
      Explanation: print it.

    Raises:
      TypeError: a dtype that is not offered.
      ValueError: shapes or dimension_numbers that do not fit.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    >>> [choice.name for choice in explain(x, w).gemms]
    ['forward', 'lhs gradient', 'rhs gradient']
    """
    call = "explain"
    if isinstance(lhs, PreparedArray):
        raise TypeError(f"{call}: lhs is {NOT_LHS}")
    check_float_dtype(lhs.dtype, call, "lhs")
    prepared = rhs if isinstance(rhs, PreparedArray) else None
    if prepared is None:
        check_float_dtype(rhs.dtype, call, "rhs")
    else:
        check_prepared(prepared, call)
    if dimension_numbers is None:
        batch = () if prepared is None else tuple(range(prepared.ndim - 2))
        dimension_numbers = (((len(lhs.shape) - 1,), (len(batch),)), (batch, batch))
    plan = plan_of(dimension_numbers, lhs, rhs, call)
    if prepared is not None:
        check_plan(plan, call)
    recipe = recipes.check(recipe, call)
    roles_checked = recipes.check_roles(roles, call)
    if preferred_element_type is None:
        preferred_element_type = gemm.promote(lhs.dtype, *real_dtypes(rhs))
    out_dtype = gemm.check_out_dtype(preferred_element_type, call)
    platform = platform or jax.default_backend()

    m, n = (math.prod(side.sizes(side.free)) for side in (plan.lhs, plan.rhs))
    k = math.prod(plan.lhs.sizes(plan.lhs.contracting))
    sides = [
        _Operand.of(recipe, roles_checked[0], m, k, plan.lhs.axis),
        _Operand.of(recipe, roles_checked[1], n, k, plan.rhs.axis),
    ]
    if prepared is not None:
        sides[1] = _Operand(
            "weight", n, k, -2, prepared.format.name, prepared.tile[::-1], is_prepared=True
        )
    sums = Sums(accumulation, promotion_interval, split_k)
    executions = config.executions(sums, recipe.sums, call=call)
    choose = functools.partial(_choose, platform=platform)
    choices = [choose("forward", *sides, out_dtype=out_dtype, execution=executions.forward)]
    gradients = [(0, "lhs gradient", lhs.dtype)]
    if prepared is None:
        gradients.append((1, "rhs gradient", rhs.dtype))
    for s, name, dtype in gradients:
        # The cotangent is (m, n) in memory; the formulas are those of contraction.py.
        rows, contracted = (m, n) if s == 0 else (n, m)
        g = _Operand.of(recipe, "gradient", rows, contracted, cotangent_axis(s))
        pair = in_memory_order(g, sides[1 - s].turned(recipe), sides[s].axis)
        if prepared is None and recipe.weight_gradient == "bfloat16" and sides[s].role == "weight":
            sizes = f"m={pair[0].rows} n={pair[1].rows} k={pair[0].k}"
            choices.append(GemmChoice(name, f"{sizes} bf16·bf16->f32", "XLA's dot", ()))
        else:
            is_weight = sides[s].role == "weight"
            execution = executions.wgrad if is_weight else executions.dgrad
            choices.append(choose(name, *pair, out_dtype=np.dtype(dtype), execution=execution))
    return Explanation(platform, tuple(choices))


class _Operand(NamedTuple):
    role: Role
    rows: int
    k: int
    axis: int  # contracting axis in memory
    format: str
    tile: tuple[int, int]  # rows and k
    is_prepared: bool = False

    @classmethod
    def of(cls, recipe: Recipe, role: Role, rows: int, k: int, axis: int) -> _Operand:
        tile = recipes.resolve_tile(recipe.tile(role), (rows, k))
        return cls(role, rows, k, axis, recipe.format(role).name, tile)

    def turned(self, recipe: Recipe) -> _Operand:
        """The same array, contracted along its other axis; prepared weights as they are."""
        turned = self.of(recipe, self.role, self.k, self.rows, other_axis(self.axis))
        if self.is_prepared:
            return turned._replace(format=self.format, tile=self.tile[::-1])
        return turned


def _without_kernels(
    name: str, request: str, platform: str, execution: config.Execution
) -> GemmChoice:
    reason = f"there is no kernel for the platform {platform}; "
    if execution.operation == "emulate":
        kernel, what = "none", "emulation runs on CPUs only: this raises"
    elif execution.require_kernel:
        kernel, what = "none", "one is required: this raises"
    else:
        kernel, what = "reference", "the reference runs"
    return GemmChoice(name, request, kernel, (("any kernel", reason + what),))


def _describe(execution: config.Execution) -> str:
    if execution.operation == "gemm":
        return ""
    text = f" by {execution.accumulation}"
    if not MACHINES[execution.accumulation].ignores_interval:
        interval = execution.promotion_interval
        text += f", promoted every {interval}" if interval else ", never promoted"
    return text + (f", split_k {execution.split_k}" if execution.split_k > 1 else "")


def _choose(
    name: str,
    lhs: _Operand,
    rhs: _Operand,
    *,
    platform: str,
    out_dtype: np.dtype[Any],
    execution: config.Execution,
) -> GemmChoice:
    lhs_layout = gemm.lhs_layout(lhs.axis)
    rhs_layout = gemm.rhs_layout(rhs.axis, in_panels=rhs.is_prepared)
    out = _OUT_NAMES[out_dtype.name]
    request = (
        f"m={lhs.rows} n={rhs.rows} k={lhs.k} "
        f"{lhs.format}[{lhs.tile[0]}x{lhs.tile[1]},{lhs_layout}]·"
        f"{rhs.format}[{rhs.tile[0]}x{rhs.tile[1]},{rhs_layout}]->{out}{_describe(execution)}"
    )
    if platform not in lowering.PLATFORMS:
        return _without_kernels(name, request, platform, execution)
    forced = lowering.row_name(execution.operation, execution)
    rows = _ffi.explain_gemm(
        lhs.rows,
        rhs.rows,
        lhs.k,
        lhs.format,
        rhs.format,
        out,
        lhs_layout,
        rhs_layout,
        lhs.tile,
        rhs.tile,
        execution.accumulation,
        execution.promotion_interval,
        execution.split_k,
        forced,
        not execution.deterministic,
    )
    refusals, kernel = [], "none"
    for row, why_not in rows:
        if why_not:
            refusals.append((row, why_not))
        elif forced not in ("", row):
            refusals.append((row, f"kernel {forced!r} is forced"))
        elif kernel == "none":
            kernel = row
        else:
            refusals.append((row, f"{kernel} comes first"))
    return GemmChoice(name, request, kernel, tuple(refusals))
