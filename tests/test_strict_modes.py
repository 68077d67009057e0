"""The package does not rely on implicit promotion: strict modes and x64 change nothing."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

RECIPES = [
    fp8.TensorScaling(),
    fp8.RowScaling(power_of_two=True),
    fp8.BlockScaling(),
    fp8.StaticScaling(ste="mask_saturated"),
]


def everything(dtype, recipe):
    """Results of each public call, in a list."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((2, 5, 140), (140, 6)))

    def loss(x, w):
        return jnp.sum(fp8.matmul(x, w, recipe=recipe).astype(jnp.float32))

    q, p = fp8.quantize(x, "e4m3", (1, 128)), fp8.quantize(w, "e5m2", scale=0.5)
    layer = nn.Dense(3, dtype=dtype, dot_general_cls=fp8.flax.linen.DotGeneral)
    variables = layer.init(jax.random.key(0), x)
    return jax.tree.leaves(
        [
            jax.value_and_grad(loss, (0, 1))(x, w),
            jax.jvp(jax.grad(loss, (0, 1)), (x, w), (x, w)),
            jax.vmap(jax.grad(loss, (0, 1)), (0, None))(x, w),
            fp8.einsum("bmk,kn->bnm", x, w, recipe=recipe),
            fp8.matmul(x, jnp.stack([w, w]), recipe=recipe),
            fp8.dequantize(q, dtype),
            fp8.scaled_dot_general(q, p, (((2,), (0,)), ((), ())), dtype),
            fp8.scaled_matmul(q.values, p.values, 0.5, np.float32(2)),
            jax.grad(lambda v: jnp.sum(layer.apply(v, x).astype(jnp.float32)))(variables),
        ]
    )


@pytest.fixture(params=RECIPES, ids=lambda r: type(r).__name__)
def recipe(request):
    return request.param


@pytest.fixture(params=[jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: np.dtype(d).name)
def results(request, recipe):
    """A function that computes everything again, and what it gave in JAX's default modes."""
    expected = everything(request.param, recipe)
    return lambda: everything(request.param, recipe), expected


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_strict_promotion_changes_nothing(results):
    compute, expected = results
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_equal(compute(), expected)


def test_x64_changes_nothing(results, request):
    compute, expected = results
    request.getfixturevalue("x64")
    assert_equal(compute(), expected)
