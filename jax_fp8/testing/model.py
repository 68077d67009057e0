"""check_gradients: the gradient checks on every FP8 GEMM of a whole function, such as a loss.

Each FP8 GEMM in the jaxpr of the function's tangent, also inside jit, scan, remat and cond, is
checked by itself, on the very values that the function gives it, or where those are not seen on
random ones of its shape and dtypes. One number is about the whole: the cosine between the gradient
and that of the same function in float64 without quantisers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8._compat import enable_x64
from jax_fp8.autodiff import contract
from jax_fp8.contraction import Contraction
from jax_fp8.linear import sides_of, tangent_p
from jax_fp8.recipes import Recipe
from jax_fp8.testing.captured import Values, values_of
from jax_fp8.testing.case import Op
from jax_fp8.testing.products import Intent
from jax_fp8.testing.replay import identity
from jax_fp8.testing.report import CheckResult, VjpReport
from jax_fp8.testing.vjp import case_of, check_ids, report_of

__all__ = ["Gemm", "ModelReport", "check_gradients", "gemms_of"]


@dataclasses.dataclass(frozen=True)
class Gemm:
    """An FP8 GEMM inside a function.

    Attributes:
      name: names of modules and transformations around it.
      contraction: its static facts.
      lhs: shape and dtype of the canonical lhs, as it lies in memory.
      rhs: the same of rhs.
    """

    name: str
    contraction: Contraction
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct

    @property
    def signature(self) -> Any:
        """What makes two GEMMs the same computation."""
        sides = [(x.shape, np.dtype(x.dtype).name) for x in (self.lhs, self.rhs)]
        return (self.contraction, *sides)


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """Reports by GEMM, and the cosine of the whole gradient.

    Attributes:
      gemms: each kind of GEMM with its report.
      whole: C8.
      data: for each of `gemms` what it was checked on: "its own values" or "random values".
    """

    gemms: tuple[tuple[Gemm, VjpReport], ...]
    whole: CheckResult
    data: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no GEMM failed a check."""
        return all(report.passed for _, report in self.gemms)

    def __str__(self) -> str:
        parts = [
            f"{gemm.name}: {list(gemm.lhs.shape)} · {list(gemm.rhs.shape)}, {data}\n{report}"
            for (gemm, report), data in zip(self.gemms, self.data, strict=True)
        ]
        return "\n".join([*parts, str(self.whole)])


def check_gradients(
    fn: Callable[..., Any],
    *args: Any,
    recipe: Recipe | None = None,
    checks: str | Sequence[str] = "C2,C3,C4,C5",
    seed: int = 0,
) -> ModelReport:
    """Checks every FP8 GEMM of a scalar function with respect to its first argument.

    Args:
      fn: function of pytrees that returns a scalar, such as the loss of a Flax module.
      args: its arguments; the gradient is that of the first.
      recipe: what every GEMM is meant to follow; None believes what each says of itself.
      checks: ids of the checks, see `check_vjp`.
      seed: of the random data.

    Returns:
      A report per kind of GEMM, and the cosine (C8) of the whole gradient.

    Raises:
      AssertionError: a check of some GEMM failed, with its text.
      ValueError: the function runs no FP8 GEMM that is differentiated.

    >>> import jax_fp8 as fp8
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.sin(fp8.matmul(jnp.tanh(fp8.matmul(x, w)), w)))
    >>> report = check_gradients(loss, jnp.ones((4, 4)), jnp.ones((3, 4)), checks="C4")
    >>> len(report.gemms), report.passed  # both have the same shapes: one kind of GEMM
    (1, True)
    """
    ids = check_ids(checks)
    found = {gemm.signature: gemm for gemm in reversed(gemms_of(fn, *args))}
    if not found:
        raise ValueError("check_gradients: nothing that is differentiated is an FP8 GEMM")
    values = values_of(fn, *args)
    kinds = list(reversed(found.values()))
    own = [_own_values(gemm, values) for gemm in kinds]
    gemms = tuple(
        (gemm, _report(gemm, arrays, recipe, ids, seed))
        for gemm, arrays in zip(kinds, own, strict=True)
    )
    data = tuple("random values" if arrays is None else "its own values" for arrays in own)
    report = ModelReport(gemms, _cosine(fn, *args), data)
    if not report.passed:
        texts = [
            f"{gemm.name}: {failure}" for gemm, own in gemms for failure in own.failures
        ]  # fmt: skip
        raise AssertionError("check_gradients: " + "\n".join([*texts, str(report)]))
    return report


