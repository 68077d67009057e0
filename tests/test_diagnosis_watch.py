"""`watch`: statistics of a training run, in jit and scan, without changing its results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from diagnosis_data import normal

W = {"up": jnp.asarray(normal(64, 48)), "down": jnp.asarray(normal(48, 16, seed=1))}
X = jnp.asarray(normal(32, 64, seed=2))


def loss(params: Any, x: Any, recipe: Any = None) -> Any:
    for name in ("up", "down"):
        with jax.named_scope(name):
            x = jnp.tanh(fp8.matmul(x, params[name], recipe=recipe))
    return jnp.sum(x**2)


def step(every: int = 10, recipe: Any = None) -> Any:
    return jax.jit(fp8.watch(jax.value_and_grad(lambda p, x: loss(p, x, recipe)), every=every))


def test_statistics_come_on_every_nth_step_and_nan_between() -> None:
    watched = step()
    for number in (0, 1, 9, 10):
        _, stats = watched(number, W, X)
        stats, sampled = dict(stats), number % 10 == 0
        assert float(stats.pop("sampled")) == sampled
        assert all(np.isnan(value) != sampled for value in stats.values())
        assert all(value.shape == () and value.dtype == np.float32 for value in stats.values())


def test_results_are_the_same_bits_with_and_without() -> None:
    expected = jax.jit(jax.value_and_grad(loss))(W, X)
    watched = step()
    for number in (0, 1):
        out, _ = watched(number, W, X)
        assert jax.tree.structure(out) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)


def test_names_and_figures_are_those_of_a_diagnosis() -> None:
    recipe = fp8.StaticScaling(input=0.002, weight=0.1, gradient=1e-4)
    stats = dict(step(1, recipe)(0, W, X)[1])
    found = fp8.diagnose(lambda p, x: loss(p, x, recipe), W, X)
    for t in found.tensors:
        letter = {"input": "x", "weight": "w", "gradient": "g"}[t.role]
        for direction in t.directions:
            name = f"{t.layer}/{direction}/{letter}"
            for column in ("amax", "flushed_percent", "saturated_percent", "non_finite"):
                value = float(stats.pop(f"{name}/{column}"))
                assert value == pytest.approx(getattr(t, column), rel=1e-5, abs=1e-4), name
    assert set(stats) == {"sampled"}
    assert found.tensors[0].saturated_percent > 1


def test_non_finite_values_are_counted() -> None:
    _, stats = step(1)(0, W, X.at[3, 4].set(jnp.nan))
    assert float(stats["up/forward/x/non_finite"]) == 1
    assert float(stats["up/forward/w/non_finite"]) == 0


def test_inside_scan() -> None:
    watched = fp8.watch(jax.value_and_grad(loss), every=2)

    def body(params, number):
        (_, gradient), stats = watched(number, params, X)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), stats

    _, stats = jax.jit(lambda p: jax.lax.scan(body, p, jnp.arange(5)))(W)
    np.testing.assert_array_equal(stats["sampled"], [1, 0, 1, 0, 1])
    amax = np.asarray(stats["up/forward/w/amax"])
    assert not np.isnan(amax[[0, 2, 4]]).any()
    assert np.isnan(amax[[1, 3]]).all()


def test_layers_in_a_loop_show_their_worst() -> None:
    weights = jnp.stack([jnp.eye(32), 3 * jnp.eye(32)])

    def deep(w, x):
        block = jax.checkpoint(lambda x, w: jnp.tanh(fp8.matmul(x, w)))
        return jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x, w)[0])

    _, stats = jax.jit(fp8.watch(jax.value_and_grad(deep), every=1))(0, weights, X[:, :32])
    assert float(stats["w/forward/w/amax"]) == 3
    assert {name.split("/")[1] for name in stats if "/" in name} == {"forward", "dgrad", "wgrad"}


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_is_a_positive_integer(every: Any) -> None:
    with pytest.raises(ValueError, match="must be an integer >= 1"):
        fp8.watch(loss, every=every)
