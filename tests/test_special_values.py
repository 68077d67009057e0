"""NaN, infinities, zeros, subnormals and extreme sizes keep contract lines 3 to 5, also under jit.

Scales, codes and sums are determined to the bit, so all of them are compared by their bits.
"""

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8 import config, formats
from jax_fp8.quantize_primitive import quantize_two_axes
from jax_fp8.testing import oracle
from user_reports.helpers import DTYPES, FORMATS, GEMM_ROWS, RECIPES, TILES, assert_same_bits

AMAXES = (1e-45, 1e-40, 1e-38, 2.0**-126, 448 * 2.0**-126, 1e-30, 1e-10, 1, 448, 1e10, 3e38)
RUNS = {"eager": lambda f: f, "jit": jax.jit}

run_both_ways = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
all_formats = pytest.mark.parametrize("fmt", formats.ALL, ids=lambda fmt: fmt.name)
all_recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)


def hard_rows(dtype):
    """Rows of 12 that each have their own trouble: any tile of a few of them mixes troubles."""
    rng = np.random.default_rng(0)
    plain = [[a, -a / 2, a / 3, a * 2.0**-9, 0, *(a * rng.uniform(-1, 1, 7))] for a in AMAXES]
    zeros = [[0.0] * 12, [-0.0] * 12]
    special = []
    for value in (np.nan, np.inf, -np.inf):
        for rest in (0.0, 1e-40, 1.0, 3e38):
            special.append([value, *([rest] * 11)])
        special.append([value] * 12)
    mixed = [[np.nan, np.inf, -np.inf, 1e-45, -3e38, 0, -0.0, 1, 2, 3, 4, 5]]
    with np.errstate(over="ignore"):
        return np.array(plain + zeros + special + mixed).astype(dtype)


@run_both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@all_formats
def test_scales_and_codes_of_hard_values(fmt, dtype, run):
    x = hard_rows(dtype)
    for tile in ((1, -1), (1, 5), (-1, 1), (4, 3), (-1, -1)):
        for power_of_two in (False, True):

            def quantize(x, tile=tile, power_of_two=power_of_two):
                return fp8.quantize(x, fmt, tile, power_of_two=power_of_two)

            q = run(quantize)(x)
            values, scale = oracle.quantize_np(x, fmt.name, tile, power_of_two=power_of_two)
            assert_same_bits(q.scale, scale)
            assert_same_bits(q.values, values)
            assert np.isfinite(scale).all()
            assert (scale >= 2.0**-126).all()


@run_both_ways
@all_formats
def test_two_copies_of_hard_values_are_those_of_one(fmt, run):
    """A differentiated operand is quantised along both axes in one pass."""
    x = hard_rows(np.float32)
    tiles = ((1, 5), (7, 1))

    def both(x):
        return quantize_two_axes(x, fmt, tiles, config.without_sums("test"), power_of_two=False)

    out = run(both)(x)
    for (values, scale), tile in zip((out[:2], out[2:]), tiles, strict=True):
        want = oracle.quantize_np(x, fmt.name, tile)
        assert_same_bits(values, want[0])
        assert_same_bits(scale, want[1])


@run_both_ways
@all_formats
def test_given_scales_saturate_finite_values_only(fmt, run):
    x = hard_rows(np.float32)
    for scale in np.float32([2.0**-126, 1e-30, 1, 3e38]):
        for saturate in (True, False):

            def quantize(x, scale=scale, saturate=saturate):
                return fp8.quantize(x, fmt, scale=scale, saturate=saturate)

            q = run(quantize)(x)
            want, _ = oracle.quantize_np(
                x, fmt.name, (-1, -1), scale=scale.reshape(1, 1), saturate=saturate
            )
            assert_same_bits(q.values, want)
            if saturate:
                codes = np.asarray(q.values).astype(np.float32)
                finite = np.isfinite(x)
                assert np.isfinite(codes[finite]).all()
                assert not np.isfinite(codes[~finite]).any()


@run_both_ways
@all_recipes
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_result_is_non_finite_exactly_where_the_float32_product_is(recipe, value, run):
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((6, 150), (150, 5)))
    clean = oracle_product(x, w, recipe)
    x[1, 130], x[4, 0], w[3, 2] = value, value, value
    y = np.asarray(run(lambda x, w: fp8.matmul(x, w, recipe=recipe))(x, w))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.isfinite(y), np.isfinite(x @ w))
    assert_same_bits(y, oracle_product(x, w, recipe))
    # A value that was replaced can only have lowered the amax of its neighbours' tile.
    finite = np.isfinite(y)
    assert np.abs(y - clean)[finite].max() < 0.1 * np.abs(clean).max()


@run_both_ways
@all_recipes
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_are_non_finite_exactly_where_those_of_float32_are(recipe, value, run):
    rng = np.random.default_rng(2)
    x, w, ct = (rng.standard_normal(s).astype(np.float32) for s in ((6, 20), (20, 5), (6, 5)))
    ct[2, 3] = value

    def gradients(x, w):
        return jax.vjp(lambda x, w: fp8.matmul(x, w, recipe=recipe), x, w)[1](ct)

    dx, dw = run(gradients)(x, w)
    with np.errstate(invalid="ignore"):
        for got, want in ((dx, ct @ w.T), (dw, x.T @ ct)):
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    assert_same_bits(dx, oracle_product(ct, w.T, recipe, ("gradient", "weight")))
    assert_same_bits(dw.T, oracle_product(ct.T, x, recipe, ("gradient", "input")))


