"""Verdicts name the right cause and the right remedy on data that is known to hurt."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from diagnosis_data import (
    WEIGHTS,
    K,
    M,
    mx_floor_product,
    normal,
    outlier_channels,
    product,
    row_spread,
    spike,
    tensor_product,
)

UNIFORM = np.random.default_rng(4).uniform(-1, 1, (M, K)).astype(np.float32)


def first(fn: Any, *args: Any, **options: Any) -> Any:
    return fp8.diagnose(fn, *args, **options).verdicts[0]


@pytest.mark.parametrize(
    ("x", "rule", "remedy"),
    [
        (spike(1e6), "spike", "RowScaling()"),
        (spike(1e5), "spike", "RowScaling()"),
        (row_spread(), "row_spread", "RowScaling()"),
        (outlier_channels(), "outlier_channels", "BlockScaling()"),
    ],
    ids=["spike 1e6", "spike 1e5", "row spread", "outlier channels"],
)
def test_a_cause_in_x_and_its_remedy(x: Any, rule: str, remedy: str) -> None:
    verdict = first(tensor_product(), x, WEIGHTS)
    assert (verdict.rule, verdict.tensor, verdict.layer) == (rule, "x", "w")
    assert f"use {remedy}" in verdict.remedy
    assert verdict.severity == ("warn" if rule == "outlier_channels" else "bad")


def test_the_remedy_cures() -> None:
    for x, recipe in ((spike(), fp8.RowScaling()), (outlier_channels(), fp8.BlockScaling())):
        assert all(v.severity != "bad" for v in fp8.diagnose(product(recipe), x, WEIGHTS).verdicts)


def test_a_cause_in_w() -> None:
    w = WEIGHTS.copy()
    w[5, 7] = 1e6
    verdict = first(tensor_product(), normal(M, K), w)
    assert (verdict.rule, verdict.tensor) == ("spike", "w")


@pytest.mark.parametrize("recipe", [fp8.TensorScaling(), fp8.RowScaling(), fp8.BlockScaling()])
def test_granularity_buys_nothing_for_normal_data(recipe: Any) -> None:
    (verdict,) = fp8.diagnose(product(recipe), normal(M, K), WEIGHTS).verdicts
    assert (verdict.rule, verdict.severity) == ("granularity_buys_nothing", "info")
    assert "TensorScaling()" in verdict.remedy


def test_the_floor_rule_of_mx() -> None:
    found = fp8.diagnose(mx_floor_product, UNIFORM, UNIFORM)
    verdict = found.verdicts[0]
    assert verdict.rule == "mx_floor"
    assert "2^ceil(log2(amax / 448))" in verdict.remedy
    assert 5 < found.tensors[0].saturated_percent < 15
    ceil = fp8.diagnose(product(fp8.MXScaling()), UNIFORM, UNIFORM.T.copy())
    assert all(t.saturated_percent == 0 for t in ceil.tensors)
    assert not ceil.is_bad


@pytest.mark.parametrize("emulated", [False, True])
def test_a_long_sum_without_promotion(emulated: bool) -> None:
    rng = np.random.default_rng(0)
    x = np.maximum(rng.standard_normal((65536, 16)), 0).astype(np.float32)
    g = rng.standard_normal((65536, 16)).astype(np.float32)

    def wgrad(x, g):
        return fp8.matmul(x.T, g, recipe=fp8.TensorScaling())

    if emulated:
        with fp8.emulate("hopper_wgmma", promotion_interval=None):
            verdict = first(wgrad, x, g)
        assert (verdict.rule, verdict.severity) == ("not_promoted", "warn")
        assert "promotion_interval=128" in verdict.remedy
    else:
        verdict = next(v for v in fp8.diagnose(wgrad, x, g).verdicts if v.rule == "promote")
        assert verdict.severity == "info"
        assert "promote every 128" in verdict.remedy
    assert "65,536" in verdict.cause


def test_same_signs_make_the_sum_biased_and_the_verdict_bad() -> None:
    x = np.random.default_rng(0).random((32, 4096)).astype(np.float32)
    with fp8.emulate("hopper_wgmma", promotion_interval=None):
        verdict = first(tensor_product(), x, x.T.copy())
    assert (verdict.rule, verdict.severity, verdict.step) == ("not_promoted", "bad", 3)


def test_static_scales() -> None:
    saturating = first(product(fp8.StaticScaling()), normal(M, K) * 1000, WEIGHTS)
    assert (saturating.rule, saturating.tensor) == ("static_saturates", "x")
    assert "TensorScaling()" in saturating.remedy
    flushing = first(product(fp8.StaticScaling()), normal(M, K), WEIGHTS * 1e-4)
    assert (flushing.rule, flushing.tensor) == ("static_flushes", "w")
    assert "compute the scale from amax" in flushing.remedy
    right = fp8.StaticScaling(input=4 / 448, weight=4 / 448)
    assert not fp8.diagnose(product(right), normal(M, K).clip(-4, 4), WEIGHTS.clip(-4, 4)).is_bad


def test_coarse_format_and_non_finite_values() -> None:
    coarse = fp8.TensorScaling(weight_format="e5m2")
    verdict = first(product(coarse), normal(M, K), WEIGHTS)
    assert (verdict.rule, verdict.tensor) == ("coarse_format", "w")
    x = normal(M, K)
    x[0, 0] = np.nan
    verdict = first(tensor_product(), x, WEIGHTS)
    assert (verdict.rule, verdict.tensor, verdict.severity) == ("non_finite", "x", "bad")


def broken_training(params: Any, x: Any, y: Any) -> Any:
    """One global static scale for everything, as a careless port of an FP8 recipe has it."""
    recipe = fp8.StaticScaling(input=0.02, weight=0.02, gradient=1e-7)
    for name in ("up", "gate", "down"):
        with jax.named_scope(name):
            x = jnp.tanh(fp8.matmul(x, params[name], recipe=recipe))
    return jnp.mean((x - y) ** 2)


def broken_run() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    params = {
        name: rng.standard_normal((128, 128)).astype(np.float32) / 11
        for name in ("up", "gate", "down")
    }
    params["gate"][:, 3] *= 5000  # outlier weights
    x = rng.standard_normal((256, 128)).astype(np.float32)
    return params, x, np.zeros_like(x)


def test_the_first_verdict_of_a_broken_training_run() -> None:
    found = fp8.diagnose(broken_training, *broken_run())
    verdict = found.verdicts[0]
    assert (verdict.severity, verdict.layer, verdict.tensor) == ("bad", "gate", "w")
    assert verdict.rule == "static_saturates"
    assert "compute the scale from amax" in verdict.remedy
    assert "Scaling()" in verdict.remedy
    assert found.is_bad
    assert found.differentiated


def test_what_has_no_fp8_is_refused() -> None:
    with pytest.raises(ValueError, match="no FP8 GEMM that could be seen: does it call jax_fp8"):
        fp8.diagnose(lambda x: x @ x, jnp.ones((4, 4)))
    with pytest.raises(ValueError, match="no machine 'tpu'"):
        fp8.diagnose(tensor_product(), UNIFORM, WEIGHTS, machine="tpu")
