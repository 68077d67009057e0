"""The derivative rule: what it computes, with how many GEMMs, and in which dtypes."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.testing import oracle

RECIPES = {
    "tensor": fp8.TensorScaling(),
    "row": fp8.RowScaling(),
    "block": fp8.BlockScaling(),
    "static": fp8.StaticScaling(input=2.0**-6, weight=2.0**-8, gradient=2.0**-10),
}
GEMM = "jax_fp8.gemm.v1"


def normal(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def relative_error(x, y):
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)


def quantized(x, recipe, role, contracted):
    """x (r, c) quantised by the oracle along the axis that a GEMM contracts, dequantised."""
    rows, k = recipe.tile(role)
    tile = (rows, k) if contracted == 1 else (k, rows)
    static = recipe.static_scale(role)
    scale = None if static is None else np.full((1, 1), static, np.float32)
    fmt = recipe.format(role).name
    values, scale = oracle.quantize_np(x, fmt, tile, scale=scale, power_of_two=recipe.power_of_two)
    return oracle.dequantize_np(values, scale, tile)


def assert_product(actual, lhs, rhs, dtype=np.float32):
    """actual == lhs · rhs within the FP32 model's bound; lhs and rhs are float64."""
    exact, magnitude = lhs @ rhs, np.abs(lhs) @ np.abs(rhs)
    eps = float(ml_dtypes.finfo(dtype).eps)
    bound = (2 * lhs.shape[1] + 4) * 2.0**-24 * magnitude
    bound += 0.5 * eps * (np.abs(exact) + bound) + 2.0**-140
    error = np.abs(np.asarray(actual, np.float64) - exact)
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), (worst, error[worst], bound[worst])


@pytest.mark.parametrize("shape", [(64, 48, 32), (1, 1, 1), (5, 130, 300), (257, 3, 129)])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_product_and_gradients_are_the_three_gemms_of_the_contract(recipe, shape):
    m, n, k = shape
    x, w, g = normal(0, (m, k)), normal(1, (k, n)), normal(2, (m, n)) * np.float32(1e-3)
    y, vjp = jax.vjp(functools.partial(fp8.matmul, recipe=recipe), x, w)
    dx, dw = vjp(jnp.asarray(g))
    assert_product(y, quantized(x, recipe, "input", 1), quantized(w, recipe, "weight", 0))
    assert_product(dx, quantized(g, recipe, "gradient", 1), quantized(w, recipe, "weight", 1).T)
    assert_product(dw, quantized(x, recipe, "input", 0).T, quantized(g, recipe, "gradient", 0))


