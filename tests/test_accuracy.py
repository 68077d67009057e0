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
    fp8.TileScaling(1, 128),
    fp8.TileScaling(128, 128),
    fp8.TileScaling(128, 32),
    fp8.MXScaling(),
]


def name(recipe: Recipe) -> str:
    tiles = "{}x{}".format(*recipe.tile("input")) if isinstance(recipe, fp8.TileScaling) else ""
    power = "-power-of-two" if recipe.power_of_two else ""
    return type(recipe).__name__ + tiles + power


every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=name)


@functools.cache
def normal_data() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((384, 384)).astype(np.float32) for _ in range(3))


def error_percent(actual: jax.Array | np.ndarray, exact: np.ndarray) -> float:
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


def test_error_of_positive_data_falls_with_the_square_root_of_k() -> None:
    # 4.81 % / sqrt(4096): independent rounding errors against a product that grows with k. A bias
    # of rounding, or a scale that is off, doesn't average out and shows at once.
    rng = np.random.default_rng(0)
    x, w = rng.random((256, 4096), np.float32), rng.random((4096, 256), np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    for recipe in (*RECIPES[:3], fp8.TileScaling(128, 32), fp8.MXScaling()):
        out = np.asarray(fp8.matmul(x, w, recipe=recipe), np.float64)
        least = 0.065 if recipe.power_of_two else 0.07
        assert least <= error_percent(out, exact) <= 0.08
        assert abs(100 * (out.sum() / exact.sum() - 1)) < 0.03


def test_rows_of_very_different_size_keep_their_accuracy_under_row_scales() -> None:
    x, w, _ = normal_data()
    x = x * np.exp2(np.linspace(-20, 0, x.shape[0], dtype=np.float32))[:, None]
    exact = x.astype(np.float64) @ w.astype(np.float64)

    def worst_row(recipe: Recipe) -> float:
        rows = zip(np.asarray(fp8.matmul(x, w, recipe=recipe)), exact, strict=True)
        return max(error_percent(row, exact_row) for row, exact_row in rows)

    # Rows below the smallest subnormal are lost, and a lost row is 100 % off, not more.
    assert 90 <= worst_row(fp8.TensorScaling()) <= 110
    assert 3.7 <= worst_row(fp8.RowScaling()) <= 4.5
    assert 3.7 <= worst_row(fp8.BlockScaling()) <= 4.5


def test_one_huge_entry_costs_its_tile_alone() -> None:
    x = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    x[5, 7] = 1e6

    def flushed_percent(tile: tuple[int, ...] | None) -> float:
        return float(100 * (np.asarray(fp8.quantize(x, "e4m3", tile).values) == 0).mean())

    assert 95 <= flushed_percent(None) <= 99  # the spike and values beyond 2.18 are left
    assert 0.05 <= flushed_percent((1, -1)) <= 0.2
    assert 0.005 <= flushed_percent((1, 128)) <= 0.05


@functools.cache
def uniform_data() -> np.ndarray:
    return np.random.default_rng(0).random((512, 1024), np.float32)


def test_power_of_two_scales_of_32_entries_are_rounded_up_so_that_nothing_saturates() -> None:
    x = uniform_data()
    q = fp8.quantize(x, "e4m3", tile=(1, 32), power_of_two=True)
    scale = np.asarray(q.scale)
    assert (np.frexp(scale)[0] == 0.5).all()
    amax = x.reshape(512, 32, 32).max(-1)
    assert ((amax / scale > 224) & (amax / scale <= 448)).all()  # the least that fits
    assert 2.3 <= error_percent(fp8.dequantize(q), x.astype(np.float64)) <= 2.5
    assert abs(bias_percent(fp8.dequantize(q), x)) < 0.05

    # What these bounds tell apart: the floor rule of the MX text saturates, and so has a bias.
    floor = np.repeat(np.exp2(np.floor(np.log2(amax)) - 8), 32, axis=1).reshape(x.shape)
    codes = np.clip(x / floor, -448, 448).astype(formats.E4M3FN.dtype).astype(np.float32)
    saturated = 100 * np.mean(x / floor >= formats.E4M3FN.saturation_threshold)
    assert 5 <= saturated <= 15
    assert error_percent(codes * floor, x.astype(np.float64)) > 4
    assert bias_percent(codes * floor, x) < -1


def bias_percent(actual: jax.Array | np.ndarray, exact: np.ndarray) -> float:
    """Relative error of the sum."""
    return float(100 * (np.asarray(actual, np.float64).sum() / exact.astype(np.float64).sum() - 1))
