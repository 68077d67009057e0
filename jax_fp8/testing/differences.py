"""C2: finite differences of an FP8 GEMM that are exactly its derivative.

On a lattice (lattice.py) nothing is rounded and the op is bilinear, so
<f(a + u, b) - f(a, b), g> = <u, da> to the last bit, for a step of any size. Blind to a missing
quantiser and to formats, which lattice operands do not feel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8.emulation.machines import MACHINES
from jax_fp8.recipes import ROLES, Role
from jax_fp8.testing.case import Case
from jax_fp8.testing.causes import likely_cause
from jax_fp8.testing.lattice import LARGEST, lattice
from jax_fp8.testing.products import TENSORS, Product, products_of

__all__ = ["lattice_differences"]

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]

_DRAWS: Final = 3
#: Powers of two that operands are multiplied by.
_LARGEST_EXPONENT: Final = 20
#: Significant bits of a short accumulator.
_BITS: Final = {"rz_e8m13": 13, "rne_fp16": 11, "rne_bf16": 8}


def lattice_differences(case: Case) -> dict[str, Any]:
    """C2. Directional differences of exact operands that are not equal to the derivative."""
    reason = _why_not_exact(case)
    if reason:
        return {"not_applicable": reason}
    mismatches, tests = [], 0
    for draw in range(_DRAWS):
        points = case.shared(("lattice", draw), functools.partial(_exact_points, case, draw))
        if points is None:
            return {"not_applicable": "sums of small integers do not fit the accumulator at this k"}
        for side, (left, right, product, got) in enumerate(_differences(case, *points)):
            tests += 1
            if left != right:
                mismatches.append((TENSORS[side + 1], draw, left, right, product, got))
        if mismatches:
            break
    out: dict[str, Any] = {
        "value": float(len(mismatches)),
        "limit": (0.0, 0.0),
        "detail": f"{tests} directional differences, operands times 2^-20 to 2^20",
    }
    if mismatches:
        tensor, draw, left, right, product, got = mismatches[0]
        out["tensor"] = tensor
        out["detail"] += f"; in draw {draw} the difference is {left!r}, the derivative {right!r}"
        out["explain"] = functools.partial(likely_cause, product, got)
    return out


def _why_not_exact(case: Case) -> str:
    narrow = {x.dtype.name for x in (case.x, case.w, case.g)} - {"float32"}
    if narrow:
        return f"{', '.join(sorted(narrow))} arrays round the result or a gradient"
    for role in ROLES:
        scale = case.intent.recipe.static_scale(role)
        if scale is not None and np.frexp(scale)[0] != 0.5:
            return f"the {role} scale {scale} is not a power of two, so no operand is exact"
    for execution in case.intent.executions:
        machine = MACHINES.get(execution.accumulation)
        if machine is not None and machine.is_fp16:
            return f"{machine.name} overflows where scales are amax / max"
    return ""


def _exact_points(case: Case, draw: int) -> tuple[Pair, Pair, Array] | None:
    """Two values of lhs, two of rhs, one of g (canonical), or None where sums would be rounded."""
    rng = np.random.default_rng((case.seed, draw))
    for spread in (min(draw, 1), 0):  # the first draw has one power of two for each operand
        for bound in (LARGEST, 3, 1):
            pairs = _lattice_pairs(case, rng, bound, spread)
            largest = [np.maximum(np.abs(a), np.abs(b)) for a, b in pairs]
            sizes = products_of(case.intent, *largest)
            if all(p.multiply(p.a.exact, p.b.exact).max() < _exact_limit(p) for p in sizes):
                (lhs, rhs, (g, _)) = (
                    (a * power, b * power)
                    for (a, b), power in zip(pairs, _powers(case, rng), strict=True)
                )
                return lhs, rhs, g
    return None


def _roles(case: Case) -> tuple[Role, Role, Role]:
    return (*case.intent.roles, "gradient")


def _lattice_pairs(case: Case, rng: np.random.Generator, bound: int, spread: int) -> list[Pair]:
    """Two lattice matrices for each of lhs, rhs and g."""
    pairs = []
    for index, role in zip(case.form.indices, _roles(case), strict=True):
        a, b = (
            lattice(rng, index.shape, case.intent.recipe, role, bound=bound, spread=spread)
            for _ in range(2)
        )
        pairs.append((a, b))
    return pairs


def _powers(case: Case, rng: np.random.Generator) -> Iterator[np.float32]:
    """A power of two for each of lhs, rhs and g; few where the scale is known beforehand."""
    for role in _roles(case):
        exponent = int(rng.integers(-_LARGEST_EXPONENT, _LARGEST_EXPONENT + 1))
        static = case.intent.recipe.static_scale(role)
        yield np.float32(2.0**exponent if static is None else 2.0 ** (exponent % 6 - 3) * static)


def _exact_limit(product: Product) -> float:
    """Sums of products below it are exact in the accumulator."""
    machine = MACHINES.get(product.execution.accumulation)
    if machine is None or not product.fp8:
        return 2.0**24
    bits = _BITS[machine.rounding] if machine.is_short else 24
    return float(2.0 ** min(bits, machine.fraction_bits or bits))


def _differences(
    case: Case, lhs: Pair, rhs: Pair, g: Array
) -> Iterator[tuple[float, float, Product, Array]]:
    """<f(a + u, b) - f(a, b), g> and <u, da>, then the same for b."""
    original = case.form.original
    (x0, x1), (w0, w1) = (tuple(original(i, a) for a in pair) for i, pair in enumerate((lhs, rhs)))
    ct = original(2, g)
    y, dx, dw = (np.asarray(out) for out in case.vjp(x0, w0, ct))
    products = products_of(case.intent, lhs[0], rhs[0], g)
    for side, (x, w, u, gradient) in enumerate(((x1, w0, x1 - x0, dx), (x0, w1, w1 - w0, dw))):
        moved = np.asarray(case.call(jnp.asarray(x), jnp.asarray(w)))
        change = moved.astype(np.float64) - y
        left = float(np.sum(change * ct))
        right = float(np.sum(gradient.astype(np.float64) * u))
        yield left, right, products[side + 1], case.form.canonical(side, gradient)
