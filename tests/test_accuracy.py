"""How far FP8 products are from exact ones: a window on both sides, which a wrong quantiser leaves.

The error of a product of normal data depends on the formats alone: 2.65 % for E4M3 and 5.28 % for
E5M2 per operand, added as squares. Less means that something was not quantised; more, that scales,
rounding or formats are off.
"""

import functools

import jax
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8 import formats
from jax_fp8.recipes import Recipe

#: Windows in percent, of the Frobenius norm.
E4M3_E4M3, E4M3_E5M2, E5M2_E5M2 = (3.6, 3.8), (5.7, 6.0), (7.2, 7.7)

RECIPES = [
    fp8.TensorScaling(),
    fp8.RowScaling(),
    fp8.BlockScaling(),
    fp8.StaticScaling(),
    fp8.StaticScaling(input=0.02, weight=0.03, gradient=0.002),
    fp8.TensorScaling(power_of_two=True),
    fp8.RowScaling(power_of_two=True),
    fp8.BlockScaling(power_of_two=True),
]


def name(recipe: Recipe) -> str:
    power = "-power-of-two" if recipe.power_of_two else ""
    return type(recipe).__name__ + power


every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=name)


@functools.cache
def normal_data() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((384, 384)).astype(np.float32) for _ in range(3))


def error_percent(actual: jax.Array, exact: np.ndarray) -> float:
    difference = np.asarray(actual, np.float64) - exact
    return float(100 * np.linalg.norm(difference) / np.linalg.norm(exact))


def errors_percent(recipe: Recipe) -> tuple[float, float, float]:
    """Errors of the product and of both gradients."""
    x, w, g = normal_data()
    out, pullback = jax.vjp(functools.partial(fp8.matmul, recipe=recipe), x, w)
    dx, dw = pullback(jax.numpy.asarray(g))
    x, w, g = (a.astype(np.float64) for a in (x, w, g))
    return error_percent(out, x @ w), error_percent(dx, g @ w.T), error_percent(dw, x.T @ g)


@every_recipe
def test_error_of_product_and_gradients_is_that_of_the_formats(recipe: Recipe) -> None:
    out, dx, dw = errors_percent(recipe)
    assert E4M3_E4M3[0] <= out <= E4M3_E4M3[1]
    assert E4M3_E5M2[0] <= dx <= E4M3_E5M2[1]
    assert E4M3_E5M2[0] <= dw <= E4M3_E5M2[1]


def test_error_follows_the_formats_of_the_recipe() -> None:
    all_e5m2 = fp8.TensorScaling(input_format=formats.E5M2, weight_format=formats.E5M2)
    assert all(E5M2_E5M2[0] <= error <= E5M2_E5M2[1] for error in errors_percent(all_e5m2))
    all_e4m3 = fp8.TensorScaling(gradient_format=formats.E4M3FN)
    assert all(E4M3_E4M3[0] <= error <= E4M3_E4M3[1] for error in errors_percent(all_e4m3))


def test_same_window_holds_for_bf16_and_f16_operands() -> None:
    x, w, _ = normal_data()
    for dtype in (jax.numpy.bfloat16, np.float16):
        x16, w16 = x.astype(dtype), w.astype(dtype)
        out = fp8.matmul(x16, w16, preferred_element_type=np.float32)
        exact = x16.astype(np.float64) @ w16.astype(np.float64)
        assert E4M3_E4M3[0] <= error_percent(out, exact) <= E4M3_E4M3[1]


def test_rows_of_very_different_size_keep_their_accuracy_under_row_scales() -> None:
    x, w, _ = normal_data()
    x = x * np.exp2(np.linspace(-20, 0, x.shape[0], dtype=np.float32))[:, None]
    exact = x.astype(np.float64) @ w.astype(np.float64)

    def worst_row(recipe: Recipe) -> float:
        rows = zip(np.asarray(fp8.matmul(x, w, recipe=recipe)), exact, strict=True)
        return max(error_percent(row, exact_row) for row, exact_row in rows)

    assert worst_row(fp8.TensorScaling()) >= 90
    assert worst_row(fp8.RowScaling()) <= 4.5
    assert worst_row(fp8.BlockScaling()) <= 4.5


def test_one_huge_entry_costs_its_tile_alone() -> None:
    x = normal_data()[0].copy()
    x[5, 7] = 1e6

    def flushed_percent(tile: tuple[int, ...] | None) -> float:
        return float(100 * (np.asarray(fp8.quantize(x, "e4m3", tile).values) == 0).mean())

    assert flushed_percent(None) >= 95
    assert flushed_percent((1, -1)) <= 100 / 384 + 0.1
    assert flushed_percent((1, 128)) <= 100 / 384 / 3 + 0.1
