"""C1 and C2: is the derivative rule the derivative? Both call the op on arguments of their own.

C1 takes the quantiser away and leaves the rule; C2 leaves the quantiser and takes operands that it
does not round. Neither needs a tolerance for FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8.emulation.machines import MACHINES
from jax_fp8.recipes import Role
from jax_fp8.testing.case import Case
from jax_fp8.testing.causes import likely_cause
from jax_fp8.testing.lattice import lattice
from jax_fp8.testing.products import TENSORS, Product, products_of
from jax_fp8.testing.replay import identity

__all__ = ["derivatives", "identity_mode", "lattice_differences"]

Array = npt.NDArray[Any]
Function = Callable[..., Any]
Arrays = tuple[Any, ...]

#: Relative; float64 differences of a polynomial of second degree are exact but for rounding.
_IDENTITY_TOLERANCE: Final = 1e-6
_DRAWS: Final = 3
#: Powers of two that lattice operands are multiplied by.
_LARGEST_EXPONENT: Final = 20


# --- C1: identity mode ----------------------------------------------------------------------------


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
    failed = not value <= _IDENTITY_TOLERANCE
    return {
        "value": value,
        "limit": (0.0, _IDENTITY_TOLERANCE),
        "detail": detail,
        "cause": "dims, layout, batch or a scale is wrong: without rounding, the rule is not the "
        "derivative" if failed else "",
    }  # fmt: skip


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
    normal = lambda like: rng.standard_normal(np.shape(like))
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
    sizes = sum(np.linalg.norm(a) * np.linalg.norm(b) for a, b in zip(numeric, weights, strict=True))
    # An inner product of N random numbers is 1 / sqrt(N) of the product of their norms.
    count = max(sum(a.size for a in numeric), 1)
    return abs(left - right) / max(float(sizes) / np.sqrt(count), 1e-300)


# --- C2: lattice ----------------------------------------------------------------------------------


def lattice_differences(case: Case) -> dict[str, Any]:
    """C2. Directional differences of exact operands that are not equal to the derivative."""
    reason = _why_not_exact(case)
    if reason:
        return {"not_applicable": reason}
    rng, mismatches, tests = case.rng(), [], 0
    for draw in range(_DRAWS):
        spread = min(draw, 1)  # the first draw has one power of two for each operand
        points = _exact_points(case, rng, spread) or _exact_points(case, rng, 0)
        if points is None:
            return {
                "not_applicable": "sums of integers up to 7 do not fit the accumulator at this k"
            }
        for side, (left, right, product, got) in enumerate(_differences(case, points)):
            tests += 1
            if left != right:
                mismatches.append((TENSORS[side + 1], draw, left, right, product, got))
    out: dict[str, Any] = {
        "value": float(len(mismatches)),
        "limit": (0.0, 0.0),
        "detail": f"{tests} directional differences, scales 2^-20 to 2^20",
    }
    if mismatches:
        tensor, draw, left, right, product, got = mismatches[0]
        out["tensor"] = tensor
        out["detail"] += f"; in draw {draw} the difference is {left!r}, the derivative {right!r}"
        out["cause"] = likely_cause(product, got)
    return out


def _why_not_exact(case: Case) -> str:
    dtypes = {np.dtype(x.dtype) for x in (case.x, case.w, case.g)}
    if dtypes != {np.dtype(np.float32)}:
        narrow = ", ".join(sorted(dtype.name for dtype in dtypes - {np.dtype(np.float32)}))
        return f"{narrow} arrays round the result or a gradient"
    for role in ("input", "weight", "gradient"):
        scale = case.intent.recipe.static_scale(role)  # type: ignore[arg-type]
        if scale is not None and np.frexp(scale)[0] != 0.5:
            return f"the {role} scale {scale} is not a power of two, so no operand is exact"
    return ""


def _exact_points(
    case: Case, rng: np.random.Generator, spread: int
) -> tuple[tuple[Array, Array], tuple[Array, Array], Array] | None:
    """Two values of lhs, two of rhs, one of g (canonical), or None where sums would be rounded."""
    intent, shapes = case.intent, [index.shape for index in case.form.indices]
    roles: tuple[Role, ...] = (*intent.roles, "gradient")
    exponents = rng.integers(-_LARGEST_EXPONENT, _LARGEST_EXPONENT + 1, 3)
    for bound in (7, 3, 1):
        drawn = []
        for shape, role, exponent in zip(shapes, roles, exponents, strict=True):
            static = intent.recipe.static_scale(role)
            # A scale known beforehand holds few powers of two.
            power = 2.0 ** (exponent % 6 - 3) * static if static else 2.0**exponent
            make = lambda: lattice(
                rng, shape, intent.recipe, role, bound=bound, spread=spread  # noqa: B023
            )
            drawn.append([(make(), make()), np.float32(power)])
        pairs = [pair for pair, _ in drawn]
        lhs, rhs, g = (pair[0] for pair in pairs)
        products = products_of(intent, lhs, rhs, g)
        largest = [np.maximum(np.abs(a), np.abs(b)) for a, b in pairs]
        sizes = products_of(intent, *largest)
        if all(
            s.multiply(s.a.exact, s.b.exact).max(initial=0) < _exact_limit(p)
            for s, p in zip(sizes, products, strict=True)
        ):
            scaled = [(a * power, b * power) for (a, b), power in drawn]
            return scaled[0], scaled[1], scaled[2][0]
    return None


def _exact_limit(product: Product) -> float:
    """Integers below it, and sums of products below it, are exact in the accumulator."""
    machine = MACHINES.get(product.execution.accumulation)
    if machine is None or not product.fp8:
        return 2.0**24
    bits = 24 if not machine.is_short else {"rz_e8m13": 13, "rne_fp16": 11, "rne_bf16": 8}[
        machine.rounding
    ]
    return 2.0 ** min(bits, machine.fraction_bits or bits)


def _differences(case: Case, points: Any) -> Iterator[tuple[float, float, Product, Array]]:
    (a0, a1), (b0, b1), g = points
    original = case.form.original
    x0, x1, w0, w1 = original(0, a0), original(0, a1), original(1, b0), original(1, b1)
    ct = original(2, g)
    y, dx, dw = (np.asarray(out) for out in case.vjp(x0, w0, ct))
    products = products_of(case.intent, a0, b0, g)
    wide = lambda x: np.asarray(x).astype(np.float64)
    for side, (moved, u, gradient) in enumerate((((x1, w0), x1 - x0, dx), ((x0, w1), w1 - w0, dw))):
        change = wide(case.call(*map(jnp.asarray, moved))) - wide(y)
        left, right = float(np.sum(change * wide(ct))), float(np.sum(wide(gradient) * wide(u)))
        yield left, right, products[side + 1], case.form.canonical(side, gradient)
