"""Every public call under every transformation with every recipe: values, by the NumPy oracle.

A cell computes what the numbers contract says: which operand is quantised along which axis, in
which format, and what is multiplied in high precision.
"""

from __future__ import annotations

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_fp8 as fp8
from jax_fp8.testing import oracle

RECIPES = {
    "tensor": fp8.TensorScaling(),
    "row": fp8.RowScaling(),
    "tile": fp8.TileScaling(4, 8),
    "block": fp8.BlockScaling(),
    "mx": fp8.MXScaling(),
    "static": fp8.StaticScaling(input=2.0**-6, weight=2.0**-7, gradient=2.0**-12),
    "options": fp8.RowScaling(
        residuals="high_precision", gradient_format=fp8.E4M3FN, power_of_two=True
    ),
    "bfloat16 weight gradient": fp8.BlockScaling(weight_gradient="bfloat16"),
}
M, K, N, EXAMPLES = 6, 40, 5, 3


def linen_dense(x, w, recipe):
    cls = functools.partial(fp8.flax.linen.DotGeneral, recipe=recipe)
    layer = nn.Dense(w.shape[-1], use_bias=False, dot_general_cls=cls)
    return layer.apply({"params": {"kernel": w}}, x)


def nnx_linear(x, w, recipe):
    dot_general = fp8.flax.nnx.DotGeneral(recipe=recipe)
    rngs = nnx.Rngs(0)
    layer = nnx.Linear(*w.shape, use_bias=False, rngs=rngs, dot_general=dot_general)
    layer.kernel = nnx.Param(w)
    return layer(x)


CALLS = {
    "matmul": lambda x, w, recipe: fp8.matmul(x, w, recipe=recipe),
    "dot_general": lambda x, w, recipe: fp8.dot_general(
        x, w, (((1,), (0,)), ((), ())), recipe=recipe
    ),
    "einsum": lambda x, w, recipe: fp8.einsum("mk,kn->mn", x, w, recipe=recipe),
    "linen.Dense": linen_dense,
    "nnx.Linear": nnx_linear,
}


# --- The oracle -----------------------------------------------------------------------------------


def quantized(x, recipe, role, contracted):
    """x (r, c) quantised along the axis that a GEMM contracts, dequantised to float64."""
    rows, k = recipe.tile(role)
    tile = (rows, k) if contracted == 1 else (k, rows)
    static = recipe.static_scale(role)
    scale = None if static is None else np.full((1, 1), static, np.float32)
    values, scale = oracle.quantize_np(
        np.asarray(x, np.float32),
        recipe.format(role).name,
        tile,
        scale=scale,
        power_of_two=recipe.power_of_two and scale is None,
    )
    return oracle.dequantize_np(values, scale, tile)


def product(x, w, recipe):
    return quantized(x, recipe, "input", 1) @ quantized(w, recipe, "weight", 0)


def backward_operands(x, w, recipe):
    """What the gradients multiply the cotangent with: w for dx, x for dw."""
    if recipe.weight_gradient == "bfloat16":
        return quantized(w, recipe, "weight", 1), bfloat16(x)
    return quantized(w, recipe, "weight", 1), quantized(x, recipe, "input", 0)


def bfloat16(x):
    return np.asarray(np.asarray(x, np.float32).astype(jnp.bfloat16), np.float64)


def gradients(x, w, g, recipe):
    for_dx, for_dw = backward_operands(x, w, recipe)
    if recipe.weight_gradient == "bfloat16":
        g_for_dw = bfloat16(g)
    else:
        g_for_dw = quantized(g, recipe, "gradient", 0)
    return quantized(g, recipe, "gradient", 1) @ for_dx.T, for_dw.T @ g_for_dw


def tangent(x, w, dx, dw, recipe):
    for_dx, for_dw = backward_operands(x, w, recipe)
    return dx @ for_dx + for_dw @ dw


