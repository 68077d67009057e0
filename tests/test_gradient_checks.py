"""The gradient checks on unharmed ops: no false alarm, whatever layout, batch, recipe, accumulator.

JAX_FP8_GRADCHECK_SEEDS sets how many random cases there are (200 take some minutes).
"""

from __future__ import annotations

import dataclasses
import os
import re

import jax
import jax.numpy as jnp
import jax.test_util
import ml_dtypes
import numpy as np
import pytest

import jax_fp8 as fp8
from fault_matrix import RECIPES, case
from jax_fp8._compat import enable_x64
from jax_fp8.testing import CheckResult, case_of, check_vjp, intent_of, mutate, report_of
from jax_fp8.testing.identity import derivatives
from jax_fp8.testing.replay import identity
from jax_fp8.testing.vjp import matmul_of

SEEDS = int(os.environ.get("JAX_FP8_GRADCHECK_SEEDS", "20"))
#: (m, n, k); few, since each compiles.
SHAPES = [(256, 256, 256), (33, 45, 70), (2, 3, 4)]
#: C7 takes seconds of its own, and has a test of its own.
CHECKS = ("C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_unharmed_gradients_raise_no_false_alarm(seed: int) -> None:
    rng = np.random.default_rng((seed, 1))
    recipe = list(RECIPES.values())[seed % len(RECIPES)]
    # Every shape and recipe in turn.
    m, n, k = SHAPES[seed % len(SHAPES)]
    x = rng.standard_normal((m, k)) * np.exp2(rng.integers(-8, 8))
    w = rng.standard_normal((k, n)) / np.sqrt(k)
    if recipe != RECIPES["static"]:  # rows of different size, or a channel of outliers
        x *= np.exp(rng.choice([0, 1]) * rng.standard_normal((m, 1)))
        w *= np.where(rng.random((k, 1)) < 0.02, 16, 1)
    else:
        x = rng.standard_normal((m, k))
    key = jax.random.key(seed) if recipe.rounding == "stochastic" else None
    op = matmul_of(recipe, key=key)
    args = x.astype(np.float32), w.astype(np.float32)
    check_vjp(op, args, recipe=recipe, key=key, checks=CHECKS, seed=seed)


LAYOUTS = {
    "nt": ("mk,nk->nm", (20, 40), (30, 40)),
    "tn": ("km,kn->mn", (40, 9), (40, 30)),
    "batch": ("bmk,bkn->nbm", (3, 20, 40), (3, 40, 10)),
    "heads": ("bthd,bshd->bhts", (2, 6, 3, 40), (2, 7, 3, 40)),
    "two contracted": ("mhd,hdn->mn", (9, 4, 10), (4, 10, 7)),
    "shared rhs": ("", (3, 150, 40), (1, 40, 10)),
    "vector": ("", (40,), (40, 10)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_batches(layout: str) -> None:
    equation, lhs, rhs = LAYOUTS[layout]
    recipe = fp8.RowScaling() if layout != "shared rhs" else fp8.BlockScaling()

    def op(a: jax.Array, b: jax.Array) -> jax.Array:
        if equation:
            return fp8.einsum(equation, a, b, recipe=recipe)
        return fp8.matmul(a, b, recipe=recipe)

    # The identity mode compiles much, so it runs where most can go wrong.
    checks = ("C1", *CHECKS[1:]) if layout in ("heads", "shared rhs") else CHECKS[1:]
    report = check_vjp(op, (normal(0, *lhs), normal(1, *rhs)), recipe=recipe, checks=checks)
    measured = {result.id for result in report if not result.not_applicable}
    assert {"C2", "C3", "C4", "C5", "C9"} <= measured


OPTIONS = {
    "all E4M3": fp8.BlockScaling(gradient_format="e4m3"),
    "powers of two": fp8.TensorScaling(power_of_two=True),
    "high-precision residuals": fp8.RowScaling(residuals="high_precision"),
    "weight gradient in bfloat16": fp8.RowScaling(weight_gradient="bfloat16"),
    "masked": fp8.StaticScaling(
        input=2.0**-8, weight=2.0**-12, gradient=2.0**-29, ste="mask_saturated"
    ),
    "not a power of two": fp8.StaticScaling(input=0.3, weight=0.01, gradient=1e-6),
    "H100": fp8.TensorScaling(accumulation="hopper_wgmma", promotion_interval=None),
    "H100 for weights": fp8.RowScaling(accumulation=fp8.PerGemm(wgrad="hopper_wgmma")),
    "bfloat16 sums": fp8.TensorScaling(accumulation="bf16_chunked"),
    "MI300": fp8.BlockScaling(accumulation="cdna3_mfma"),
    "split k": fp8.TensorScaling(accumulation="fp32", split_k=2),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_recipes(option: str) -> None:
    args = normal(0, 33, 70), normal(1, 70, 45) / 8
    report = check_vjp(None, args, recipe=OPTIONS[option])
    assert report["C4"].verdict == "passed"


@pytest.mark.filterwarnings("ignore::jax_fp8.emulation.OverflowWarning")
def test_an_accumulator_that_overflows_is_held_to_its_bits_alone() -> None:
    recipe = fp8.TensorScaling(accumulation="hopper_wgmma_f16")
    report = check_vjp(None, (normal(0, 16, 64), normal(1, 64, 8)), recipe=recipe)
    assert report["C4"].verdict == "passed"
    assert "hopper_wgmma_f16" in report["C5"].not_applicable


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_operands(dtype: type) -> None:
    args = normal(0, 33, 70).astype(dtype), (normal(1, 70, 45) / 8).astype(dtype)
    report = check_vjp(fp8.matmul, args)
    assert report["C2"].not_applicable == (
        f"{np.dtype(dtype).name} arrays round the result or a gradient"
    )
    assert report["C4"].verdict == report["C6"].verdict == "passed"


def test_check_grads_of_jax_passes_to_second_order_without_the_quantiser() -> None:
    for recipe in ("block", "row", "static"):
        whole = case(recipe, "tiny")
        names = []
        for derivative in derivatives(whole):
            names.append(derivative.name)
            examples = derivative.arguments
            out = jax.eval_shape(derivative.function, *examples)
            fn = identity(derivative.function, *examples)
            more = (out,) if derivative.reverse else examples
            rule = identity(derivative.derivative, *examples, *more)
            args = tuple(np.asarray(a, np.float64) for a in examples)
            with enable_x64():
                if derivative.reverse:
                    jax.test_util.check_vjp(
                        fn, lambda *a: (fn(*a), lambda ct: rule(*a, ct)), args, atol=1e-6, rtol=1e-6  # noqa: B023
                    )  # fmt: skip
                else:
                    jax.test_util.check_jvp(
                        fn, lambda a, t: rule(*a, *t), args, atol=1e-6, rtol=1e-6  # noqa: B023
                    )  # fmt: skip
        assert names == [
            "forward", "reverse", "forward over forward", "reverse over forward",
            "forward over reverse", "reverse over reverse",
        ]  # fmt: skip
        assert "no " not in report_of(whole, ["C1"])["C1"].detail


def test_stochastic_gradients_are_unbiased_and_nearest_ones_are_not() -> None:
    whole = case("stochastic", "odd")
    report = report_of(whole, ("C4", "C7"))
    assert report.passed
    assert report["C7"].value > 1
    nearest = whole.with_op(mutate(whole.op, "nearest", whole.intent, whole.x, whole.w))
    biased = report_of(nearest, ["C7"])["C7"]
    assert biased.failed
    assert biased.value > 2 * report["C7"].limit[1]


def test_negative_controls_are_run_and_caught() -> None:
    detail = report_of(case("row", "square"), ["C9"])["C9"].detail
    for control in ("zeros", "sign flipped", "unscaled e4m3fn", "unscaled e5m2"):
        assert control in detail
    assert "none" not in detail


def test_what_the_window_cannot_judge_is_said() -> None:
    result = report_of(case("row", "tiny"), ["C6"])["C6"]
    text = result.not_applicable or result.detail
    assert "chance moves the error by" in text


def test_a_failure_says_what_was_measured_where_and_why() -> None:
    whole = case("block", "square")
    harmed = mutate(whole.op, "wrong format", whole.intent, whole.x, whole.w)
    with pytest.raises(AssertionError) as error:
        check_vjp(harmed, (whole.x, whole.w), recipe=RECIPES["block"], checks="C4,C6")
    text = str(error.value)
    assert "C6 error window: FAILED" in text
    assert "limit in [0.9, 1.1]" in text
    assert "sqrt(eps_g² + eps_b²)" in text
    assert "error ratio 0.64 = g in E4M3FN where E5M2 was expected" in text
    assert "C4 bit equality: FAILED" in text
    assert "largest term, k = " in text
    assert "(e5m2 code 0x" in text
    assert "(e4m3fn code 0x" in text


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("zeros", "identically zero"),
        ("sign flipped", "the sign is flipped"),
        ("quantiser off", "g is not quantised"),
        ("scale of w forgotten", "a scale is off or forgotten|the scale of rhs forgotten"),
        ("scale of g ×2", "is 2 = 2.1 times what it should be"),
        ("stale amax", "a stale amax, 8 times too small"),
        ("g truncated", "g is truncated instead of rounded to nearest even"),
        ("missing promotion", "another accumulator, promotion interval or order"),
        ("forward-axis copy", "the forward-axis copy of (lhs|rhs)"),
    ],
)
def test_likely_causes(fault: str, cause: str) -> None:
    whole = case("row", "odd")
    harmed = whole.with_op(mutate(whole.op, fault, whole.intent, whole.x, whole.w))
    result = report_of(harmed, ["C4"])["C4"]
    assert isinstance(result, CheckResult)
    assert re.search(cause, result.cause), result.cause


def test_without_a_recipe_the_op_says_what_it_is_meant_to_do() -> None:
    recipe = fp8.MXScaling(gradient_format="e4m3")
    op = lambda a, b: fp8.matmul(a, b, recipe=recipe, roles=("input", "input"))
    x, w = normal(0, 8, 40), normal(1, 40, 6)
    intent = intent_of(None, op, x, w)
    assert (intent.recipe, intent.roles) == (recipe, ("input", "input"))
    assert check_vjp(op, (x, w), checks="C2,C4,C5").passed
    # And with one, it has to follow it.
    with pytest.raises(AssertionError, match="C4 bit equality: FAILED"):
        check_vjp(op, (x, w), recipe=fp8.BlockScaling(), checks=["C4"])


def test_bad_input_is_refused() -> None:
    x, w = normal(0, 4, 8), normal(1, 8, 4)
    with pytest.raises(ValueError, match="op runs 0 FP8 GEMMs"):
        check_vjp(jnp.matmul, (x, w))
    with pytest.raises(ValueError, match="op runs 2 FP8 GEMMs"):
        check_vjp(lambda a, b: fp8.matmul(fp8.matmul(a, b), a), (x, w))
    with pytest.raises(ValueError, match="op does more to lhs than to move its elements"):
        check_vjp(lambda a, b: fp8.matmul(2 * a, b), (x, w))
    with pytest.raises(ValueError, match="there is no check 'C10'; there are C1"):
        check_vjp(fp8.matmul, (x, w), checks="C10")
    with pytest.raises(ValueError, match=r"g has shape \(2,\); the op gives \(4, 4\)"):
        check_vjp(fp8.matmul, (x, w), g=np.ones(2))
    with pytest.raises(ValueError, match="leave nothing to check"):
        check_vjp(fp8.matmul, (x[:0], w))
    with pytest.raises(ValueError, match="there is no fault 'heat'; there are zeros"):
        mutate(fp8.matmul, "heat", intent_of(None, fp8.matmul, x, w), x, w)


def test_special_operands_are_held_to_their_bits() -> None:
    x, w = normal(0, 8, 40), normal(1, 40, 6)
    x[0, 0], x[3, 4] = np.nan, np.inf
    w[5, :] = 0
    report = check_vjp(None, (x, w), recipe=fp8.RowScaling(), checks="C3,C4,C5,C6,C8")
    assert report["C4"].verdict == "passed"
    assert "is not finite by right" in report["C5"].not_applicable


def test_case_of_takes_a_cotangent() -> None:
    x, w = normal(0, 8, 40), normal(1, 40, 6)
    g = normal(2, 8, 6)
    whole = case_of(fp8.matmul, x, w, intent_of(None, fp8.matmul, x, w), g=g)
    assert report_of(whole, ("C3", "C4", "C5")).passed
    np.testing.assert_array_equal(whole.g, g)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedScaling(fp8.Recipe):
    """Tiles that end at other places of k for inputs than for gradients."""

    tiles = {"input": (1, 48), "weight": (128, 128), "gradient": (1, 64)}  # noqa: RUF012


@pytest.mark.parametrize("m", [1, 47, 48, 50, 64, 130, 200])
def test_gradient_of_a_shared_weight_adds_examples_whose_tiles_end_at_other_places(m: int) -> None:
    rng = np.random.default_rng(m)
    x = rng.standard_normal((3, m, 40)).astype(np.float32)
    w = rng.standard_normal((1, 40, 10)).astype(np.float32)
    check_vjp(fp8.matmul, (x, w), recipe=MixedScaling(), checks="C3,C4,C5")
