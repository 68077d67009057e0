"""The gradient checks C3 to C9, one small function each, and the table of all of them.

A check takes a `Case` and says what it measured; it judges nothing but what the op gave against the
products of the independent quantiser. C1, C2 and C7, which call the op on other arguments,
have files of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8.emulation.machines import MACHINES
from jax_fp8.recipes import Recipe
from jax_fp8.testing import window
from jax_fp8.testing.case import Case
from jax_fp8.testing.causes import likely_cause
from jax_fp8.testing.differences import lattice_differences
from jax_fp8.testing.identity import identity_mode
from jax_fp8.testing.products import Product
from jax_fp8.testing.report import CheckResult
from jax_fp8.testing.unbiased import unbiasedness

__all__ = ["CHECKS", "Check", "run"]

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

#: Half the width of the error window where the data leave no more room to chance (from 256³ on).
_WINDOW: Final = 0.10
#: Standard deviations of chance that the window allows for: once in some 10^6.
_DEVIATIONS: Final = 5.0
#: Above this one the window would let a quarter of the error, or 1.3 times it, pass.
_LARGEST_DEVIATION: Final = 0.10
#: How much larger than expected an adjoint gap may be that comes of quantising along two axes.
_GAP_ROOM: Final = 1.5


def _pairs(case: Case) -> Iterator[tuple[Product, Array]]:
    return zip(case.products, case.observed, strict=True)


def _worst(x: Float64) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(x)), x.shape))


def _ratio(error: Float64, bound: Float64) -> Float64:
    """error / bound, infinite where the error is no number."""
    with np.errstate(all="ignore"):
        ratio: Float64 = np.where(np.isnan(error), np.inf, error / bound)
    return ratio


def _at(case: Case, product: Product, where: tuple[int, ...]) -> dict[str, Any]:
    """Fields of a result that point at an element of a canonical tensor."""
    return {
        "tensor": product.tensor,
        "index": case.form.index(product.which, where),
        "detail": case.describe(product, where),
    }


def _overflow(case: Case) -> str:
    """A reason not to compare with real numbers: some result is meant to be infinite or NaN."""
    for execution in case.intent.executions:
        machine = MACHINES.get(execution.accumulation)
        if machine is not None and machine.is_fp16:
            return f"no bound covers {machine.name}, which overflows and flushes"
    for product in case.products:
        expected = product.quantised if product.expected is None else product.expected
        if not np.isfinite(expected.astype(np.float64)).all():
            return f"{product.tensor} is not finite by right: an operand is not, or sums overflow"
    return ""


def _explain(product: Product, observed: Array) -> Callable[[], str]:
    return functools.partial(likely_cause, product, observed)


# --- C3: adjoint ----------------------------------------------------------------------------------


def adjoint_identity(case: Case) -> dict[str, Any]:
    """C3. <u·b, g> = <u, da> with quantised b and g, for the worst u among others."""
    if reason := _overflow(case):
        return {"not_applicable": reason}
    rng, gaps = case.rng(), []
    ratios: list[tuple[float, int]] = [(0.0, 1)]
    y = case.products[0]
    for i, forward in ((1, y.b), (2, y.a)):  # the copy of the other side that the product takes
        product, da = case.products[i], case.observed[i].astype(np.float64)
        error = da - product.quantised
        for u in (rng.standard_normal(da.shape), da, error):
            gap = abs(float(np.vdot(u, error)))
            room = float(np.vdot(np.abs(u), product.sums_bound))
            ratios.append((gap / room if gap else 0.0, i))
        ratios.append((_forward_mode_gap(case, product, rng), i))
        used_a, used_b = product.operands_used
        u = product.multiply(used_a, np.swapaxes(forward.dequantised, -1, -2) - used_b)
        norms = [float(np.linalg.norm(v)) for v in (u, da, product.quantised)]
        if min(norms) == 0:
            continue  # one copy serves both axes, or there is nothing to compare
        gap = abs(float(np.vdot(u, u - error))) / (norms[0] * norms[1])
        eps = float(np.linalg.norm(used_b - product.b.exact) / np.linalg.norm(product.b.exact))
        expected = max(math.sqrt(2) * eps, norms[0] / norms[2])
        gaps.append(f"{product.tensor}: {gap:.2e}, expected up to {expected:.2e}")
        ratios.append((gap / expected / _GAP_ROOM, i))
    value, i = max((math.inf if math.isnan(ratio) else ratio, i) for ratio, i in ratios)
    return {
        "value": value,
        "limit": (0.0, 1.0),
        "tensor": case.products[i].tensor,
        "detail": "adjoint gap to the forward pass's own copies: "
        + ("; ".join(gaps) or "none, one copy serves both axes"),
        "explain": _explain(case.products[i], case.observed[i]),
    }


def _forward_mode_gap(case: Case, product: Product, rng: np.random.Generator) -> float:
    """|<f'(u), g^> - <u, g^·b^>| of the op's own tangent f', over what FP32 sums allow.

    0 for an op without forward mode.
    """
    operands, side = (case.x, case.w), product.which
    u = rng.standard_normal(operands[side].shape).astype(operands[side].dtype)
    tangents = [u if i == side else np.zeros_like(x) for i, x in enumerate(operands)]
    try:
        tangent = jax.jvp(case.call, tuple(map(jnp.asarray, operands)), tuple(tangents))[1]
    except TypeError:
        return 0.0
    t = case.form.canonical(2, np.asarray(tangent)).astype(np.float64)
    g, b = product.operands_used
    g = g if side == 0 else np.swapaxes(g, -1, -2)
    direction = case.form.canonical(side, u).astype(np.float64)
    gap = abs(float(np.sum(t * g)) - float(np.sum(direction * product.quantised)))
    relative = (case.products[0].k + 8) * 2.0**-23 + window.EPS[case.g.dtype.name]
    sizes = np.sum(
        np.abs(direction) * product.multiply(np.abs(product.operands_used[0]), np.abs(b))
    )
    return gap / float(relative * sizes) if gap else 0.0


# --- C4: bits -------------------------------------------------------------------------------------


def bit_equality(case: Case) -> dict[str, Any]:
    """C4. Elements whose bits are not those of the scaled GEMM of the oracle's codes."""
    total, first = 0, None
    for product, got in _pairs(case):
        expected = product.expected
        if expected is None:  # it adds in an order of its own
            error = np.abs(got.astype(np.float64) - product.quantised)
            differ = ~(error <= product.sums_bound)
        elif expected.dtype != got.dtype or expected.shape != got.shape:
            raise AssertionError(
                f"{product.tensor} is {got.dtype}{list(got.shape)}, expected "
                f"{expected.dtype}{list(expected.shape)}"
            )
        else:
            unsigned = np.dtype(f"u{got.dtype.itemsize}")
            differ = got.view(unsigned) != expected.view(unsigned)
            differ &= ~(np.isnan(got) & np.isnan(expected))
        total += int(differ.sum())
        if differ.any() and first is None:
            wrong = np.where(differ, np.abs(got.astype(np.float64) - product.quantised), -1)
            first = (product, got, _worst(np.nan_to_num(wrong, nan=np.inf)))
    out: dict[str, Any] = {"value": float(total), "limit": (0.0, 0.0)}
    if first is not None:
        product, got, where = first
        out |= _at(case, product, where) | {"explain": _explain(product, got)}
    return out