@pytest.mark.parametrize("lhs_dim", [0, 1])
@pytest.mark.parametrize("rhs_dim", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_gradients_in_every_layout_equal_those_of_the_plain_layout(recipe, lhs_dim, rhs_dim):
    x, w, g = normal(0, (37, 70)), normal(1, (70, 33)), normal(2, (37, 33))
    y, vjp = jax.vjp(functools.partial(fp8.matmul, recipe=recipe), x, w)
    dx, dw = vjp(g)
    lhs, rhs = (x, x.T)[lhs_dim == 0], (w, w.T)[rhs_dim == 1]
    dims = (((lhs_dim,), (rhs_dim,)), ((), ()))
    out, vjp = jax.vjp(lambda a, b: fp8.dot_general(a, b, dims, recipe=recipe), lhs, rhs)
    da, db = vjp(g)
    np.testing.assert_array_equal(out, y)
    np.testing.assert_array_equal(da if lhs_dim == 1 else da.T, dx)
    np.testing.assert_array_equal(db if rhs_dim == 0 else db.T, dw)


def test_two_sided_window_of_forward_and_gradient_errors():
    # Normal data: E4M3·E4M3 is 3.6-3.8 % off, E5M2·E4M3 5.7-6.0 %, by theory and for any recipe.
    x, w, g = normal(0, (256, 256)), normal(1, (256, 256)), normal(2, (256, 256)) * 1e-4
    for recipe in (fp8.TensorScaling(), fp8.RowScaling(), fp8.BlockScaling()):
        y, vjp = jax.vjp(functools.partial(fp8.matmul, recipe=recipe), x, w)
        dx, dw = vjp(g.astype(np.float32))
        assert 0.0355 < relative_error(y, x.astype(np.float64) @ w) < 0.0385
        assert 0.0565 < relative_error(dx, g.astype(np.float64) @ w.T) < 0.0605
        assert 0.0565 < relative_error(dw, x.T.astype(np.float64) @ g) < 0.0605


def test_roles_choose_tiles():
    q, k = normal(0, (20, 256)), normal(1, (20, 256)) * np.exp(normal(3, (20, 1)))
    dims = (((1,), (1,)), ((), ()))
    recipe = fp8.BlockScaling()
    out = fp8.dot_general(q, k, dims, roles=("input", "input"))
    pair = (quantized(q, recipe, "input", 1), quantized(k, recipe, "input", 1).T)
    assert_product(out, *pair)
    as_weight = fp8.dot_general(q, k, dims)
    assert (np.asarray(out) != np.asarray(as_weight)).any()


# --- How many GEMMs, which residuals --------------------------------------------------------------


def loss(x, w):
    return jnp.mean(jnp.sin(fp8.matmul(x, w)) ** 2)


def count(text, name):
    return len(re.findall(rf"\b{re.escape(name)}\b", text))


@pytest.mark.parametrize(
    ("argnums", "gemms"), [((0, 1), 3), ((0,), 2), ((1,), 2)], ids=["both", "lhs", "rhs"]
)
def test_a_frozen_operand_costs_no_gemm(argnums, gemms):
    x, w = normal(0, (8, 16)), normal(1, (16, 4))
    step = jax.value_and_grad(loss, argnums)
    lowered = jax.jit(step).lower(x, w)
    assert count(lowered.as_text(), GEMM) == gemms
    compiled = lowered.compile().as_text()
    assert compiled.count(f'custom_call_target="{GEMM}"') == gemms
    assert " dot(" not in compiled
    assert "dot_general" not in str(jax.make_jaxpr(step)(x, w))


def test_each_operand_is_read_once_by_one_quantiser():
    x, w = normal(0, (8, 16)), normal(1, (16, 4))
    step = jax.value_and_grad(functools.partial(loss), (0, 1))
    with_row = jax.value_and_grad(
        lambda x, w: jnp.mean(jnp.sin(fp8.matmul(x, w, recipe=fp8.RowScaling())) ** 2), (0, 1)
    )
    for fn, pairs in (
        (step, 2),
        (with_row, 3),
    ):  # block: w's tile serves both axes
        text = jax.jit(fn).lower(x, w).as_text()
        assert count(text, "jax_fp8.quantize_two_axes.v1") == pairs
        assert count(text, "jax_fp8.quantize.v1") == 3 - pairs


def test_residuals_of_a_scan_over_layers_are_fp8():
    weights, x = normal(0, (8, 128, 128)) / 11, normal(1, (256, 128)).astype(jnp.bfloat16)

    def model(weights, x, recipe):
        def layer(carry, w):
            y = fp8.matmul(carry, w, recipe=recipe, preferred_element_type=jnp.bfloat16)
            return jnp.tanh(y), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))

    for recipe in RECIPES.values():
        step = jax.jit(jax.grad(functools.partial(model, recipe=recipe)))
        text = step.lower(weights, x).compile().as_text()
        forward = next(line for line in text.splitlines() if " while(" in line)
        carried = re.findall(r"(\w+)\[8,(\d+),128\]", forward.split(" while(")[0])
        # Stacked: the FP8 copies of x (256 rows) and w (128), the weights that are the input, and
        # two bfloat16 copies of the activation, which belong to tanh (one copy from jax 0.12 on).
        assert ("f8e4m3fn", "256") in carried
        assert ("f8e4m3fn", "128") in carried
        assert carried.count(("f32", "128")) == 1
        assert carried.count(("bf16", "256")) <= 2
        assert ("f32", "256") not in carried


