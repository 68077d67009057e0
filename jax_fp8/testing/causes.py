"""What most likely is wrong with a gradient: hypotheses, each computed and compared with it.

A failed check says how far off a result is. Here the usual mistakes are made on purpose, in NumPy,
and the one that reproduces the result is named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jax_fp8 import formats
from jax_fp8.testing import oracle
from jax_fp8.testing.operand import Operand
from jax_fp8.testing.products import Product

__all__ = ["likely_cause"]

Float64 = npt.NDArray[np.float64]

#: How near, relative to its norm, a result must come to a hypothesis: sums may differ as much.
_NEAR: Final = 2e-3


def likely_cause(product: Product, observed: npt.ArrayLike) -> str:
    """A sentence on what most likely made `observed` differ from the product.

    Args:
      product: what was expected.
      observed: canonical tensor that a check refused.
    """
    got = np.asarray(observed).astype(np.float64)
    expected = product.quantised
    comparable = np.isfinite(expected)
    if not np.isfinite(got[comparable]).all():
        return "the result is not finite where it should be: an accumulator or a format overflows"
    if not comparable.all():
        return "none was looked for: some of the result is not finite by right"
    size = float(np.linalg.norm(got))
    if size == 0:
        return "the result is identically zero: no gradient arrives, or all of it is flushed to 0"
    if _distance(got, expected) < _NEAR:
        return (
            f"sums differ by {_distance(got, expected):.1e}: another accumulator, promotion "
            f"interval or order of sums than {product.execution.accumulation}"
        )
    factor = float(np.vdot(got, expected)) / max(float(np.vdot(expected, expected)), 1e-300)
    if _distance(got, factor * expected) < 1e-3:
        return _factor_cause(factor)
    candidates: list[tuple[float, str]] = []
    for name, make in _HYPOTHESES.items():
        hypothesis = make(product)
        if hypothesis is not None:
            candidates.append((_distance(got, hypothesis), name))
    distance, name = min(candidates)
    own = float(np.linalg.norm(expected - product.exact))
    ratio = float(np.linalg.norm(got - product.exact)) / own if own else math.inf
    error = f"error ratio {ratio:.2f}" if ratio < 1e4 else "far off"
    if distance < _NEAR:
        return f"{error} = {_named(name, product)} (reproduced to {distance:.0e})"
    return f"{error}, by none of the usual mistakes"


def _named(hypothesis: str, product: Product) -> str:
    """The hypothesis with the operands' names and formats."""
    names = {"y": ("lhs", "rhs"), "dx": ("g", "rhs"), "dw": ("g", "lhs")}[product.tensor]
    meant = product.a.format
    return hypothesis.format(
        a=names[0], b=names[1], meant=meant.name.upper(), other=_other(meant).name.upper()
    )


def _other(fmt: formats.Format) -> formats.Format:
    return formats.E4M3FN if fmt is formats.E5M2 else formats.E5M2


def _distance(x: Float64, y: Float64) -> float:
    return float(np.linalg.norm(x - y)) / max(float(np.linalg.norm(x)), 1e-300)


def _factor_cause(factor: float) -> str:
    if abs(factor + 1) < 1e-3:
        return "the sign is flipped"
    exponent = np.log2(abs(factor))
    power = f" = 2^{round(exponent)}" if abs(exponent - round(exponent)) < 1e-3 else ""
    return f"the result is {factor:.6g}{power} times what it should be: a scale is off or forgotten"


def _product(product: Product, a: Float64 | None = None, b: Float64 | None = None) -> Float64:
    used = product.operands_used
    return product.multiply(used[0] if a is None else a, used[1] if b is None else b)


def _other_format(product: Product) -> Float64:
    a = product.a
    change: dict[str, Any] = {f"{a.role}_format": _other(a.format)}
    recipe = dataclasses.replace(a.recipe, **change)
    return _product(product, dataclasses.replace(a, recipe=recipe).dequantised)


def _truncated(product: Product) -> Float64:
    never_up = np.full(product.a.real.shape, 2**32 - 1, np.uint32)
    return _product(product, dataclasses.replace(product.a, bits=never_up).dequantised)


def _nearest(product: Product) -> Float64 | None:
    if product.a.bits is None:
        return None
    return _product(product, dataclasses.replace(product.a, bits=None).dequantised)


def _turned(x: Operand) -> Float64:
    """The copy that is quantised along the axis that is not contracted."""
    turned = dataclasses.replace(x, real=np.swapaxes(x.real, -1, -2), bits=None)
    return np.swapaxes(turned.dequantised, -1, -2)


def _without_scale(x: Operand) -> Float64:
    return x.quantised[0].astype(np.float64)


def _stale(product: Product) -> Float64:
    a = product.a
    values, scale = oracle.quantize_np(
        a.real, a.format.name, a.tile, scale=a.quantised[1] / np.float32(8)
    )
    return _product(product, oracle.dequantize_np(values, scale, a.tile))


_HYPOTHESES: Final[dict[str, Callable[[Product], Any]]] = {
    "{a} in {other} where {meant} was expected": (_other_format),
    "{a} is not quantised": lambda p: _product(p, p.a.exact),
    "{b} is not quantised": lambda p: _product(p, None, p.b.exact),
    "neither operand is quantised": lambda p: p.exact,
    "{a} is truncated instead of rounded to nearest even": _truncated,
    "{a} is rounded to nearest instead of stochastically": _nearest,
    "{a}'s copy along the other axis": lambda p: _product(p, _turned(p.a)),
    "the forward-axis copy of {b} where the backward-axis copy belongs": lambda p: _product(
        p, None, _turned(p.b)
    ),
    "the scale of {b} forgotten": lambda p: _product(p, None, _without_scale(p.b)),
    "the scale of {a} forgotten": lambda p: _product(p, _without_scale(p.a)),
    "a stale amax, 8 times too small, so that values saturate": _stale,
}
