"""C1: without its quantiser, is the derivative rule the derivative?

The rule is replayed with an identity quantiser in float64 (replay.py) and compared with numeric
derivatives, as `jax.test_util.check_grads` does: forward and reverse, to second order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt

from jax_fp8.testing.case import Case
from jax_fp8.testing.replay import identity

__all__ = ["derivatives", "identity_mode"]

Array = npt.NDArray[Any]
Function = Callable[..., Any]
Arrays = tuple[Any, ...]

#: Relative; float64 differences of a polynomial of second degree are exact but for rounding.
_IDENTITY_TOLERANCE: Final = 1e-6


def identity_mode(case: Case) -> dict[str, Any]:
    """C1. Derivatives of the replayed op against numeric ones, in float64."""
    worst, done, missing = (0.0, ""), [], []
    for name, fn, derivative, arguments in derivatives(case):
        try:
            gap = _gap(fn, derivative, arguments, case.rng(), reverse=name.endswith("reverse"))
        except (TypeError, NotImplementedError) as error:
            if name == "reverse":
                raise
            missing.append(f"{name} ({str(error).splitlines()[0][:60]})")
            continue
        done.append(name)
        worst = max(worst, (gap, name))
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


def derivatives(case: Case) -> Iterator[tuple[str, Function, Function, Arrays]]:
    """(name, function, its derivative, arguments) to second order; functions are the op's own.

    A name that ends in "reverse" goes with a vjp (primals…, cotangent) → cotangents, else it goes
    with a jvp (primals…, tangents…) → (result, tangent).
    """

    def jvp_of(fn: Function, count: int) -> Function:
        return lambda *args: jax.jvp(fn, args[:count], args[count:])

    def vjp_of(fn: Function, count: int) -> Function:
        return lambda *args: jax.vjp(fn, *args[:count])[1](args[count])

    x, w, g = case.x, case.w, case.g
    forward = jvp_of(case.call, 2)
    tangent = lambda x, w, u, v: forward(x, w, u, v)[1]
    reverse = vjp_of(case.call, 2)
    yield "forward", case.call, forward, (x, w)
    yield "reverse", case.call, reverse, (x, w)
    yield "forward over forward", tangent, jvp_of(tangent, 4), (x, w, x, w)
    yield "reverse over forward, reverse", tangent, vjp_of(tangent, 4), (x, w, x, w)
    yield "forward over reverse", reverse, jvp_of(reverse, 3), (x, w, g)
    yield "reverse over reverse", reverse, vjp_of(reverse, 3), (x, w, g)


def _gap(
    fn: Function, derivative: Function, examples: Arrays, rng: np.random.Generator, *, reverse: bool
) -> float:
    """Relative difference between a derivative and a central difference along a random line."""

    def normal(like: Any) -> Array:
        return rng.standard_normal(np.shape(like))

    outs = jax.eval_shape(fn, *examples)
    leaves = jax.tree.leaves(outs)
    cotangents = jax.tree.unflatten(jax.tree.structure(outs), leaves)
    replayed = identity(fn, *examples)
    exact = identity(derivative, *examples, *((cotangents,) if reverse else examples))
    points, line = [normal(x) for x in examples], [normal(x) for x in examples]
    with jax.enable_x64(True):
        ends = [
            jax.tree.leaves(replayed(*(p + step * d for p, d in zip(points, line, strict=True))))
            for step in (0.5, -0.5)
        ]
        numeric = [np.asarray(a) - np.asarray(b) for a, b in zip(*ends, strict=True)]
        if not reverse:
            got = jax.tree.leaves(exact(*points, *line)[1])
            difference = [np.asarray(a) - b for a, b in zip(got, numeric, strict=True)]
            size = sum(np.linalg.norm(b) for b in numeric)
            return float(sum(map(np.linalg.norm, difference)) / max(size, 1e-300))
        weights = [normal(y) for y in leaves]
        tree = jax.tree.unflatten(jax.tree.structure(outs), weights)
        got = jax.tree.leaves(exact(*points, tree))
    left = sum(float(np.vdot(a, b)) for a, b in zip(numeric, weights, strict=True))
    right = sum(float(np.vdot(a, b)) for a, b in zip(line, got, strict=True))
    sizes = sum(
        np.linalg.norm(a) * np.linalg.norm(b) for a, b in zip(numeric, weights, strict=True)
    )
    # An inner product of N random numbers is 1 / sqrt(N) of the product of their norms.
    count = max(sum(a.size for a in numeric), 1)
    return abs(left - right) / max(float(sizes) / np.sqrt(count), 1e-300)