def gemms_of(fn: Callable[..., Any], *args: Any) -> list[Gemm]:
    """The FP8 GEMMs that the gradient of fn with respect to its first argument goes through."""

    def tangent(first: Any, *rest: Any) -> Any:
        return jax.jvp(lambda x: fn(x, *rest), (first,), (first,))

    return list(_gemms(jax.make_jaxpr(tangent)(*args).jaxpr, ""))


def _gemms(jaxpr: Any, prefix: str) -> Iterator[Gemm]:
    for eqn in jaxpr.eqns:
        name = "/".join(part for part in (prefix, str(eqn.source_info.name_stack)) if part)
        if eqn.primitive is tangent_p:
            yield _gemm(eqn, name)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _gemms(inner, "/".join(p for p in (name, eqn.primitive.name) if p))


def _gemm(eqn: Any, name: str) -> Gemm:
    contraction, wrt = eqn.params["contraction"], eqn.params["wrt"]
    avals = [var.aval for var in eqn.invars]
    moving = {side: avals[i] for i, side in enumerate(sides_of(wrt))}
    operands = dict(moving)
    rest = avals[len(moving) :]
    for side in reversed(sides_of(wrt)):  # residuals come last: copies, then the exact operand
        operands[1 - side] = rest.pop()
        if contraction.uses_copy(side):
            del rest[-2:]
    lhs, rhs = (jax.ShapeDtypeStruct(operands[s].shape, operands[s].dtype) for s in (0, 1))
    return Gemm(name or "gemm", contraction, lhs, rhs)


def _own_values(gemm: Gemm, values: Sequence[Values]) -> tuple[Any, Any, Any] | None:
    """The values of the first run of this kind of GEMM, if they were seen."""
    laid_out = (own.laid_out(gemm.contraction, gemm.lhs, gemm.rhs) for own in values)
    return next((arrays for arrays in laid_out if arrays is not None), None)


def _report(
    gemm: Gemm, own: tuple[Any, Any, Any] | None, recipe: Recipe | None, ids: Sequence[str],
    seed: int,
) -> VjpReport:  # fmt: skip
    rng, c = np.random.default_rng(seed), gemm.contraction
    k = max(gemm.lhs.shape[c.axes[0]], 1)
    x = rng.standard_normal(gemm.lhs.shape).astype(gemm.lhs.dtype)
    w = (rng.standard_normal(gemm.rhs.shape) / math.sqrt(k)).astype(gemm.rhs.dtype)
    x, w, g = own or (x, w, None)
    key = jax.random.key(seed, impl=c.key_impl) if c.key_impl else None
    intent = Intent(recipe or c.recipe, c.roles, c.executions, key)
    return report_of(case_of(_op_of(c), x, w, intent, g=g, seed=seed), ids)


def _op_of(c: Contraction) -> Op:
    if not c.key_impl:
        return lambda x, w: contract(x, w, c)
    return lambda x, w, key: contract(x, w, c, jax.random.key_data(key))


def _cosine(fn: Callable[..., Any], *args: Any) -> CheckResult:
    """C8 of the whole gradient, against float64 without quantisers."""
    fields: dict[str, Any] = {
        "id": "C8",
        "name": "cosine of the whole gradient",
        "formula": "<∇, ∇64> / (‖∇‖ ‖∇64‖)",
    }
    gradient = jax.grad(fn)
    try:
        exact = identity(gradient, *args)
        with enable_x64():
            expected = _flat(exact(*args))
    except (NotImplementedError, TypeError) as error:
        return CheckResult(**fields, not_applicable=str(error).splitlines()[0])
    got = _flat(gradient(*args))
    norms = float(np.linalg.norm(got) * np.linalg.norm(expected))
    value = float(np.vdot(got, expected)) / norms if norms else math.nan
    ratio = float(np.linalg.norm(got) / np.linalg.norm(expected)) if norms else math.nan
    return CheckResult(**fields, value=value, detail=f"‖∇‖ / ‖∇64‖ = {ratio:.4f}")


def _flat(tree: Any) -> Any:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in leaves])
