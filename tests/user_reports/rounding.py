"""Reports about saturation, NaN, infinity, rounding and the precision of sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8 import formats
from jax_fp8.testing import oracle
from user_reports.helpers import (
    BFLOAT16,
    DTYPES,
    E4M3FN,
    E5M2,
    GEMM_ROWS,
    RECIPES,
    assert_close,
    assert_same_bits,
    compiled_calls,
    eager_and_jit,
    forward,
    forward_and_gradients,
    gradients,
    normal,
)

TINY = np.float32(2.0**-126)


def quantized(x, fmt, **options):
    """values and scale of fp8.quantize(x), as float64; the same outside and under jit."""
    q = eager_and_jit(lambda x: fp8.quantize(x, fmt, **options), x)
    return q.values.astype(np.float64), q.scale.astype(np.float64)


def quantize_saturates_where_a_cast_gives_nan():
    x = np.float32([448, 464, 465, 1000, -1000])
    saturated = [448, 448, 448, 448, -448]
    np.testing.assert_array_equal(quantized(x, "e4m3", scale=1.0)[0], saturated)
    with np.errstate(invalid="ignore"):
        cast = x.astype(E4M3FN).astype(np.float32)
        np.testing.assert_array_equal(cast, [448, 448, np.nan, np.nan, np.nan])
        # 464 is exact in bf16, and 465 is 464 there: a tie, which rounds to the even 448.
        in_bf16 = x.astype(BFLOAT16)
        cast = in_bf16.astype(E4M3FN).astype(np.float32)
    np.testing.assert_array_equal(in_bf16.astype(np.float32)[:3], [448, 464, 464])
    np.testing.assert_array_equal(cast, [448, 448, 448, np.nan, np.nan])
    np.testing.assert_array_equal(quantized(in_bf16, "e4m3", scale=1.0)[0], saturated)


def saturation_is_an_option():
    x = np.float32([1e3, -1e3, 464, 1e6, -61440, 61439])
    for fmt, clipped, cast in (
        ("e4m3", [448, -448, 448, 448, -448, 448], [np.nan, np.nan, 448, np.nan, np.nan, np.nan]),
        (
            "e5m2",
            [1024, -1024, 448, 57344, -57344, 57344],
            [1024, -1024, 448, np.inf, -np.inf, 57344],
        ),
    ):
        np.testing.assert_array_equal(quantized(x, fmt, scale=1.0)[0], clipped)
        np.testing.assert_array_equal(quantized(x, fmt, scale=1.0, saturate=False)[0], cast)


def rounding_down_to_the_largest_value_is_not_saturation():
    x = np.float32([449, 463, 480])
    np.testing.assert_array_equal(quantized(x, "e4m3", scale=1.0)[0], [448, 448, 448])
    cast = quantized(x, "e4m3", scale=1.0, saturate=False)[0]
    np.testing.assert_array_equal(cast, [448, 448, np.nan])
    assert (formats.E4M3FN.max, formats.E4M3FN.saturation_threshold) == (448, 464)
    assert "rounds above it becomes NaN" in " ".join(fp8.quantize.__doc__.split())


def static_scale_saturates_and_keeps_nan():
    recipe = fp8.StaticScaling(input=2 / 448, weight=1 / 448)
    x, w = np.clip(normal(1, 6, 40), -2, 2), np.clip(normal(2, 40, 5), -1, 1)
    x[0, 7], x[1, 3] = 4, -4  # twice the calibrated largest
    y = eager_and_jit(lambda x, w: fp8.matmul(x, w, recipe=recipe), x, w)
    assert np.isfinite(y).all()
    assert_close(y, forward(x, w, recipe))
    clipped = np.clip(x, -2, 2)
    assert_same_bits(y, fp8.matmul(clipped, w, recipe=recipe))
    x[2, 9] = np.nan
    y = eager_and_jit(lambda x, w: fp8.matmul(x, w, recipe=recipe), x, w)
    assert np.isnan(y[2]).all()
    assert_close(y, forward(x, w, recipe))


def nan_reaches_loss_and_gradients():
    x, w, ct = normal(1, 6, 40), normal(2, 40, 5), normal(3, 6, 5)
    ct[1, 2] = np.nan
    for recipe in RECIPES:
        _, dx, dw = jax.jit(forward_and_gradients, static_argnums=3)(x, w, ct, recipe)
        assert np.isnan(dx[1]).all()
        assert np.isnan(dw[:, 2]).all()
        for got, want in zip((dx, dw), gradients(x, w, ct, recipe), strict=True):
            assert_close(got, want)  # and every other entry is what it is without the NaN

    def loss(w, x):
        return jnp.mean(fp8.matmul(x, w) ** 2)

    x[4, 0] = np.nan
    value, dw = jax.jit(jax.value_and_grad(loss))(w, x)
    assert np.isnan(value)
    assert np.isnan(dw).all()


def nan_and_infinity_leave_the_scale_alone():
    x = np.float32([[np.nan, np.inf, -np.inf, 2.0**-127], [np.nan, 3, np.inf, 448]])
    for fmt, infinity in (("e4m3", np.nan), ("e5m2", np.inf)):
        for power_of_two in (False, True):
            values, scale = quantized(x, fmt, tile=(1, -1), power_of_two=power_of_two)
            assert scale[0] == TINY
            np.testing.assert_array_equal(values[0], [np.nan, infinity, -infinity, 0.5])
            np.testing.assert_array_equal(values[1, [0, 2]], [np.nan, infinity])
            assert np.isfinite(scale[1])
            assert values[1, 3] * scale[1] == 448


def power_of_two_scales_are_exact_at_every_exponent():
    # Largest values are 1.75 times a power of two: amax just there, one step below, one above.
    exponents = np.arange(-126, 128)
    amax = np.ldexp(np.float32(1.75), exponents)
    x = np.concatenate([amax, np.nextafter(amax, np.float32(0)), np.nextafter(amax, np.inf)])
    for fmt in formats.ALL:
        values, scale = quantized(x, fmt, tile=(1,), power_of_two=True)
        shift = np.log2(fmt.max / 1.75)
        want = np.exp2(np.maximum(exponents - shift, -126))
        above = np.exp2(np.maximum(exponents + 1 - shift, -126))
        np.testing.assert_array_equal(scale, np.concatenate([want, want, above]))
        assert (np.abs(x) / scale <= fmt.max).all()
        np.testing.assert_array_equal(values[: amax.size] * scale[: amax.size], amax)


def mx_scales_hold_their_smallest_value_and_nan():
    values = np.zeros((2, 32), E4M3FN)
    values[0], values[1, 5] = 1, 1  # sums of 32 and of 1
    exponents = np.uint8([[0], [255]]).view(formats.E8M0)  # 2^-127, NaN
    one = np.uint8([[127]]).view(formats.E8M0)
    lhs_scale = np.broadcast_to(exponents[0], (2, 1))
    y = eager_and_jit(fp8.scaled_matmul, values, values[:1].T, lhs_scale, one)
    assert_same_bits(y, np.float32([[2.0**-122], [2.0**-127]]))
    y = eager_and_jit(fp8.scaled_matmul, values, values[:1].T, exponents, one)
    assert_same_bits(y, np.float32([[2.0**-122], [np.nan]]))


def mx_rules_of_one_tile():
    nan_and_infinity_leave_the_scale_alone()
    power_of_two_scales_are_exact_at_every_exponent()
    mx_scales_hold_their_smallest_value_and_nan()


def fnuz_is_refused_by_name():
    x, one = np.ones((4, 4), np.float32), np.float32(1)
    fnuz = [jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz]
    for dtype in fnuz:
        name = np.dtype(dtype).name
        raw, ocp = jnp.ones((4, 4), dtype), jnp.ones((4, 4), E4M3FN)
        for refused in (
            lambda dtype=dtype: fp8.quantize(x, dtype),
            lambda name=name: fp8.quantize(np.float32([np.inf]), name),
            lambda raw=raw, ocp=ocp: fp8.scaled_matmul(raw, ocp, one, one),
            lambda raw=raw, ocp=ocp: jax.jit(fp8.scaled_matmul)(ocp, raw, one, one),
            lambda raw=raw: fp8.matmul(raw, x),
            lambda dtype=dtype: fp8.TensorScaling(input_format=dtype),
        ):
            with pytest.raises(TypeError, match=f"{name} is an FNUZ format.*convert the values"):
                refused()


def float16_results_do_not_overflow_before_the_scale():
    recipes = (*RECIPES, fp8.StaticScaling())
    for k, value in ((64, 1), (128, 16)):  # 448 · 448 · 64 is far above float16's largest
        x, w = np.full((4, k), value, np.float16), np.full((k, 8), value, np.float16)
        for recipe in recipes:
            y = jax.jit(lambda x, w, recipe=recipe: fp8.matmul(x, w, recipe=recipe))(x, w)
            assert_same_bits(y, np.full((4, 8), k * value**2, np.float16))
    x, w = normal(1, 7, 128, dtype=np.float16), normal(2, 128, 6, dtype=np.float16)
    y = fp8.matmul(x, w)
    assert y.dtype == np.float16
    assert_close(y, forward(x, w, fp8.BlockScaling(), np.float16))


def quantisation_survives_the_compiler():
    x = np.linspace(1, 2, 300, dtype=np.float32).reshape(3, 100)

    def round_trip(x):
        return fp8.dequantize(fp8.quantize(x, "e4m3", (1, 32)))

    values, scale = oracle.quantize_np(x, "e4m3fn", (1, 32))
    want = oracle.dequantize_np(values, scale, (1, 32)).astype(np.float32)
    assert_same_bits(jax.jit(round_trip)(x), want)
    assert (want != x).mean() > 0.8
    calls = compiled_calls(round_trip, x)
    assert calls["jax_fp8.quantize.v1"] == calls["jax_fp8.dequantize.v1"] == 1
    y = jax.jit(fp8.matmul)(x, np.eye(100, dtype=np.float32))
    assert_close(y, forward(x, np.eye(100, dtype=np.float32), fp8.BlockScaling()))
    assert (np.asarray(y) != x).mean() > 0.8


def small_products_are_not_lost_beside_a_large_one():
    # 256 · 256, then 4095 · 2^-6: 23 bits, which FP32 holds and a 13-bit accumulator loses whole.
    k = 4096
    lhs, rhs = np.full((3, k), 0.125, E4M3FN), np.full((k, 2), 0.125, E4M3FN)
    lhs[:, 0] = rhs[0] = 256
    x, w = normal(1, 4, k), normal(2, k, 5)
    for row in GEMM_ROWS:
        with fp8.force_kernel(row):
            y = eager_and_jit(fp8.scaled_matmul, lhs, rhs, np.float32(1), np.float32(1))
            assert_same_bits(y, np.full((3, 2), 65536 + 4095 / 64, np.float32))
            assert_close(fp8.matmul(x, w), forward(x, w, fp8.BlockScaling()))


def subnormals_are_kept():
    assert fp8.E4M3FN.smallest_subnormal == 2.0**-9
    assert fp8.E5M2.smallest_subnormal == 2.0**-16
    for fmt in formats.ALL:
        steps = 2**fmt.mantissa_bits
        x = np.float32(fmt.smallest_subnormal) * np.arange(-steps, steps + 1, dtype=np.float32)
        np.testing.assert_array_equal(quantized(x, fmt, scale=1.0)[0], x)
        # As FP32 subnormals: codes times 2^-126, in and out of the quantiser.
        small = x * TINY
        assert np.count_nonzero(small) == 2 * steps
        q = eager_and_jit(lambda x, fmt=fmt: fp8.quantize(x, fmt, scale=TINY), small)
        np.testing.assert_array_equal(q.values.astype(np.float32), x)
        assert_same_bits(eager_and_jit(fp8.dequantize, q), small)
    ones = np.ones((1, 1), E5M2)
    for row in GEMM_ROWS:
        with fp8.force_kernel(row):
            for lhs, rhs in ((2.0**-75, 2.0**-74), (2.0**-126, 2.0**-16), (3 * 2.0**-75, 2.0**-75)):
                lhs, rhs = np.float32(lhs), np.float32(rhs)
                y = eager_and_jit(fp8.scaled_matmul, ones, ones, lhs, rhs)
                assert_same_bits(y, np.float32([[lhs * rhs]]))
                assert y[0, 0] != 0
            least = np.full((1, 1), 2.0**-16, E5M2)
            y = eager_and_jit(fp8.scaled_matmul, least, least, np.float32(2.0**-117), np.float32(1))
            assert_same_bits(y, np.float32([[2.0**-149]]))


def every_code_decodes_exactly_under_jit():
    codes = np.arange(256, dtype=np.uint8)
    for fmt in formats.ALL:
        values = codes.view(fmt.dtype)
        for scale in np.float32([1, 2.0**-126, 2.0**-120, 3.0, 2.0**100]):
            q = fp8.ScaledArray(values, scale.reshape(1), (256,))
            with np.errstate(over="ignore"):
                want = (values.astype(np.float64) * np.float64(scale)).astype(np.float32)
            assert_same_bits(jax.jit(fp8.dequantize)(q), want)
        for dtype in DTYPES:
            q = fp8.ScaledArray(values, np.ones(1, np.float32), (256,))
            got = jax.jit(fp8.dequantize, static_argnums=1)(q, dtype)
            with np.errstate(over="ignore"):
                assert_same_bits(got, values.astype(np.float32).astype(dtype))