# --- C5: bound ------------------------------------------------------------------------------------


def element_bound(case: Case) -> dict[str, Any]:
    """C5. Largest |error| / bound against the float64 product of the unquantised operands."""
    if reason := _overflow(case):
        return {"not_applicable": reason}
    worst: tuple[float, Product, Array, tuple[int, ...]] | None = None
    for product, got in _pairs(case):
        ratio = _ratio(np.abs(got.astype(np.float64) - product.exact), product.bound)
        where = _worst(ratio)
        if worst is None or ratio[where] > worst[0]:
            worst = (float(ratio[where]), product, got, where)
    assert worst is not None
    value, product, got, where = worst
    saturated = sum(x.saturated for p in case.products for x in (p.a, p.b) if p.fp8)
    out = {"value": value, "limit": (0.0, 1.0), **_at(case, product, where)}
    out["detail"] += f"; {saturated} elements of operands saturate" if saturated else ""
    return out | {"explain": _explain(product, got)}


# --- C6: window -----------------------------------------------------------------------------------


def error_window(case: Case) -> dict[str, Any]:
    """C6. ‖error‖ / predicted, farthest from 1 for its window."""
    if reason := _overflow(case):
        return {"not_applicable": reason}
    measured, skipped = [], []
    for product, got in _pairs(case):
        if product.fp8 and (saturated := product.a.saturated + product.b.saturated):
            skipped.append(f"{product.tensor}: {saturated} elements saturate, all the same way")
            continue
        predicted, deviation = product.independent_error
        if predicted == 0 or not math.isfinite(predicted):
            skipped.append(f"{product.tensor}: nothing is rounded")
        elif deviation > _LARGEST_DEVIATION:
            skipped.append(
                f"{product.tensor}: chance moves the error by {100 * deviation:.0f} % here, more "
                f"than the {100 * _LARGEST_DEVIATION:.0f} % that leave a window"
            )
        else:
            error = float(np.linalg.norm(got.astype(np.float64) - product.exact))
            room = max(_WINDOW, _DEVIATIONS * deviation)
            measured.append((error / predicted, 1 - room, 1 + room, product, got))
    if not measured:
        return {"not_applicable": "; ".join(skipped)}
    ratio, low, high, product, got = max(
        measured, key=lambda m: math.inf if math.isnan(m[0]) else abs(m[0] - 1) / (m[2] - 1)
    )
    percent = [
        f"{p.tensor} {100 * r * p.independent_error[0] / np.linalg.norm(p.exact):.2f} %"
        for r, _, _, p, _ in measured
    ]
    return {
        "value": ratio,
        "limit": (low, high),
        "tensor": product.tensor,
        "detail": "; ".join([f"errors: {', '.join(percent)}", *skipped]),
        "explain": _explain(product, got),
    }


