"""Reports about zero, tiny, huge and empty amax."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8
from jax_fp8 import formats
from jax_fp8.testing import oracle
from user_reports.helpers import (
    BFLOAT16,
    RECIPES,
    assert_close,
    assert_matmul_and_gradients,
    assert_same_bits,
    eager_and_jit,
    forward,
    gradients,
    normal,
)


def _quantizes_as_oracle(x, fmt, tile, **options):
    q = eager_and_jit(lambda x: fp8.quantize(x, fmt, tile, **options), x)
    values, scale = oracle.quantize_np(x, fmt.name, tile, **options)
    assert_same_bits(q.values, values)
    assert_same_bits(q.scale, scale)
    return q


def zeros_have_scale_one():
    x = normal(1, 4, 200)
    x[2] = 0
    for fmt in formats.ALL:
        q = _quantizes_as_oracle(x, fmt, (1, -1))
        assert q.scale[2] == 1
        assert not q.values[2].astype(np.float32).any()
    w = normal(2, 200, 3)
    for recipe in RECIPES:
        y = eager_and_jit(lambda x, w, recipe=recipe: fp8.matmul(x, w, recipe=recipe), x, w)
        np.testing.assert_array_equal(y[2], 0)
        assert_close(y, forward(x, w, recipe))
        assert_matmul_and_gradients(x, w, recipe)
        assert_matmul_and_gradients(np.zeros_like(x), np.zeros_like(w), recipe)
    assert fp8.quantize(np.zeros((3, 5), np.float32)).scale == 1


def a_zero_block_stays_zero():
    x, w = normal(1, 4, 300), normal(2, 300, 140)
    x[1, 128:256] = 0
    w[128:256, :128] = 0
    q = _quantizes_as_oracle(x, fp8.E4M3FN, (1, 128))
    assert q.scale[1, 1] == 1
    assert not q.values[1, 128:256].astype(np.float32).any()
    q = _quantizes_as_oracle(w, fp8.E4M3FN, (128, 128))
    assert q.scale[1, 0] == 1
    assert_matmul_and_gradients(x, w, fp8.BlockScaling())


def scales_stay_normal_and_finite():
    shape = np.float32([1, -0.5, 0.25, 0.75])
    for amax in np.float32([1e-30, 1e-36, 1e-38, 1e-45, 3e38]):
        x = (amax * shape).reshape(1, 4)
        assert x[0, 0] == amax
        for fmt in formats.ALL:
            for power_of_two in (False, True):
                q = _quantizes_as_oracle(x, fmt, (1, -1), power_of_two=power_of_two)
                assert 2.0**-126 <= q.scale < np.inf
                real = q.values.astype(np.float64) * q.scale
                # Half a step of the format, or of its smallest code under the smallest scale.
                step = np.maximum(np.abs(x) * fmt.eps, 2.0**-126 * fmt.smallest_subnormal)
                assert (np.abs(real - x) <= step / 2 * (1 + 1e-6)).all()
        for recipe in RECIPES:
            y = eager_and_jit(
                lambda x, w, recipe=recipe: fp8.matmul(x, w, recipe=recipe),
                x,
                np.eye(4, dtype=np.float32),
            )
            assert_close(y, forward(x, np.eye(4, dtype=np.float32), recipe))
            assert (y[0, 0] != 0) == (amax > 1e-40)  # 1e-45 is below 2^-126 · 2^-9
            assert np.isfinite(y).all()


def rowwise_bfloat16_gradients_stay_finite():
    recipe = fp8.RowScaling(power_of_two=True)
    x, w = normal(1, 16, 48, dtype=BFLOAT16), normal(2, 48, 24, dtype=BFLOAT16)
    rows = np.exp2(np.linspace(-100, 20, 16))[:, None]  # of very different size
    ct = (normal(3, 16, 24) * rows).astype(BFLOAT16)
    for fmt in formats.ALL:
        q = _quantizes_as_oracle(ct, fmt, (1, -1), power_of_two=True)
        mantissa, _ = np.frexp(q.scale)
        np.testing.assert_array_equal(mantissa, 0.5)
        assert q.scale.dtype == np.float32

    def norm_and_gradients(x, w):
        _, vjp = jax.vjp(lambda x, w: fp8.matmul(x, w, recipe=recipe), x, w)
        dx, dw = vjp(ct)
        return jnp.sqrt(jnp.sum(dw.astype(jnp.float32) ** 2)), dx, dw

    norm, *got = jax.jit(norm_and_gradients)(x, w)
    assert 0 < float(norm) < np.inf
    for gradient, want in zip(got, gradients(x, w, ct, recipe), strict=True):
        assert gradient.dtype == BFLOAT16
        assert_close(gradient, want)


def amax_of_nothing_is_zero():
    for shape in ((0, 128), (3, 0), (0, 0), (0,)):
        for tile in (None, (-1,), (1,), (128,)):
            q = eager_and_jit(
                lambda x, tile=tile: fp8.quantize(x, "e4m3", tile), np.zeros(shape, np.float32)
            )
            assert q.values.shape == shape
            np.testing.assert_array_equal(q.scale, np.ones_like(q.scale))
            assert_same_bits(eager_and_jit(fp8.dequantize, q), np.zeros(shape, np.float32))
    for recipe in RECIPES:
        for m, k in ((0, 8), (3, 0)):
            x, w = np.zeros((m, k), np.float32), np.ones((k, 4), np.float32)
            y = eager_and_jit(lambda x, w, recipe=recipe: fp8.matmul(x, w, recipe=recipe), x, w)
            assert_same_bits(y, np.zeros((m, 4), np.float32))


def rowwise_training_survives_growing_weights():
    recipe = fp8.RowScaling()
    x = normal(1, 16, 32) * np.exp2(np.linspace(-6, 6, 16, dtype=np.float32))[:, None]
    w = normal(2, 32, 12) * np.float32(1e-9)

    def step(w, _):
        def loss(w):
            y = fp8.matmul(x, w, recipe=recipe)
            return jnp.sqrt(jnp.mean(y * y))

        value, dw = jax.value_and_grad(loss)(w)
        scale = fp8.quantize(jax.lax.stop_gradient(w), "e4m3", (-1, 1)).scale
        saturated = jnp.sum(jnp.abs(w) / scale >= fp8.E4M3FN.saturation_threshold)
        grown = w * 1.1 + 1e-3 * dw * jnp.max(jnp.abs(w))
        return grown, (value, jnp.max(jnp.abs(dw)), saturated)

    last, (loss, largest, saturated) = jax.lax.scan(step, w, length=500)
    assert np.isfinite(loss).all()
    assert np.isfinite(largest).all()
    assert loss[-1] > 1e19 * loss[0]
    np.testing.assert_array_equal(saturated, 0)
    last = np.asarray(last)
    assert_close(fp8.matmul(x, last, recipe=recipe), forward(x, last, recipe))


def a_zero_channel_leaves_the_others_alone():
    x, w = normal(1, 6, 40), normal(2, 40, 5)
    w[:, 3] = 0
    q = _quantizes_as_oracle(w, fp8.E4M3FN, (-1, 1))
    assert q.scale[0, 3] == 1
    for recipe in RECIPES:
        y = np.asarray(fp8.matmul(x, w, recipe=recipe))
        np.testing.assert_array_equal(y[:, 3], 0)
        assert_close(y, forward(x, w, recipe))
    recipe, others = fp8.RowScaling(), [0, 1, 2, 4]
    y = np.asarray(fp8.matmul(x, w, recipe=recipe))
    assert_same_bits(y[:, others], fp8.matmul(x, w[:, others], recipe=recipe))
    assert_matmul_and_gradients(x, w, recipe)
