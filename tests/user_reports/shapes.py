"""Reports about sizes that other libraries refuse, pad or get wrong."""

import flax.linen as nn
import jax
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.testing import oracle
from user_reports.helpers import (
    BFLOAT16,
    GEMM_ROWS,
    RECIPES,
    assert_close,
    assert_matmul_and_gradients,
    assert_same_bits,
    eager_and_jit,
    forward,
    normal,
)

WEIGHT_DIMS = (((1,), (0,)), ((), ()))


def _each_recipe(m, k, n, dtype=np.float32):
    for recipe in RECIPES:
        assert_matmul_and_gradients(
            normal(1, m, k, dtype=dtype), normal(2, k, n, dtype=dtype), recipe
        )


def odd_weight_of_896_by_712():
    _each_recipe(5, 896, 712)


def odd_input_of_50_by_4096():
    _each_recipe(50, 4096, 3)


def one_row():
    _each_recipe(1, 64, 48)
    _each_recipe(1, 129, 1)
    x, w = normal(1, 48), normal(2, 48, 5)
    y = eager_and_jit(fp8.matmul, x, w)
    assert_same_bits(y, fp8.matmul(x[None], w)[0])


def messages_name_the_dim_that_does_not_fit():
    x, w = normal(1, 2048, 767), normal(2, 767, 2)
    assert_close(fp8.matmul(x, w), forward(x, w, fp8.BlockScaling()))
    message = "lhs contracting dim 1 has size 767, rhs contracting dim 0 has size 768"
    w = np.ones((768, 2048), np.float32)
    for f in (fp8.matmul, lambda x, w: fp8.dot_general(x, w, WEIGHT_DIMS)):
        with pytest.raises(ValueError, match=message) as error:
            jax.eval_shape(f, x, w)
        assert "2048" not in str(error.value)


def ten_outputs():
    layer = nn.Dense(10, dot_general_cls=fp8.flax.linen.DotGeneral)
    x = normal(1, 6, 33)
    variables = layer.init(jax.random.key(0), x)
    kernel = np.asarray(variables["params"]["kernel"])
    y = jax.jit(layer.apply)(variables, x)
    assert_close(y, forward(x, kernel, fp8.BlockScaling()))
    assert_matmul_and_gradients(x, kernel, fp8.BlockScaling())
    with pytest.raises(ValueError, match=r"size 33.*size 34.*must be equal"):
        jax.eval_shape(fp8.matmul, x, np.ones((34, 10), np.float32))


def fifteen_outputs():
    _each_recipe(4, 32, 15)
    _each_recipe(4, 32, 15, BFLOAT16)
    lhs, rhs = normal(1, 4, 32), normal(2, 32, 15)
    want = forward(lhs, rhs, fp8.BlockScaling())
    for row in GEMM_ROWS:
        with fp8.force_kernel(row):
            assert_close(fp8.matmul(lhs, rhs), want)


def size_zero_in_every_dim():
    for recipe in RECIPES:

        def f(x, w, recipe=recipe):
            return fp8.matmul(x, w, recipe=recipe)

        for m, k, n in ((0, 5, 4), (3, 0, 4), (3, 5, 0), (0, 0, 0)):
            x, w = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
            assert_same_bits(eager_and_jit(f, x, w), np.zeros((m, n), np.float32))
            dx, dw = jax.jit(jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1)))(x, w)
            # With n or m = 0 a gradient is an empty sum, so that no other value than 0 is possible.
            assert_same_bits(dx, np.zeros((m, k), np.float32))
            assert_same_bits(dw, np.zeros((k, n), np.float32))
            y = jax.vmap(f, (0, None))(np.ones((2, m, k), np.float32), w)
            assert_same_bits(y, np.zeros((2, m, n), np.float32))
            y = jax.vmap(f, (None, 0))(x, np.ones((0, k, n), np.float32))
            assert y.shape == (0, m, n)


def last_dim_of_96():
    _each_recipe(7, 96, 96)
    for tile in ((1, 32), (1, 128), (32, 64)):  # one that divides 96, two that do not
        x, w = normal(1, 40, 96), normal(2, 9, 96)
        lhs, rhs = (fp8.quantize(y, "e4m3", tile, power_of_two=True) for y in (x, w))
        y = eager_and_jit(
            lambda lhs, rhs: fp8.scaled_dot_general(lhs, rhs, (((1,), (1,)), ((), ()))), lhs, rhs
        )
        pairs = [oracle.quantize_np(z, "e4m3fn", tile, power_of_two=True) for z in (x, w)]
        (lhs, lhs_scale), (rhs, rhs_scale) = pairs
        assert_same_bits(y, oracle.gemm_chain_np(lhs, rhs, lhs_scale, rhs_scale, tile, tile))


def twenty_thousand_rows_and_four():
    for m in (20001, 4):
        x, w = normal(1, m, 24), normal(2, 24, 3)
        for row in GEMM_ROWS:
            with fp8.force_kernel(row):
                assert_close(jax.jit(fp8.matmul)(x, w), forward(x, w, fp8.BlockScaling()))