# --- C8: cosine -----------------------------------------------------------------------------------


def cosine(case: Case) -> dict[str, Any]:
    """C8. Smallest cosine between a gradient and its float64 value; a report, it misses scales."""
    if reason := _overflow(case):
        return {"not_applicable": reason}
    rows = []
    for product, got in list(_pairs(case))[1:]:
        x, exact = got.astype(np.float64), product.exact
        norms = np.linalg.norm(x) * np.linalg.norm(exact)
        noise = np.linalg.norm(x - exact)
        cos = float(np.vdot(x, exact) / norms) if norms else math.nan
        snr = 20 * math.log10(np.linalg.norm(exact) / noise) if noise and norms else math.inf
        rows.append((cos, product.tensor, f"{product.tensor}: {snr:.1f} dB"))
    value, tensor, _ = min(rows)
    return {"value": value, "tensor": tensor, "detail": "SNR " + ", ".join(r[2] for r in rows)}


# --- C9: negative controls ------------------------------------------------------------------------


def negative_controls(case: Case) -> dict[str, Any]:
    """C9. Wrong gradients that C4, C5 and C6 let pass: none."""
    passed: list[str] = []
    caught: list[str] = []
    for name, gradients in _controls(case):
        wrong = case.with_observed(case.observed[0], *gradients)
        ids = [id for id in ("C4", "C5", "C6") if run(id, wrong).failed]
        (caught if ids else passed).append(f"{name} by {', '.join(ids) or 'none'}")
    if not caught and not passed:
        return {"not_applicable": "the gradients are zero"}
    return {
        "value": float(len(passed)),
        "limit": (0.0, 0.0),
        "detail": "; ".join(passed or caught),
        "explain": lambda: "the checks are blind on these arguments: take larger ones",
    }


