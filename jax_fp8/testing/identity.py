"""C1: without its quantiser, is the derivative rule the derivative?

The rule is replayed with an identity quantiser in float64 (replay.py) and compared with numeric
derivatives, as `jax.test_util.check_grads` does: forward and reverse, to second order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jax_fp8._compat import enable_x64
from jax_fp8.testing.case import Case
from jax_fp8.testing.replay import identity

__all__ = ["Derivative", "derivatives", "identity_mode"]

Array = npt.NDArray[Any]
Function = Callable[..., Any]

#: Relative; float64 differences of a polynomial of second degree are exact but for rounding.
_IDENTITY_TOLERANCE: Final = 1e-6


def identity_mode(case: Case) -> dict[str, Any]:
    """C1. Derivatives of the replayed op against numeric ones, in float64."""
    worst, done, missing = (0.0, ""), [], []
    for derivative in derivatives(case):
        try:
            gap = _gap(derivative, case.rng(), _size(case))
        except (TypeError, NotImplementedError) as error:
            if derivative.name == "reverse":
                raise
            missing.append(f"{derivative.name} ({str(error).splitlines()[0][:60]})")
            continue
        done.append(derivative.name)
        worst = max(worst, (gap, derivative.name))
    value, name = worst
    detail = f"worst in {name or 'none'}; checked {', '.join(done)}"
    if missing:
        detail += f"; the op has no {', no '.join(missing)}"
    return {
        "value": value,
        "limit": (0.0, _IDENTITY_TOLERANCE),
        "detail": detail,
        "explain": lambda: (
            "dims, layout, batch, sign or a scale: without rounding, the rule is not the derivative"
        ),
    }


def _size(case: Case) -> float:
    """Size of random arguments: such that none saturates where that would mask its gradient."""
    recipe = case.intent.recipe
    if recipe.ste == "pass":
        return 1.0
    scales = [(recipe.static_scale(role), recipe.format(role).max) for role in case.intent.roles]
    return min([1.0, *(scale * largest / 16 for scale, largest in scales if scale is not None)])


class Derivative(NamedTuple):
    """A function of the op's, and its derivative by the op's own rule.

    Attributes:
      name: such as "forward over reverse".
      function: of the arguments.
      derivative: (arguments…, tangents…) → (result, tangent), or if `reverse`, (arguments…,
        cotangent) → cotangents of the arguments.
      arguments: examples of them.
      reverse: which of the two.
    """

    name: str
    function: Function
    derivative: Function
    arguments: tuple[Any, ...]
    reverse: bool


def derivatives(case: Case) -> Iterator[Derivative]:
    """All derivatives to second order."""
    x, w, g = case.x, case.w, case.g
    forward, reverse = _jvp_of(case.call, 2), _vjp_of(case.call, 2)

    def tangent(x: Any, w: Any, u: Any, v: Any) -> Any:
        return forward(x, w, u, v)[1]

    yield Derivative("forward", case.call, forward, (x, w), False)
    yield Derivative("reverse", case.call, reverse, (x, w), True)
    four, three = (x, w, x, w), (x, w, g)
    yield Derivative("forward over forward", tangent, _jvp_of(tangent, 4), four, False)
    yield Derivative("reverse over forward", tangent, _vjp_of(tangent, 4), four, True)
    yield Derivative("forward over reverse", reverse, _jvp_of(reverse, 3), three, False)
    yield Derivative("reverse over reverse", reverse, _vjp_of(reverse, 3), three, True)


def _jvp_of(fn: Function, count: int) -> Function:
    return lambda *args: jax.jvp(fn, args[:count], args[count:])


def _vjp_of(fn: Function, count: int) -> Function:
    return lambda *args: jax.vjp(fn, *args[:count])[1](args[count])


def _gap(derivative: Derivative, rng: np.random.Generator, size: float) -> float:
    """Relative difference between a derivative and a central difference along a random line."""
    _, fn, rule, examples, reverse = derivative
    out = jax.eval_shape(fn, *examples)
    leaves, structure = jax.tree.flatten(out)
    replayed = identity(fn, *examples)
    exact = identity(rule, *examples, *((out,) if reverse else examples))

    def normal(like: Any) -> Array:
        return size * rng.standard_normal(np.shape(like))

    points, line = [normal(x) for x in examples], [normal(x) for x in examples]
    with enable_x64():
        ends = [
            jax.tree.leaves(replayed(*(p + step * d for p, d in zip(points, line, strict=True))))
            for step in (0.5, -0.5)
        ]
        numeric = [np.asarray(a) - np.asarray(b) for a, b in zip(*ends, strict=True)]
        if not reverse:
            got = jax.tree.leaves(exact(*points, *line)[1])
            difference = [np.asarray(a) - b for a, b in zip(got, numeric, strict=True)]
            norms = sum(float(np.linalg.norm(b)) for b in numeric)
            return float(sum(map(np.linalg.norm, difference))) / max(norms, 1e-300)
        weights = [normal(y) for y in leaves]
        got = jax.tree.leaves(exact(*points, jax.tree.unflatten(structure, weights)))
    left = sum(float(np.vdot(a, b)) for a, b in zip(numeric, weights, strict=True))
    right = sum(float(np.vdot(a, b)) for a, b in zip(line, got, strict=True))
    norms = sum(
        float(np.linalg.norm(a) * np.linalg.norm(b)) for a, b in zip(numeric, weights, strict=True)
    )
    # An inner product of N random numbers is 1 / sqrt(N) of the product of their norms.
    count = max(sum(a.size for a in numeric), 1)
    return abs(left - right) / max(norms / math.sqrt(count), 1e-300)