def test_eager_residual_of_one_side_is_the_other_sides_backward_copy():
    x, w = normal(0, (8, 256)), normal(1, (256, 4))
    _, vjp = jax.vjp(lambda w: fp8.matmul(x, w, recipe=fp8.RowScaling()), w)
    kept = {(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(vjp)}
    assert ("float8_e4m3fn", (8, 256)) in kept
    assert ("float8_e4m3fn", (256, 4)) not in kept


# --- dtypes ---------------------------------------------------------------------------------------

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]


@pytest.mark.parametrize("rhs_dtype", FLOATS)
@pytest.mark.parametrize("lhs_dtype", FLOATS)
def test_each_cotangent_has_the_dtype_of_its_primal(lhs_dtype, rhs_dtype):
    x, w = jnp.asarray(normal(0, (6, 40)), lhs_dtype), jnp.asarray(normal(1, (40, 5)), rhs_dtype)
    out = fp8.matmul(x, w)
    assert out.dtype == (lhs_dtype if lhs_dtype == rhs_dtype else jnp.float32)
    dx, dw = jax.grad(lambda x, w: fp8.matmul(x, w).astype(jnp.float32).sum(), (0, 1))(x, w)
    assert (dx.dtype, dw.dtype) == (lhs_dtype, rhs_dtype)
    tangent = jax.jvp(fp8.matmul, (x, w), (x, w))[1]
    assert tangent.dtype == out.dtype
    # Twice in one expression, under a multiplication, in scan: where a wrong dtype would surface.
    grads = jax.grad(
        lambda x, w: ((2 * fp8.matmul(x, w)) * fp8.matmul(x, w)).sum().astype(jnp.float32)
    )
    assert grads(x, w).dtype == lhs_dtype

    def body(c, _):
        return c + fp8.matmul(x, w).sum().astype(c.dtype), None

    scanned = jax.grad(
        lambda w: (
            jax.lax.scan(body, jnp.float32(0), None, length=2)[0] + w.sum().astype(jnp.float32)
        )
    )
    assert scanned(w).dtype == rhs_dtype


def test_gradient_is_one_rounding_to_the_dtype_of_the_primal():
    x, w, g = normal(0, (16, 64)), normal(1, (64, 8)), normal(2, (16, 8))
    bf16 = lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32)
    x, w = bf16(x), bf16(w)
    exact = jax.vjp(fp8.matmul, x, w)[1](g)
    rounded = jax.vjp(
        functools.partial(fp8.matmul, preferred_element_type=jnp.float32),
        jnp.asarray(x, jnp.bfloat16),
        jnp.asarray(w, jnp.bfloat16),
    )[1](g)
    for full, narrow in zip(exact, rounded, strict=True):
        np.testing.assert_array_equal(np.asarray(full).astype(ml_dtypes.bfloat16), narrow)


# --- Straight-through estimator -------------------------------------------------------------------


def test_mask_saturated_stops_gradients_exactly_where_the_forward_pass_saturated():
    x = np.float32([[448.0, 463.99, 464.0, -464.0, 1e9, np.inf, 1.0, np.nan]])
    w = np.eye(8, dtype=np.float32)
    masked = fp8.StaticScaling(ste="mask_saturated")
    for recipe, expected in (
        (masked, [1, 1, 0, 0, 0, 0, 1, 1]),
        (fp8.StaticScaling(), [1] * 8),
    ):
        dx = jax.grad(lambda x: fp8.matmul(x, w, recipe=recipe).sum())(x)  # noqa: B023
        np.testing.assert_array_equal(dx[0], np.float32(expected))
        dw = jax.grad(lambda w: fp8.matmul(w.T, np.ones_like(x.T), recipe=recipe).sum())(x.T)  # noqa: B023
        np.testing.assert_array_equal(np.asarray(dw)[:, 0], np.float32(expected))


def test_computed_scales_never_saturate_so_the_estimators_agree():
    x, w = normal(0, (16, 200)) * 1e3, normal(1, (200, 8))
    for make in (fp8.TensorScaling, fp8.RowScaling, fp8.BlockScaling):
        grads = [
            jax.grad(lambda x, w: fp8.matmul(x, w, recipe=make(ste=ste)).sum(), (0, 1))(x, w)  # noqa: B023
            for ste in ("pass", "mask_saturated")
        ]
        for a, b in zip(*grads, strict=True):
            np.testing.assert_array_equal(a, b)