def assert_close(actual, expected, tolerance=2e-5):
    """Relative to the largest element: FP32 sums of a few dozen terms."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


# --- Data -----------------------------------------------------------------------------------------


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, W, C = normal(0, EXAMPLES, M, K), normal(1, EXAMPLES, K, N), normal(2, M, N)
DX, DW = normal(3, M, K), normal(4, K, N)
SUBSETS = [s for s in itertools.product((True, False), repeat=2) if any(s)]


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]


@pytest.fixture
def f(call, recipe):
    return functools.partial(call, recipe=recipe)


@pytest.fixture
def loss(f):
    """A loss whose cotangent at the product is C."""
    return lambda x, w: jnp.sum(f(x, w) * C)


def batches(batched):
    """Operands of which some have the examples' dim, vmap's in_axes, and the examples."""
    operands = [a if b else a[0] for a, b in zip((X, W), batched, strict=True)]
    axes = tuple(0 if b else None for b in batched)
    each = [
        tuple(a[i] if b else a for a, b in zip(operands, batched, strict=True))
        for i in range(EXAMPLES)
    ]
    return operands, axes, each


# --- The cells ------------------------------------------------------------------------------------


def test_jit(f, recipe):
    assert_close(jax.jit(f)(X[0], W[0]), product(X[0], W[0], recipe))


def test_vmap_over_every_subset(f, recipe):
    for batched in SUBSETS:
        operands, axes, each = batches(batched)
        expected = [product(*e, recipe) for e in each]
        assert_close(jax.jit(jax.vmap(f, axes))(*operands), expected)


def test_grad(loss, recipe):
    got = jax.jit(jax.grad(loss, (0, 1)))(X[0], W[0])
    for a, b in zip(got, gradients(X[0], W[0], C, recipe), strict=True):
        assert_close(a, b)


def test_vmap_of_grad(loss, recipe):
    for batched in SUBSETS:
        operands, axes, each = batches(batched)
        expected = [gradients(*e, C, recipe) for e in each]
        got = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), axes))(*operands)
        for side in (0, 1):
            assert_close(got[side], [e[side] for e in expected])


def test_grad_of_vmap(loss, recipe):
    for batched in SUBSETS:
        operands, axes, each = batches(batched)
        total = lambda x, w, axes=axes: jnp.sum(jax.vmap(loss, axes)(x, w))
        got = jax.jit(jax.grad(total, (0, 1)))(*operands)
        expected = [gradients(*e, C, recipe) for e in each]
        for side in (0, 1):
            parts = [e[side] for e in expected]
            assert_close(got[side], parts if batched[side] else np.sum(parts, 0))


def test_jvp(f, recipe):
    out, dot = jax.jit(lambda *a: jax.jvp(f, a[:2], a[2:]))(X[0], W[0], DX, DW)
    assert_close(out, product(X[0], W[0], recipe))
    assert_close(dot, tangent(X[0], W[0], DX, DW, recipe))


def test_hessian_vector_product(f, recipe):
    x, w = X[0], W[0]

    def value(x, w):
        return jnp.sum(C * jnp.square(f(x, w))) / 2

    def hvp(x, w):
        return jax.jvp(jax.grad(value, (0, 1)), (x, w), (DX, DW))[1]

    got = jax.jit(hvp)(x, w)
    # The cotangent g = C y moves by C y': an FP8 GEMM like any gradient. The other part moves the
    # fixed operand, in high precision.
    g, g_dot = C * product(x, w, recipe), C * tangent(x, w, DX, DW, recipe)
    dx, dw = gradients(x, w, g_dot, recipe)
    for a, b in zip(got, (dx + g @ DW.T, dw + DX.T @ g), strict=True):
        # One code of g_dot may round the other way: half a step of E5M2, seen through one product.
        assert_close(a, b, tolerance=0.05)


def test_remat(loss, recipe):
    plain = jax.jit(jax.grad(loss, (0, 1)))(X[0], W[0])
    remat = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1)))(X[0], W[0])
    for a, b in zip(remat, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_scan(f, recipe):
    def total(xs, ws):
        def step(carry, pair):
            y = f(*pair)
            return carry + jnp.sum(y * C), y

        return jax.lax.scan(step, jnp.float32(0), (xs, ws))

    (value, ys), got = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(X, W)
    expected = [product(x, w, recipe) for x, w in zip(X, W, strict=True)]
    assert_close(ys, expected)
    assert_close(value, np.sum(expected * C, dtype=np.float64), tolerance=1e-3)
    for side in (0, 1):
        each = [gradients(x, w, C, recipe)[side] for x, w in zip(X, W, strict=True)]
        assert_close(got[side], each)
