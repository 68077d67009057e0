"""Oracles and comparisons for the reports.

A product of two operands is quantised by the NumPy oracle as a recipe says and multiplied in
float64; its bound is the one that the numbers contract allows.
"""

import re
from collections import Counter
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np

import checks
import jax_fp8 as fp8
from jax_fp8.testing import oracle
from rows import runnable_rows

BFLOAT16 = ml_dtypes.bfloat16
E4M3FN = ml_dtypes.float8_e4m3fn
E5M2 = ml_dtypes.float8_e5m2
DTYPES = (np.float32, BFLOAT16, np.float16)
RECIPES = (fp8.BlockScaling(), fp8.RowScaling(), fp8.TensorScaling())
GEMM_ROWS = tuple(runnable_rows("gemm"))


#: What the recipes promise: format by role, and (rows, k) that one scale covers by recipe and role.
FORMATS = {"input": "e4m3fn", "weight": "e4m3fn", "gradient": "e5m2"}
TILES = {
    fp8.BlockScaling: {"input": (1, 128), "weight": (128, 128), "gradient": (1, 128)},
    fp8.RowScaling: dict.fromkeys(FORMATS, (1, -1)),
    fp8.TensorScaling: dict.fromkeys(FORMATS, (-1, -1)),
    fp8.StaticScaling: dict.fromkeys(FORMATS, (-1, -1)),
}


class Product(NamedTuple):
    """What a GEMM should give, and how far the contract lets a kernel be away from it."""

    exact: np.ndarray
    bound: np.ndarray


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def product(lhs, rhs, roles, recipe, out=np.float32):
    """Oracle of lhs (m, k) · rhs (n, k), each quantised as `recipe` says for its role."""
    operands, scales, tiles = [], [], []
    for x, role in zip((lhs, rhs), roles, strict=True):
        tile, scale = TILES[type(recipe)][role], None
        if isinstance(recipe, fp8.StaticScaling):
            scale = np.full((1, 1), getattr(recipe, role), np.float32)
        values, scale = oracle.quantize_np(
            x, FORMATS[role], tile, scale=scale, power_of_two=recipe.power_of_two
        )
        operands.append(values)
        scales.append(scale)
        tiles.append(tile)
    args = (*operands, *scales, *tiles)
    return Product(oracle.gemm_np(*args), oracle.gemm_bound_np(*args, out=out))


def forward(x, w, recipe, out=np.float32):
    """Oracle of x (m, k) · w (k, n)."""
    return product(x, np.swapaxes(w, -1, -2), ("input", "weight"), recipe, out)


def gradients(x, w, ct, recipe):
    """Oracles of both gradients of x (m, k) · w (k, n) for the cotangent ct (m, n)."""
    return (
        product(ct, w, ("gradient", "weight"), recipe, x.dtype),
        product(x.T, ct.T, ("input", "gradient"), recipe, w.dtype),
    )


def assert_close(got, want):
    """`got` lies within the bound, and is NaN exactly where the oracle is."""
    nan = np.isnan(want.exact)
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), nan)
    checks.assert_gemm_close(*(np.where(nan, 0, x) for x in (got, *want)))


def assert_same_bits(got, want):
    """Equal shape, dtype and bits; a NaN equals every NaN."""
    checks.assert_same_bits(got, want, any_nan=True)


def eager_and_jit(f, *args):
    """Results of `f` as NumPy arrays; outside and under jit their bits must agree."""
    eager = jax.tree.map(np.asarray, f(*args))
    jax.tree.map(assert_same_bits, eager, jax.tree.map(np.asarray, jax.jit(f)(*args)))
    return eager


def forward_and_gradients(x, w, ct, recipe):
    """The product x · w and its gradients for the cotangent ct."""
    y, vjp = jax.vjp(lambda x, w: fp8.matmul(x, w, recipe=recipe), x, w)
    return y, *vjp(ct)


def assert_matmul_and_gradients(x, w, recipe, seed=0):
    """fp8.matmul and both gradients, jitted, agree with the oracle."""
    out = np.result_type(x.dtype, w.dtype) if x.dtype != w.dtype else x.dtype
    ct = normal(seed, x.shape[0], w.shape[1], dtype=out)
    y, dx, dw = jax.jit(forward_and_gradients, static_argnums=3)(x, w, ct, recipe)
    assert_close(y, forward(x, w, recipe, out))
    for got, want, primal in zip((dx, dw), gradients(x, w, ct, recipe), (x, w), strict=True):
        assert got.dtype == primal.dtype
        assert_close(got, want)


def compiled_calls(f, *args):
    """How often each of our targets, and a dot of XLA's, stands in the compiled program."""
    text = jax.jit(f).lower(*args).compile().as_text()
    calls = Counter(re.findall(r'custom_call_target="(jax_fp8\.[^"]+)"', text))
    calls["dot"] = len(re.findall(r"= \S+ dot\(", text))
    return calls


def devices(count):
    """The first `count` devices."""
    found = jax.devices()
    assert len(found) >= count, f"need {count} host devices, see conftest.py; found {len(found)}"
    return found[:count]
