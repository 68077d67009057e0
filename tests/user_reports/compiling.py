"""Reports about FP8 that a compiler drops or replaces, and about operations without FP8."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8 import formats
from user_reports.helpers import (
    DTYPES,
    E4M3FN,
    RECIPES,
    assert_same_bits,
    compiled_calls,
    normal,
)

GEMM = "jax_fp8.gemm.v1"
ONE = np.float32(1)


def _assert_gemms(count, f, *args):
    calls = compiled_calls(f, *args)
    assert (calls[GEMM], calls["dot"]) == (count, 0)
    assert "dot_general" not in str(jax.make_jaxpr(f)(*args))


def scaled_calls_are_our_kernel():
    lhs, rhs = np.ones((8, 32), E4M3FN), np.ones((32, 16), E4M3FN)
    _assert_gemms(1, fp8.scaled_matmul, lhs, rhs, ONE, ONE)
    for dtype in DTYPES:
        _assert_gemms(
            1,
            lambda *args, dtype=dtype: fp8.scaled_matmul(*args, preferred_element_type=dtype),
            *(lhs, rhs, ONE, ONE),
        )
    x, w = normal(1, 8, 32), normal(2, 32, 16)
    for recipe in RECIPES:
        _assert_gemms(1, lambda x, w, recipe=recipe: fp8.matmul(x, w, recipe=recipe), x, w)


def forward_and_both_gradients_are_our_kernel():
    numbers = (((2,), (1,)), ((0,), (0,)))
    x, w = normal(1, 2, 8, 32), normal(2, 2, 32, 16)
    for recipe in RECIPES:
        for dtype in DTYPES:

            def loss(x, w, recipe=recipe):
                y = fp8.dot_general(x, w, numbers, recipe=recipe)
                return jnp.sum(jnp.square(y.astype(jnp.float32)))

            args = x.astype(dtype), w.astype(dtype)
            _assert_gemms(3, jax.value_and_grad(loss, (0, 1)), *args)
        _assert_gemms(2, jax.value_and_grad(loss), x, w)


def flax_dense_is_our_kernel():
    layer = nn.Dense(16, dot_general_cls=fp8.flax.linen.DotGeneral)
    x = normal(1, 8, 32)
    variables = layer.init(jax.random.key(0), x)

    def loss(variables, x):
        return jnp.sum(layer.apply(variables, x) ** 2)

    _assert_gemms(1, layer.apply, variables, x)
    _assert_gemms(3, jax.value_and_grad(loss, (0, 1)), variables, x)
    _assert_gemms(2, jax.value_and_grad(loss), variables, x)


def a_missing_kernel_is_an_error_and_not_a_fallback():
    x, w = normal(1, 8, 32), normal(2, 32, 16)

    def lower(platform):
        return jax.jit(fp8.matmul).trace(x, w).lower(lowering_platforms=(platform,)).as_text()

    with fp8.require_kernel():
        assert GEMM in lower("cpu")
        for platform in ("cuda", "rocm", "tpu"):
            message = f"no kernel for the platform {platform}; kernels exist for cpu"
            with pytest.raises(NotImplementedError, match=message):
                lower(platform)


def what_works_is_a_list():
    x, w = normal(1, 3, 6, 16), normal(2, 16, 5)
    for fmt in formats.ALL:
        for dtype in DTYPES:
            q = fp8.quantize(x.astype(dtype), fmt, (1, 8))
            assert (q.dtype, q.scale.shape) == (fmt.dtype, (3, 6, 2))
            for out in DTYPES:
                assert fp8.dequantize(q, out).dtype == out
        rhs = fp8.quantize(w, fmt, (8, 1))
        y = fp8.scaled_dot_general(q, rhs, (((2,), (0,)), ((), ())))

        def matrix(q, rhs=rhs):
            return fp8.scaled_dot_general(q, rhs, (((1,), (0,)), ((), ())))

        # Arrays with their scales go through jit, vmap, scan and tree_map.
        mapped = jax.jit(jax.vmap(matrix))(q)
        _, scanned = jax.lax.scan(lambda carry, q, f=matrix: (carry, f(q)), 0, q)
        halved = fp8.scaled_dot_general(
            jax.tree.map(lambda leaf: leaf[:2], q), rhs, (((2,), (0,)), ((), ()))
        )
        for got, want in ((mapped, y), (scanned, y), (halved, y[:2])):
            assert_same_bits(got, want)
        for recipe in RECIPES:
            recipe = type(recipe)(input_format=fmt, weight_format=fmt)
            y = fp8.einsum("bld,df->blf", x, w, recipe=recipe)
            assert_same_bits(fp8.matmul(x, w, recipe=recipe), y)
    for refused in (jnp.int8, jnp.uint8, jnp.bool_, jnp.complex64):
        with pytest.raises(TypeError, match="float32, bfloat16 and float16 are offered"):
            fp8.matmul(jnp.ones((2, 2), refused), jnp.ones((2, 2)))