# --- Forward mode and second order ----------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_forward_tangent_uses_the_stored_copies(recipe):
    x, w, dx, dw = (
        normal(0, (16, 150)),
        normal(1, (150, 8)),
        normal(2, (16, 150)),
        normal(3, (150, 8)),
    )
    tangent = jax.jvp(functools.partial(fp8.matmul, recipe=recipe), (x, w), (dx, dw))[1]
    expected = dx @ quantized(w, recipe, "weight", 1) + quantized(x, recipe, "input", 0) @ dw
    assert relative_error(tangent, expected) < 1e-5


def two_layers(matmul, x):
    def value(weights):
        return jnp.mean(jnp.sin(matmul(jnp.tanh(matmul(x, weights[0])), weights[1])) ** 2)

    return value


@pytest.mark.parametrize("recipe", ["tensor", "row", "block"])
def test_hessian_vector_products_of_two_layers(recipe):
    recipe = RECIPES[recipe]
    x = normal(0, (64, 32))
    weights = (normal(1, (32, 48)) / 6, normal(2, (48, 16)) / 7)
    u, v = (tuple(normal(seed + i, w.shape) for i, w in enumerate(weights)) for seed in (10, 20))

    def products(matmul, v):
        gradient = jax.grad(two_layers(matmul, x))
        forward = jax.jvp(gradient, (weights,), (v,))[1]
        inner = lambda p: sum(jnp.vdot(a, b) for a, b in zip(gradient(p), v, strict=True))
        return forward, jax.grad(inner)(weights)

    ours, exact = products(functools.partial(fp8.matmul, recipe=recipe), v), products(jnp.matmul, v)
    for mode in (0, 1):
        for a, b in zip(ours[mode], exact[mode], strict=True):
            assert relative_error(a, b) < 0.10
            assert relative_error(a, b) > 0.01  # the quantisers are on
    for a, b in zip(*ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    # Symmetric up to the quantisers: u·Hv and v·Hu differ by little beside |u||Hv|.
    other = products(functools.partial(fp8.matmul, recipe=recipe), u)[0]
    dot = lambda a, b: sum(float(jnp.vdot(p, q)) for p, q in zip(a, b, strict=True))
    size = np.sqrt(dot(u, u) * dot(ours[0], ours[0]))
    assert abs(dot(u, ours[0]) - dot(v, other)) < 0.01 * size


def test_second_order_of_a_bilinear_form_has_its_cross_terms():
    x, w = normal(0, (4, 24)), normal(1, (24, 3))
    f = lambda x, w: jnp.sum(fp8.matmul(x, w))
    cross = jax.jacfwd(jax.grad(f, 0), 1)(x, w)  # d2 f / dx dw
    exact = jax.jacfwd(jax.grad(lambda x, w: jnp.sum(x @ w), 0), 1)(x, w)
    np.testing.assert_allclose(cross, exact, rtol=1e-5)
    turned = np.moveaxis(np.asarray(exact), (0, 1), (2, 3))  # d2 f / dw dx
    for outer, inner in itertools.product((jax.jacfwd, jax.jacrev), repeat=2):
        np.testing.assert_allclose(outer(inner(f, 1), 0)(x, w), turned, rtol=1e-5)


def test_gradients_of_empty_operands_are_zero():
    for m, n, k in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        x, w = jnp.ones((m, k)), jnp.ones((k, n))
        y, (dx, dw) = fp8.matmul(x, w), jax.grad(lambda *a: fp8.matmul(*a).sum(), (0, 1))(x, w)
        np.testing.assert_array_equal(y, np.zeros((m, n)))
        np.testing.assert_array_equal(dx, np.zeros((m, k)))
        np.testing.assert_array_equal(dw, np.zeros((k, n)))


def test_gradient_survives_leaving_the_context_of_the_forward_call():
    x, w = normal(0, (4, 8)), normal(1, (8, 4))
    with fp8.force_kernel("scalar"):
        _, vjp = jax.vjp(fp8.matmul, x, w)
    jaxpr = str(jax.make_jaxpr(vjp)(jnp.ones((4, 4))))
    assert "kernel='scalar'" in jaxpr
