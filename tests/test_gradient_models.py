"""check_gradients: every FP8 GEMM of a loss, wherever it is, and the gradient as a whole."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.testing import check_gradients
from jax_fp8.testing.captured import values_of
from jax_fp8.testing.model import gemms_of


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Mlp(nn.Module):
    recipe: fp8.Recipe

    @nn.compact
    def __call__(self, x):
        def cls():
            return fp8.flax.linen.DotGeneral(recipe=self.recipe)

        x = nn.tanh(nn.Dense(24, dot_general_cls=cls, name="up")(x))
        return nn.Dense(4, dot_general_cls=cls, name="down")(x)


def loss_of(recipe):
    model, x = Mlp(recipe), normal(0, 8, 16)
    params = model.init(jax.random.key(0), x)
    return lambda params: jnp.mean(model.apply(params, x) ** 2), params


def test_every_gemm_of_a_flax_module_is_checked_under_its_name():
    loss, params = loss_of(fp8.RowScaling())
    report = check_gradients(loss, params)
    names = [gemm.name for gemm, _ in report.gemms]
    assert [("up" in name, "down" in name) for name in names] == [(True, False), (False, True)]
    assert [gemm.contraction.recipe for gemm, _ in report.gemms] == [fp8.RowScaling()] * 2
    assert all({r.verdict for r in own} == {"passed"} for _, own in report.gemms)
    assert 0.99 < report.whole.value < 0.99999
    assert "up" in str(report)
    assert report.data == ("its own values", "its own values")


def test_a_recipe_that_a_module_does_not_follow_is_found():
    loss, params = loss_of(fp8.RowScaling(gradient_format="e4m3"))
    with pytest.raises(AssertionError, match=r"down.*C4 bit equality: FAILED"):
        check_gradients(loss, params, recipe=fp8.RowScaling(), checks="C4")


def test_gemms_inside_scan_remat_cond_and_jit_are_found():
    recipe = fp8.BlockScaling()
    weights, x = normal(0, 3, 16, 16) / 4, normal(1, 8, 16)

    def loss(weights):
        @jax.remat
        def layer(carry, w):
            return jnp.tanh(fp8.matmul(carry, w, recipe=recipe)), None

        y = jax.lax.scan(layer, x, weights)[0]
        half = lambda y: fp8.matmul(y, weights[0, :, :4], recipe=fp8.RowScaling())
        y = jax.lax.cond(y[0, 0] > 0, half, lambda y: half(-y), y)
        return jnp.sum(jax.jit(lambda y: fp8.matmul(y, weights[1, :4]))(y))

    found = {(g.contraction.recipe, g.lhs.shape, g.rhs.shape) for g in gemms_of(loss, weights)}
    assert found == {
        (recipe, (8, 16), (16, 16)),
        (fp8.RowScaling(), (8, 16), (16, 4)),
        (recipe, (8, 4), (4, 16)),
    }
    report = check_gradients(loss, weights, checks="C4,C5")
    assert report.passed
    assert len(report.gemms) == 3
    assert "its own values" in report.data
    assert "cannot be replayed in float64" in report.whole.not_applicable


def test_frozen_operands_and_stochastic_keys():
    recipe = fp8.RowScaling(rounding="stochastic")
    x, key = normal(0, 8, 40), jax.random.key(3)
    loss = lambda w, x: jnp.sum(fp8.matmul(x, w, recipe=recipe, key=key) ** 2)
    (gemm,) = gemms_of(loss, normal(1, 40, 6), x)
    assert (gemm.lhs.shape, gemm.rhs.shape) == ((8, 40), (40, 6))
    assert check_gradients(loss, normal(1, 40, 6), x).passed


def test_nothing_to_check_is_an_error():
    with pytest.raises(ValueError, match="nothing that is differentiated is an FP8 GEMM"):
        check_gradients(lambda x: jnp.sum(x @ x), np.eye(3, dtype=np.float32))


def test_a_gemm_is_a_value():
    loss, params = loss_of(fp8.TensorScaling())
    gemm = gemms_of(loss, params)[0]
    assert dataclasses.replace(gemm, name="other").signature == gemm.signature


@pytest.mark.parametrize("equation", ["mk,kn->mn", "mk,nk->mn", "km,kn->mn", "bmk,bkn->bmn"])
@pytest.mark.parametrize("size_n", [5, 6])
def test_gemms_are_checked_on_the_values_that_the_function_gives_them(equation, size_n):
    sizes = {"b": 2, "m": 6, "k": 40, "n": size_n}
    lhs, rhs, out = (
        normal(i, *(sizes[name] for name in names))
        for i, names in enumerate(equation.replace("->", ",").split(","))
    )

    def loss(w, x):
        return jnp.sum(fp8.einsum(equation, x, w) * out)

    (own,) = values_of(loss, rhs, lhs)
    (gemm,) = gemms_of(loss, rhs, lhs)
    x, w, g = own.laid_out(gemm.contraction, gemm.lhs, gemm.rhs)
    np.testing.assert_array_equal(x, lhs)
    np.testing.assert_array_equal(w, rhs)
    np.testing.assert_array_equal(g, out)
    longer = jax.ShapeDtypeStruct(tuple(2 * size for size in gemm.lhs.shape), np.float32)
    assert own.laid_out(gemm.contraction, longer, gemm.rhs) is None
    assert check_gradients(loss, rhs, lhs, checks="C4,C5").data == ("its own values",)


def test_values_that_say_nothing_are_replaced():
    def loss(w, x):
        return jnp.sum(fp8.matmul(x, w))

    for x in (np.zeros((4, 32), np.float32), np.full((4, 32), np.inf, np.float32)):
        report = check_gradients(loss, normal(0, 32, 8), x, checks="C4,C5")
        assert report.data == ("random values",)


def test_the_gradient_of_an_embedding_is_replayed_in_float64():
    tokens = np.array([[0, 3, 3, 1], [2, 0, 1, 1]])

    def loss(params):
        x = params["embedding"][tokens].at[:, 0].set(1.0)
        return jnp.mean(jnp.tanh(fp8.matmul(x, params["w"])) ** 2)

    report = check_gradients(loss, {"embedding": normal(0, 4, 64), "w": normal(1, 64, 16) / 8})
    assert 0.99 < report.whole.value < 0.99999
