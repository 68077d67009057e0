"""jit, vmap, scan, remat, export and shard_map give what a Python loop of eager calls gives."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8

RECIPES = {
    "tensor": fp8.TensorScaling(),
    "row": fp8.RowScaling(),
    "block": fp8.BlockScaling(),
    "static": fp8.StaticScaling(input=2.0**-6, weight=2.0**-8, gradient=2.0**-10),
}


def normal(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def scalar(recipe):
    return lambda x, w: jnp.sum(jnp.sin(fp8.matmul(x, w, recipe=recipe)))


def example(x, batched, i):
    return x[i] if batched else x


SUBSETS = [s for s in itertools.product((True, False), repeat=2) if any(s)]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("batched", SUBSETS, ids=["both", "lhs", "rhs"])
def test_vmap_equals_the_loop(batched, recipe):
    x, w = normal(0, (3, 5, 140)), normal(1, (3, 140, 6))
    x, w = (a if b else a[0] for a, b in zip((x, w), batched, strict=True))
    axes = tuple(0 if b else None for b in batched)
    examples = [
        tuple(example(a, b, i) for a, b in zip((x, w), batched, strict=True)) for i in range(3)
    ]
    matmul = functools.partial(fp8.matmul, recipe=recipe)
    np.testing.assert_array_equal(jax.vmap(matmul, axes)(x, w), [matmul(*e) for e in examples])

    gradient = jax.grad(scalar(recipe), (0, 1))
    each = [gradient(*e) for e in examples]
    for side, got in enumerate(jax.jit(jax.vmap(gradient, axes))(x, w)):
        np.testing.assert_array_equal(got, [g[side] for g in each])

    # The gradient of a shared operand is the sum over the examples, added in FP32 in the GEMM.
    total = jax.grad(lambda x, w: jnp.sum(jax.vmap(scalar(recipe), axes)(x, w)), (0, 1))(x, w)
    for side, got in enumerate(total):
        parts = np.float64([g[side] for g in each])
        expected = parts if batched[side] else parts.sum(0)
        bound = 3e-6 * (np.abs(parts) if batched[side] else np.abs(parts).sum(0)) + 3e-6
        assert (np.abs(np.asarray(got, np.float64) - expected) <= bound).all()


def test_nested_vmap_over_different_axes_equals_the_loop():
    x, w = normal(0, (5, 3, 2, 40)), normal(1, (40, 2, 6))
    inner = jax.vmap(fp8.matmul, in_axes=(1, 1))  # over the 2; x (5, 2, 40), w (40, 2, 6)
    got = jax.vmap(inner, in_axes=(1, None), out_axes=2)(x, w)
    assert got.shape == (2, 5, 3, 6)
    for i, j in itertools.product(range(3), range(2)):
        np.testing.assert_array_equal(got[j, :, i], fp8.matmul(x[:, i, j], w[:, j]))


def test_gradient_of_a_vector_model_under_vmap_sums_over_examples():
    x, w = normal(0, (9, 33)), normal(1, (33, 7))
    for recipe in RECIPES.values():
        one = scalar(recipe)
        total = jax.grad(lambda w, one=one: jnp.sum(jax.vmap(one, (0, None))(x, w)))
        parts = [jax.grad(one, 1)(example, w) for example in x]
        np.testing.assert_allclose(total(w), np.sum(parts, 0), rtol=1e-5, atol=1e-5)
        text = jax.jit(total).lower(w).as_text()
        assert text.count("jax_fp8.gemm.v1") == 2  # one GEMM, not one per example


def test_gradient_under_vmap_pads_examples_that_end_within_a_tile():
    # 1x128 tiles along the rows of each example: 200 rows are two tiles, the second of 72.
    x, w = normal(0, (3, 200, 8)), normal(1, (8, 5))
    total = jax.grad(lambda w: jnp.sum(jax.vmap(lambda v: jnp.sin(fp8.matmul(v, w)))(x)))(w)
    parts = [jax.grad(scalar(fp8.BlockScaling()), 1)(v, w) for v in x]
    np.testing.assert_allclose(total, np.sum(parts, 0), rtol=1e-5, atol=1e-4)


def test_jacobians_by_forward_and_reverse_mode_agree():
    x, w = normal(0, (3, 20)), normal(1, (20, 4))
    for side in (0, 1):
        forward = jax.jacfwd(fp8.matmul, side)(x, w)
        reverse = jax.jacrev(fp8.matmul, side)(x, w)
        exact = jax.jacfwd(jnp.matmul, side)(x, w)
        # Unit cotangents are exact in E5M2, so both are the stored copy of the other operand.
        np.testing.assert_allclose(forward, reverse, rtol=1e-6)
        assert 0.005 < np.linalg.norm(forward - exact) / np.linalg.norm(exact) < 0.05


def test_gradient_of_a_batched_tangent_map():
    # vmap over tangents only (as jacfwd does), then reverse: residuals have no batch dim there.
    x, w, tangents = normal(0, (3, 20)), normal(1, (20, 4)), normal(2, (6, 20, 4))

    def f(t):
        push = lambda t: jax.jvp(lambda w: fp8.matmul(x, w), (w,), (t,))[1]
        return jnp.sum(jnp.sin(jax.vmap(push)(t)))

    got = jax.grad(f)(tangents)
    plain = jax.grad(lambda t: jnp.sum(jnp.sin(jax.vmap(lambda t: x @ t)(t))))(tangents)
    assert np.linalg.norm(got - plain) / np.linalg.norm(plain) < 0.35
    assert got.shape == tangents.shape


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_scan_and_remat_change_no_bit(recipe):
    weights, x = normal(0, (4, 64, 64)) / 8, normal(1, (16, 64))

    def layer(c, w):
        return jnp.tanh(fp8.matmul(c, w, recipe=recipe)), None

    def loop(weights, x):
        for w in weights:
            x = layer(x, w)[0]
        return x

    scan = lambda weights, x: jax.lax.scan(layer, x, weights)[0]
    remat = lambda weights, x: jax.lax.scan(jax.checkpoint(layer), x, weights)[0]
    expected = jax.jit(jax.grad(lambda *a: jnp.sum(loop(*a)), (0, 1)))(weights, x)
    for model in (scan, remat):
        got = jax.jit(jax.grad(lambda *a: jnp.sum(model(*a)), (0, 1)))(weights, x)  # noqa: B023
        for a, b in zip(got, expected, strict=True):
            # tanh may be compiled differently; its codes then differ by at most one step.
            assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)
    bits = [jax.jit(jax.grad(lambda w: jnp.sum(m(w, x))))(weights) for m in (scan, remat)]  # noqa: B023
    np.testing.assert_array_equal(*bits)


def test_control_flow():
    x, w = normal(0, (4, 8)), normal(1, (8, 8)) / 3

    def loop(x, steps):
        return jax.lax.fori_loop(0, steps, lambda _, x: fp8.matmul(x, w), x)

    expected = fp8.matmul(fp8.matmul(x, w), w)
    np.testing.assert_array_equal(jax.jit(loop, static_argnums=1)(x, 2), expected)
    np.testing.assert_array_equal(jax.jit(loop)(x, jnp.int32(2)), expected)
    branch = lambda p: jax.lax.cond(p, lambda: fp8.matmul(x, w), lambda: jnp.zeros((4, 8)))
    np.testing.assert_array_equal(jax.jit(branch)(True), fp8.matmul(x, w))


def test_export_round_trip():
    x, w = normal(0, (4, 8)), normal(1, (8, 4))
    gradient = jax.jit(jax.grad(scalar(fp8.BlockScaling()), (0, 1)))
    text = gradient.lower(x, w).as_text()
    targets = {t for t in text.replace("(", " ").split() if t.startswith("@jax_fp8.")}
    checks = [jax.export.DisabledSafetyCheck.custom_call(t[1:]) for t in targets]
    assert any("gemm.v1" in t for t in targets)
    exported = jax.export.export(gradient, disabled_checks=checks)(x, w)
    for a, b in zip(exported.call(x, w), gradient(x, w), strict=True):
        np.testing.assert_array_equal(a, b)


def test_donated_operand():
    x, w = normal(0, (8, 8)), normal(1, (8, 8))
    expected = fp8.matmul(x, w)
    donating = jax.jit(fp8.matmul, donate_argnums=0)
    np.testing.assert_array_equal(donating(jnp.asarray(x), w), expected)


# --- Meshes ---------------------------------------------------------------------------------------


def mesh_of(axis_type):
    return jax.make_mesh((4,), ("i",), axis_types=(axis_type,))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_shard_map_over_rows_equals_one_device(recipe):
    x, w = normal(0, (8, 40)), normal(1, (40, 6))
    if isinstance(recipe, fp8.TensorScaling):  # a tensor here is what one device holds
        x[2::2], x[3::2] = x[0], x[1]
    matmul = functools.partial(fp8.matmul, recipe=recipe)
    sharded = jax.shard_map(
        matmul, mesh=mesh_of(AxisType.Auto), in_specs=(P("i"), P()), out_specs=P("i")
    )
    np.testing.assert_array_equal(jax.jit(sharded)(x, w), matmul(x, w))
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(sharded(x, w)))))(w)
    parts = [jax.grad(scalar(recipe), 1)(part, w) for part in x.reshape(4, 2, 40)]
    np.testing.assert_allclose(gradient, np.sum(parts, 0), rtol=1e-5, atol=1e-5)


def test_results_keep_their_varying_axes():
    x, weights = normal(0, (8, 16)), normal(1, (3, 16, 16)) / 4

    def layers(x, weights):
        return jax.lax.scan(lambda c, w: (jnp.tanh(fp8.matmul(c, w)), None), x, weights)[0]

    sharded = jax.shard_map(
        layers, mesh=mesh_of(AxisType.Auto), in_specs=(P("i"), P()), out_specs=P("i")
    )
    np.testing.assert_allclose(jax.jit(sharded)(x, weights), layers(x, weights), atol=0.05)
    assert jax.jit(jax.grad(lambda w: sharded(x, w).sum()))(weights).shape == weights.shape


def test_shard_map_over_an_explicit_mesh_keeps_the_sharding():
    x, w = normal(0, (8, 16)), normal(1, (16, 6))
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, jax.NamedSharding(mesh, P("i", None)))
        sharded = jax.shard_map(fp8.matmul, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
        out = sharded(placed, w)
        assert out.sharding.spec[0] == "i"
        np.testing.assert_array_equal(out, fp8.matmul(x, w))
