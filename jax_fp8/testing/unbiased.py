"""C7: stochastic rounding of gradients is unbiased.

The mean over many keys must be what the unrounded cotangent gives. Its deviation is known: a value
at the fraction p between two neighbours has the variance ulp² p (1 − p), and a gradient adds those
up times its other operand squared.
"""

from __future__ import annotations

import math
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8.testing.case import Case
from jax_fp8.testing.operand import Operand

__all__ = ["unbiasedness"]

Float64 = npt.NDArray[np.float64]

_DRAWS: Final = 256
#: Chance of a false alarm.
_FALSE_ALARM: Final = 1e-6
#: How often, in all draws, the largest term must be expected to change a mean that is judged.
_LEAST_EVENTS: Final = 9.0


def unbiasedness(case: Case) -> dict[str, Any]:
    """C7. Largest deviation of the mean gradient from its expectation, in standard deviations."""
    intent, key = case.intent, case.intent.key
    if intent.recipe.rounding != "stochastic" or key is None:
        return {"not_applicable": "the recipe rounds to nearest"}
    keys = jax.random.split(key, _DRAWS)

    def add(total: Any, key: Any) -> Any:
        _, pullback = jax.vjp(lambda x, w: case.op(x, w, key), x, w)
        gradients = pullback(ct)
        return [a + b.astype(jnp.float32) for a, b in zip(total, gradients, strict=True)], None

    x, w = jnp.asarray(case.x), jnp.asarray(case.w)
    ct = jnp.asarray(case.g)
    zero = [jnp.zeros(case.x.shape), jnp.zeros(case.w.shape)]
    totals = jax.jit(lambda keys: jax.lax.scan(add, zero, keys)[0])(keys)
    worst: tuple[float, float, str, tuple[int, ...] | None] = (0.0, 1.0, "", None)
    judged = 0
    for side, product in enumerate(case.products[1:]):
        if not product.fp8:
            continue
        mean = case.form.canonical(side, np.asarray(totals[side], np.float64)) / _DRAWS
        variance, jump = _variance(product.a)
        b = product.b.dequantised
        expected = product.multiply(product.a.exact, b)
        spread2 = product.multiply(variance, b**2)
        largest = product.multiply(jump**2, b**2)  # at least the square of the largest term
        # FP32 sums of the product, and of the draws, add an error of their own; so does x / scale.
        floor = product.multiply(np.abs(product.a.exact), np.abs(b)) * _DRAWS * 2.0**-24
        frequent = spread2 * _DRAWS > _LEAST_EVENTS * largest / max(product.k, 1)
        count = int(frequent.sum())
        if not count:
            continue
        judged += count
        deviation = np.sqrt(spread2 / _DRAWS) + floor
        z = np.where(frequent, np.abs(mean - expected) / np.maximum(deviation, 1e-300), 0)
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(z)), z.shape))
        limit = math.sqrt(2 * math.log(2 * count / _FALSE_ALARM))
        if z[at] / limit > worst[0] / worst[1]:
            worst = (float(z[at]), limit, product.tensor, case.form.index(side, at))
    if not judged:
        return {"not_applicable": "no element of a gradient varies often enough"}
    value, limit, tensor, index = worst
    return {
        "value": value,
        "limit": (0.0, limit),
        "tensor": tensor,
        "index": index,
        "detail": f"{_DRAWS} draws, {judged} elements",
        "explain": lambda: "rounding has a bias: to nearest, toward zero, or too few random bits",
    }


def _variance(x: Operand) -> tuple[Float64, Float64]:
    """Variance and ulp of each element's stochastic rounding."""
    size = np.minimum(np.abs(x.exact) / x.scales, x.format.max)
    lowest = math.log2(x.format.smallest_normal)
    exponent = np.maximum(np.floor(np.log2(np.maximum(size, 1e-300))), lowest)
    ulp = np.exp2(exponent - x.format.mantissa_bits)
    fraction = size / ulp - np.floor(size / ulp)
    return (ulp * x.scales) ** 2 * fraction * (1 - fraction), np.where(
        fraction > 0, ulp * x.scales, 0
    )