def oracle_product(lhs, rhs, recipe, roles=("input", "weight")):
    """Bits of lhs (m, k) · rhs (k, n), each quantised as `recipe` promises for its role."""
    operands = []
    for x, role in zip((lhs, np.ascontiguousarray(rhs.T)), roles, strict=True):
        tile = TILES[type(recipe)][role]
        operands.append((*oracle.quantize_np(x, FORMATS[role], tile), tile))
    (a, a_scale, a_tile), (b, b_scale, b_tile) = operands
    return oracle.gemm_chain_np(a, b, a_scale, b_scale, a_tile, b_tile)


# --- Given scales of every size -------------------------------------------------------------------

EXTREME_SCALES = (2.0**-149, 2.0**-126, 1e-30, 1.0, 3.0, 1e30, 2.0**126, 3e38)


def raw_operands(lhs_format, rhs_format, scales_along_k):
    """Random codes, some of them subnormal, and scales whose products under- and overflow."""
    rng = np.random.default_rng(3)
    k, tile = 24, 8 if scales_along_k else 24
    lhs, rhs = (
        (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-10, 6, (m, k))).astype(fmt.dtype)
        for m, fmt in ((8, lhs_format), (8, rhs_format))
    )
    lhs[:, :8], rhs[3] = 0, 0  # a zero piece, and a zero row
    grid = np.float32(EXTREME_SCALES)
    lhs_scale = np.stack([np.roll(grid, i) for i in range(k // tile)], axis=1)
    rhs_scale = np.stack([np.roll(grid, 3 * i) for i in range(k // tile)], axis=1)
    return lhs, rhs, lhs_scale, rhs_scale, (1, tile)


@run_both_ways
@pytest.mark.parametrize("row", GEMM_ROWS)
@pytest.mark.parametrize("scales_along_k", [False, True], ids=["per row", "along k"])
@pytest.mark.parametrize("out", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("pair", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_sums_under_extreme_scales(pair, out, scales_along_k, row, run):
    lhs, rhs, lhs_scale, rhs_scale, tile = raw_operands(
        formats.ALL[pair[0]], formats.ALL[pair[1]], scales_along_k
    )
    want = oracle.gemm_chain_np(lhs, rhs, lhs_scale, rhs_scale, tile, tile)

    def product(lhs, rhs, lhs_scale, rhs_scale):
        return fp8.scaled_matmul(
            lhs, rhs.T, lhs_scale, rhs_scale.T,
            lhs_tile=tile, rhs_tile=tile[::-1], preferred_element_type=out,
        )  # fmt: skip

    with fp8.force_kernel(row):
        got = run(product)(lhs, rhs, lhs_scale, rhs_scale)
    with np.errstate(over="ignore"):
        assert_same_bits(got, want.astype(out))
    tiny = np.abs(want[want != 0]).min()
    assert tiny < 2.0**-126
    assert np.isinf(want).any()
    np.testing.assert_array_equal(want[:, 3], 0)


@run_both_ways
@pytest.mark.parametrize("row", GEMM_ROWS)
@pytest.mark.parametrize("k_scales", [1, 2])
@pytest.mark.parametrize("scale", [np.inf, np.nan, 3e38])
def test_zeros_contribute_zero_whatever_their_scales(scale, k_scales, row, run):
    lhs = np.zeros((3, 64), ml_dtypes.float8_e4m3fn)
    rhs = np.ones((64, 2), ml_dtypes.float8_e4m3fn)
    lhs_scale = np.full((3, k_scales), scale, np.float32)
    with fp8.force_kernel(row):
        y = run(fp8.scaled_matmul)(lhs, rhs, lhs_scale, np.float32(1e30))
    assert_same_bits(y, np.zeros((3, 2), np.float32))


@run_both_ways
@all_recipes
def test_extreme_operands_multiply_as_the_oracle(recipe, run):
    x = hard_rows(np.float32)
    w = np.random.default_rng(4).standard_normal((12, 6)).astype(np.float32)
    for size in np.float32([1e-38, 1e-30, 1, 1e30]):
        with np.errstate(over="ignore"):
            scaled = w * size
        y = run(lambda x, w: fp8.matmul(x, w, recipe=recipe))(x, scaled)
        assert_same_bits(y, oracle_product(x, scaled, recipe))


def test_flushing_modes_of_the_caller_do_not_matter():
    """XLA's own threads flush subnormals; an operation of XLA's before ours must not leak that."""
    lhs = np.full((1, 1), 2.0**-9, ml_dtypes.float8_e4m3fn)

    def after_xla(x, scale):
        y = jax.numpy.exp(x).sum()
        return fp8.scaled_matmul(lhs, lhs, scale, np.float32(1)), y

    got, _ = jax.jit(after_xla)(np.ones((64, 64), np.float32), np.float32(2.0**-126))
    assert_same_bits(got, np.float32([[2.0**-144]]))
