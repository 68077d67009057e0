"""check_vjp: nine independent checks of the result and the gradients of an FP8 product.

Gradients of FP8 operations cannot be compared with finite differences, since the quantiser is
piecewise constant, and tolerances wide enough for its rounding let zeros, flipped signs and missing
scales pass. These checks have no such tolerances: where bits are determined they compare bits, and
where an error is meant to be it must be there, neither more nor less.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8 import config, recipes
from jax_fp8.accumulation import UNSET, PerGemm, Sums, Unset
from jax_fp8.contraction import Contraction
from jax_fp8.dot import matmul
from jax_fp8.linear import tangent_p
from jax_fp8.recipes import Recipe
from jax_fp8.testing.case import Case, Op
from jax_fp8.testing.checks import CHECKS, run
from jax_fp8.testing.form import form_of
from jax_fp8.testing.products import Intent, products_of
from jax_fp8.testing.report import VjpReport

__all__ = ["case_of", "check_ids", "check_vjp", "intent_of", "matmul_of", "report_of"]

ArrayLike = jax.typing.ArrayLike

#: Size of the cotangent that is drawn where none is given, as in the middle of a training run.
_GRADIENT_SIZE = 1e-4


def check_vjp(
    op: Op | None,
    args: tuple[ArrayLike, ArrayLike],
    *,
    recipe: Recipe | None = None,
    g: ArrayLike | None = None,
    checks: str | Sequence[str] = "all",
    seed: int = 0,
    roles: tuple[str, str] | None = None,
    key: jax.Array | None = None,
    accumulation: str | PerGemm[str] | Unset = UNSET,
    promotion_interval: int | PerGemm[int | None] | Unset | None = UNSET,
    split_k: int | PerGemm[int] | Unset = UNSET,
) -> VjpReport:
    """Checks the result and both gradients of an op with one FP8 GEMM.

    Args:
      op: function of two arrays that goes through `matmul`, `dot_general` or `einsum`, in any
        layout and with any batch dims; with a third argument, the key, if `key` is given. None, and
        `matmul` itself, is `matmul` with the recipe and options given here.
      args: the two arrays. Rounding errors are judged on these values, and the checks see most on
        256³ and larger with data of mean zero.
      recipe: what the op is meant to follow; None reads recipe, roles and accumulation from the op.
      g: cotangent of the result; None draws a normal one of 1e-4.
      checks: ids such as "C2,C4" or ("C2", "C4"), or "all".
      seed: of random directions and cotangents.
      roles: meant for the operands; None is ("input", "weight").
      key: `jax.random.key` for a recipe that rounds stochastically.
      accumulation: meant for the GEMMs, as in `dot_general`; contexts and recipe follow.
      promotion_interval: the same.
      split_k: the same.

    Returns:
      A report with a result per check.

    Raises:
      AssertionError: a check failed. The text says which, what was measured against which limit,
        the worst element with its operands and codes, and the likely cause.
      ValueError: an op that has not one FP8 GEMM, or a check that does not exist.

    >>> import jax_fp8 as fp8
    >>> x, w = np.float32([[1, 0.3, -2]]), np.float32([[0.5, 1], [2, -1], [0.1, 0.7]])
    >>> report = check_vjp(fp8.matmul, (x, w), recipe=fp8.RowScaling(), checks="C2,C4,C5")
    >>> [(result.id, result.verdict) for result in report]
    [('C2', 'passed'), ('C4', 'passed'), ('C5', 'passed')]
    """
    ids = check_ids(checks)
    x, w = (np.asarray(a) for a in args)
    sums = Sums(accumulation, promotion_interval, split_k)
    if op is None or op is matmul:
        recipe = recipes.check(recipe, "check_vjp")
        op = matmul_of(recipe, roles, sums, key)
    intent = intent_of(recipe, op, x, w, roles=roles, key=key, sums=sums)
    report = report_of(case_of(op, x, w, intent, g=g, seed=seed), ids)
    if report.failures:
        failures = "\n".join(map(str, report.failures))
        raise AssertionError(f"check_vjp: {len(report.failures)} failed\n{failures}\n{report}")
    return report


def report_of(case: Case, ids: Sequence[str] = tuple(CHECKS)) -> VjpReport:
    """Runs checks of a case; failures are in the report."""
    return VjpReport(tuple(run(id, case) for id in ids))


def case_of(
    op: Op, x: npt.ArrayLike, w: npt.ArrayLike, intent: Intent, *, g: Any = None, seed: int = 0
) -> Case:
    """An op with arguments and the products that it must give."""
    x, w = np.asarray(x), np.asarray(w)
    call = functools.partial(_call, op, intent.key)
    form = form_of(call, x, w)
    out = jax.eval_shape(call, x, w)
    if g is None:
        drawn = np.random.default_rng(seed).standard_normal(out.shape) * _GRADIENT_SIZE
        g = drawn.astype(out.dtype)
    g = np.asarray(g)
    if g.shape != out.shape:
        raise ValueError(f"check_vjp: g has shape {g.shape}; the op gives {out.shape}")
    g = g.astype(out.dtype)
    if 0 in (x.size, w.size, g.size):
        raise ValueError(f"check_vjp: operands {x.shape} and {w.shape} leave nothing to check")
    products = products_of(intent, *(form.canonical(i, y) for i, y in enumerate((x, w, g))))
    return Case(op, x, w, g, intent, form, products, seed)


def intent_of(
    recipe: Recipe | None,
    op: Op,
    x: Any,
    w: Any,
    *,
    roles: tuple[str, str] | None = None,
    key: jax.Array | None = None,
    sums: Sums | None = None,
) -> Intent:
    """What an op is meant to do: by the arguments, or without a recipe what the op itself says."""
    if recipe is None:
        contraction = _contraction_in(functools.partial(_call, op, key), x, w)
        if contraction is not None:
            c = contraction
            return Intent(c.recipe, c.roles, c.executions, key if c.key_impl else None)
    recipe = recipes.check(recipe, "check_vjp")
    checked = recipes.check_roles(roles or ("input", "weight"), "check_vjp")
    return Intent(recipe, checked, config.executions(sums, recipe.sums, call="check_vjp"), key)


def _call(op: Op, key: jax.Array | None, x: Any, w: Any) -> Any:
    return op(x, w) if key is None else op(x, w, key)


def matmul_of(
    recipe: Recipe,
    roles: tuple[str, str] | None = None,
    sums: Sums | None = None,
    key: jax.Array | None = None,
) -> Op:
    """`matmul` with a recipe; with a third argument, the key, if there is one."""
    sums = sums or Sums()
    options: dict[str, Any] = {
        "recipe": recipe,
        "roles": roles or ("input", "weight"),
        "accumulation": sums.accumulation,
        "promotion_interval": sums.promotion_interval,
        "split_k": sums.split_k,
    }
    if key is None:
        return functools.partial(matmul, **options)
    return lambda x, w, key: matmul(x, w, key=key, **options)


def _contraction_in(op: Op, x: Any, w: Any) -> Contraction | None:
    """The static facts of the op's GEMM, from the jaxpr of its tangent."""
    try:
        jaxpr = jax.make_jaxpr(lambda x, w: jax.jvp(op, (x, w), (x, w)))(jnp.asarray(x), w)
    except TypeError:  # a custom_vjp has no tangent
        return None
    return next(_contractions(jaxpr.jaxpr), None)


def _contractions(jaxpr: Any) -> Iterator[Contraction]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is tangent_p:
            yield eqn.params["contraction"]
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _contractions(inner)


def check_ids(checks: str | Sequence[str]) -> list[str]:
    """Ids of the checks that "C2,C4", ("C2", "C4") or "all" name; ValueError for others."""
    if checks == "all":
        return list(CHECKS)
    names = checks.split(",") if isinstance(checks, str) else checks
    ids = [name.strip().upper() for name in names]
    for name in ids:
        if name not in CHECKS:
            raise ValueError(
                f"check_vjp: there is no check {name!r}; there are {', '.join(CHECKS)}"
            )
    return ids