def _controls(case: Case) -> Iterator[tuple[str, list[Array]]]:
    products = case.products[1:]
    if all(not p.quantised.any() for p in products):
        return
    yield "zeros", [np.zeros_like(x) for x in case.observed[1:]]
    yield "sign flipped", [p.quantised.astype(p.dtype) * -1 for p in products]
    rms = float(np.sqrt(np.mean(np.square(case.products[1].a.exact))))
    for fmt, size in (("e4m3fn", 1e-4), ("e5m2", 1e-6)):
        # As if g were `size` large and had no scale; a gradient in bfloat16 needs none.
        scale = 2.0 ** round(math.log2(rms / size)) if rms else 1.0
        unscaled = [_with_static_gradient(p, fmt, scale) for p in products]
        if any(p.fp8 for p in products):
            yield f"unscaled {fmt}, g ~ {size:g}", unscaled


def _with_static_gradient(product: Product, fmt: str, scale: float) -> Array:
    if not product.fp8:
        return product.quantised.astype(product.dtype)
    recipe = _Static(gradient_format=fmt, scale=scale)  # type: ignore[arg-type]
    a = dataclasses.replace(product.a, recipe=recipe, bits=None)
    return product.multiply(a.dequantised, product.b.dequantised).astype(product.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static(Recipe):
    """One scale for gradients, known beforehand."""

    scale: float = 1.0

    def tile(self, role: Any) -> tuple[int, int]:
        return (-1, -1)

    def static_scale(self, role: Any) -> float | None:
        return self.scale


# --- The table ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
      name: what is checked.
      formula: what is measured.
      measure: fields of a `CheckResult` for a case.
    """

    name: str
    formula: str
    measure: Callable[[Case], dict[str, Any]]


#: Every check by its id.
CHECKS: Final[dict[str, Check]] = {
    "C1": Check(
        "identity mode", "‖numeric − derivative‖ / ‖numeric‖ in float64 without quantiser, to "
        "second order, forward and reverse", identity_mode,
    ),
    "C2": Check(
        "lattice differences", "times that <f(a+u, b) − f(a, b), g> ≠ <u, da> on exact operands",
        lattice_differences,
    ),
    "C3": Check(
        "adjoint identity", "|<u·b^, g^> − <u, da>| / largest that sums allow, for the worst u; "
        f"and its gap to the forward copies / {_GAP_ROOM} of the one expected", adjoint_identity,
    ),
    "C4": Check(
        "bit equality", "elements that differ from scaled_dot_general of the oracle's codes",
        bit_equality,
    ),
    "C5": Check(
        "element-wise bound", "max |da − g·bᵀ| / ((ug + ub + ug·ub)|g||b|ᵀ + ηg Σ|b| + ηb Σ|g| + "
        "sums), u half an ulp, η = s · half the smallest subnormal", element_bound,
    ),
    "C6": Check(
        "error window", "‖da − g·bᵀ‖ / sqrt(eps_g² + eps_b²)‖g·bᵀ‖, eps of the oracle's codes",
        error_window,
    ),
    "C7": Check(
        "unbiasedness", "max |mean over draws − expected| / its deviation", unbiasedness
    ),
    "C8": Check("cosine", "<da, g·bᵀ> / (‖da‖ ‖g·bᵀ‖)", cosine),
    "C9": Check("negative controls", "wrong gradients that C4, C5 and C6 pass", negative_controls),
}  # fmt: skip


def run(id: str, case: Case) -> CheckResult:
    """The result of one check."""
    check = CHECKS[id]
    with np.errstate(all="ignore"):
        measured = check.measure(case)
    return CheckResult(id=id, name=check.name, formula=check.formula, **measured)
