"""Flax Linen: the class works wherever Flax takes a `dot_general_cls`, as Flax calls it."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import jax_fp8 as fp8

DotGeneral = fp8.flax.linen.DotGeneral
X = np.random.default_rng(0).standard_normal((3, 5, 16)).astype(np.float32)


def modules(cls):
    return {
        "Dense": nn.Dense(8, dot_general_cls=cls),
        "Dense bf16": nn.Dense(8, dtype=jnp.bfloat16, dot_general_cls=cls),
        "Dense f16, no bias": nn.Dense(8, dtype=jnp.float16, use_bias=False, dot_general_cls=cls),
        "DenseGeneral": nn.DenseGeneral((4, 6), axis=(-2, -1), dot_general_cls=cls),
        "DenseGeneral batch": nn.DenseGeneral(6, batch_dims=(0,), dot_general_cls=cls),
        "DenseGeneral axis 1": nn.DenseGeneral(6, axis=1, dot_general_cls=cls),
        "attention": nn.MultiHeadDotProductAttention(
            num_heads=4, qkv_dot_general_cls=cls, out_dot_general_cls=cls
        ),
    }


@pytest.mark.parametrize("name", modules(None))
def test_modules_compute_close_to_f32_with_the_same_variables(name):
    ours, plain = modules(DotGeneral)[name], modules(None)[name]
    variables = ours.init(jax.random.key(1), X)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(
        jnp.shape, plain.init(jax.random.key(1), X)
    )
    out, expected = ours.apply(variables, X), plain.apply(variables, X)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    out, expected = (np.asarray(a, np.float64) for a in (out, expected))
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert 0.005 < error < 0.08  # below: the quantisers are off

    def loss(module, v):
        return jnp.mean(jnp.square(module.apply(v, X).astype(jnp.float32)))

    grads, exact = (jax.grad(functools.partial(loss, m))(variables) for m in (ours, plain))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 0.25 * np.linalg.norm(b) + 1e-6


def test_dense_loss_and_gradients_are_three_gemm_calls_and_no_dot():
    layer = nn.Dense(8, dot_general_cls=DotGeneral)
    variables = layer.init(jax.random.key(1), X)

    def loss(variables, x):
        return jnp.mean(jnp.square(layer.apply(variables, x)))

    for argnums, gemms in (((0, 1), 3), ((0,), 2), ((1,), 2)):
        step = jax.value_and_grad(loss, argnums)
        assert jax.jit(step).lower(variables, X).as_text().count("jax_fp8.gemm.v1") == gemms
        compiled = jax.jit(step).lower(variables, X).compile().as_text()
        assert compiled.count('custom_call_target="jax_fp8.gemm.v1"') == gemms
        assert " dot(" not in compiled
        assert "dot_general" not in str(jax.make_jaxpr(step)(variables, X))


def test_recipe_is_an_argument_and_variables_have_no_state():
    for recipe in (fp8.TensorScaling(), fp8.RowScaling()):
        layer = nn.Dense(8, dot_general_cls=functools.partial(DotGeneral, recipe=recipe))
        variables = layer.init(jax.random.key(1), X)
        assert set(variables) == {"params"}
        kernel = variables["params"]["kernel"]
        np.testing.assert_array_equal(
            layer.apply(variables, X), fp8.matmul(X, kernel, recipe=recipe)
        )


def test_a_train_state_learns_a_line():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((256, 8)).astype(np.float32)
    y = (x @ rng.standard_normal((8, 1)).astype(np.float32)) / 3

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.tanh(nn.Dense(32, dot_general_cls=DotGeneral)(x))
            return nn.Dense(1, dot_general_cls=DotGeneral)(x)

    model = MLP()
    state = train_state.TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), x)["params"],
        tx=optax.adam(1e-2),
    )

    @jax.jit
    def step(state):
        def loss(params):
            return jnp.mean(jnp.square(state.apply_fn({"params": params}, x) - y))

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(150):
        state, value = step(state)
        losses.append(float(value))
    assert losses[-1] < 0.05 * losses[0]


def test_nn_scan_and_remat_over_layers():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(16, dot_general_cls=DotGeneral)(x)), None

    scanned = nn.scan(
        nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    variables = scanned.init(jax.random.key(0), X, None)
    grads = jax.jit(jax.grad(lambda v: scanned.apply(v, X, None)[0].sum()))(variables)
    assert jax.tree.leaves(grads)[1].shape == (3, 16, 16)
    x = X
    for i in range(3):
        layer = jax.tree.map(lambda a: a[i], variables)  # noqa: B023
        x = Layer().apply(layer, x, None)[0]
    np.testing.assert_allclose(scanned.apply(variables, X, None)[0], x, rtol=1e-5, atol=1e-6)
