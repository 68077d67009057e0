"""The GEMM through its public calls: bound, bits, output types, zero sizes, scales.

Sums are held to `oracle.gemm_bound_np` against float64, and where sizes allow to the very bits of
the contract's chain of FMAs.
"""

from typing import Any

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_fp8 as fp8
import strategies
from checks import assert_gemm_close, assert_same_bits
from jax_fp8 import formats
from jax_fp8.testing import oracle
from rows import runnable_rows
from strategies import GemmCase, canonical, matmul_arguments, random_codes, random_scales

OUT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
ROWS = runnable_rows("gemm")
NAMES = ("lhs", "rhs", "lhs_scale", "rhs_scale")

every_out = pytest.mark.parametrize("out_dtype", OUT_DTYPES.values(), ids=OUT_DTYPES)

Array = np.ndarray[Any, Any]


def scaled_dot_general(
    case: GemmCase, row: str, out_dtype: np.dtype[Any] | None = None, *, jit: bool = True
) -> Array:
    """The library's answer to a case, on one row."""

    def call(*arrays: Any) -> jax.Array:
        lhs = fp8.ScaledArray(arrays[0], arrays[1], case.lhs.tile)
        rhs = fp8.ScaledArray(arrays[2], arrays[3], case.rhs.tile)
        dtype = case.out_dtype if out_dtype is None else out_dtype
        return fp8.scaled_dot_general(lhs, rhs, case.dimension_numbers, dtype)

    lhs, rhs = case.lhs, case.rhs
    with fp8.force_kernel(row):
        function = jax.jit(call) if jit else call
        return np.asarray(function(lhs.values, lhs.scale, rhs.values, rhs.scale))


def round_to(x: Array, dtype: np.dtype[Any]) -> Array:
    """float32 to a narrower type, to nearest even."""
    with np.errstate(all="ignore"):
        return x.astype(dtype)


# --- Against float64 and against the chain --------------------------------------------------------


@pytest.mark.parametrize("part", range(6))
def test_generated_cases_are_within_the_models_bound(part: int) -> None:
    @hypothesis.seed(part)
    @hypothesis.settings(max_examples=100, derandomize=False, database=None)
    @hypothesis.given(case=strategies.gemm_cases(), row=st.sampled_from(ROWS))
    def check(case: GemmCase, row: str) -> None:
        actual = scaled_dot_general(case, row, OUT_DTYPES["float32"])
        assert actual.shape == case.out_shape
        problem = case.problem()
        exact = oracle.gemm_np(*problem.arguments).reshape(case.out_shape)
        bound = oracle.gemm_bound_np(*problem.arguments).reshape(case.out_shape)
        assert_gemm_close(actual, exact, bound)
        if case.out_dtype != np.float32:
            narrow = scaled_dot_general(case, row)
            assert_same_bits(narrow, round_to(actual, case.out_dtype))

    check()


@hypothesis.given(case=strategies.gemm_cases(largest=70, max_products=40_000, finite=False))
@hypothesis.settings(max_examples=80)
def test_small_cases_have_the_bits_of_the_chain(case: GemmCase, kernel_row: str) -> None:
    expected = oracle.gemm_chain_np(*case.problem().arguments).reshape(case.out_shape)
    actual = scaled_dot_general(case, kernel_row)
    assert_same_bits(actual, round_to(expected, case.out_dtype), any_nan=True)


@hypothesis.given(case=strategies.gemm_cases(largest=70, finite=False))
@hypothesis.settings(max_examples=15)
def test_jit_changes_no_bit_of_any_case(case: GemmCase) -> None:
    eager = scaled_dot_general(case, ROWS[0], jit=False)
    assert_same_bits(scaled_dot_general(case, ROWS[0]), eager, any_nan=True)


#: m, n, k, lhs tile (m, k), rhs tile (k, n). K on both sides of the cache block of 256, pieces
#: longer than it, pieces of odd length, edges that the operands do not share.
SIZES = [
    (13, 33, 600, (13, 600), (600, 33)),
    (13, 33, 600, (1, 600), (600, 1)),
    (25, 65, 515, (1, 128), (128, 128)),
    (12, 32, 520, (5, 300), (7, 10)),
    (7, 40, 1030, (2, 513), (600, 3)),
    (24, 64, 257, (1, 1), (257, 64)),
    (37, 1, 300, (37, 299), (301, 1)),
    (1, 70, 300, (1, 3), (2, 2)),
    (3, 5, 261, (8, 260), (256, 8)),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_long_chains_and_all_cuts_of_k_have_the_bits_of_the_chain(
    sizes: tuple[Any, ...], kernel_row: str
) -> None:
    arguments = matmul_arguments(1, *sizes)
    with fp8.force_kernel(kernel_row):
        actual = fp8.scaled_matmul(**arguments)
    assert_same_bits(actual, oracle.gemm_chain_np(*canonical(arguments)))


def test_k_is_summed_in_ascending_order_with_one_rounding_per_product(kernel_row: str) -> None:
    # 2^24 + 1 - 2^24 is 0 in this order; 1 in any order that meets the 1 last, or in a wider sum.
    values = np.float32([2.0**12, 1.0, -(2.0**12)])[None]
    factors = np.float32([2.0**12, 1.0, 2.0**12])[:, None]
    lhs, rhs = values.astype(formats.E5M2.dtype), factors.astype(formats.E5M2.dtype)
    with fp8.force_kernel(kernel_row):
        assert fp8.scaled_matmul(lhs, rhs, 1.0, 1.0).tolist() == [[0.0]]
        swapped = [0, 2, 1]
        assert fp8.scaled_matmul(lhs[:, swapped], rhs[swapped], 1.0, 1.0).tolist() == [[1.0]]


def test_scale_product_is_rounded_before_it_meets_the_sum(kernel_row: str) -> None:
    three = np.full((1, 1), 3, np.float32).astype(formats.E4M3FN.dtype)
    lhs_scale, rhs_scale = np.float32(1 + 24 * 2.0**-23), np.float32(1 + 44 * 2.0**-23)
    expected = np.float32(9) * (lhs_scale * rhs_scale)
    others = (np.float32(9) * lhs_scale) * rhs_scale, (np.float32(9) * rhs_scale) * lhs_scale
    assert expected not in others
    with fp8.force_kernel(kernel_row):
        actual = fp8.scaled_matmul(three, three, lhs_scale, rhs_scale)
    assert_same_bits(actual, expected.reshape(1, 1))


# --- Output types, zeros, subnormals --------------------------------------------------------------


@every_out
def test_output_is_one_rounding_of_the_float32_result(
    out_dtype: np.dtype[Any], kernel_row: str
) -> None:
    # Exponents reach beyond float16 on both sides: infinities, subnormals and zeros.
    tiny = matmul_arguments(6, 130, 70, 40, (1, 20), (20, 1), exponents=(-24, -12))
    huge = matmul_arguments(6, 130, 70, 40, (1, 20), (20, 1), exponents=(-6, 6))
    smallest, largest = ml_dtypes.finfo(out_dtype).smallest_normal, ml_dtypes.finfo(out_dtype).max
    with fp8.force_kernel(kernel_row):
        for arguments in (tiny, huge):
            exact = np.asarray(fp8.scaled_matmul(**arguments))
            rounded = fp8.scaled_matmul(**arguments, preferred_element_type=out_dtype)
            assert_same_bits(rounded, round_to(exact, out_dtype))
            if out_dtype == np.float16:
                reached = np.abs(exact)
                assert (reached > float(largest)).any() or (reached < float(smallest)).any()


@pytest.mark.parametrize("out_dtype", list(OUT_DTYPES.values())[1:], ids=list(OUT_DTYPES)[1:])
def test_ties_of_the_output_rounding_go_to_even(out_dtype: np.dtype[Any], kernel_row: str) -> None:
    # From 2^places on, the output's last place is 1: x · 2^places + 0.5 and + 1.5 are ties.
    places = int(ml_dtypes.finfo(out_dtype).nmant)
    lhs = np.float32([[1, 1], [1.25, 1], [-1.5, -1]]).astype(formats.E4M3FN.dtype)
    rhs = np.float32([[2.0**places] * 2, [0.5, 1.5]]).astype(formats.E5M2.dtype)
    with fp8.force_kernel(kernel_row):
        exact = np.asarray(fp8.scaled_matmul(lhs, rhs, 1.0, 1.0))
        rounded = fp8.scaled_matmul(lhs, rhs, 1.0, 1.0, preferred_element_type=out_dtype)
    assert (exact % 1 == 0.5).all()
    assert_same_bits(rounded, round_to(exact, out_dtype))


BAD_SCALES = [np.inf, -np.inf, np.nan, 3e38, 0.0, 1e-45]


@pytest.mark.parametrize("lhs_scale", BAD_SCALES)
@pytest.mark.parametrize("rhs_scale", BAD_SCALES)
@pytest.mark.parametrize("tile_k", [4, 2], ids=["one piece", "two pieces"])
def test_scales_of_any_value_meet_the_sum_by_ieee_and_a_zero_sum_contributes_zero(
    lhs_scale: float, rhs_scale: float, tile_k: int, kernel_row: str
) -> None:
    # Rows: zeros; sums that cancel to zero; a zero first piece; ordinary; NaN.
    rows = [[0, 0, 0, 0], [1, -1, 2, -2], [0, 0, 1, 2], [1, 2, 3, 4], [np.nan, 1, 1, 1]]
    lhs = np.float32(rows).astype(formats.E5M2.dtype)
    rhs = np.ones((4, 3), formats.E4M3FN.dtype)
    arguments = {
        "lhs": lhs,
        "rhs": rhs,
        "lhs_scale": np.full((5, 4 // tile_k), lhs_scale, np.float32),
        "rhs_scale": np.full((4 // tile_k, 1), rhs_scale, np.float32),
        "lhs_tile": (1, tile_k),
        "rhs_tile": (tile_k, 3),
    }
    with fp8.force_kernel(kernel_row):
        actual = np.asarray(fp8.scaled_matmul(**arguments))
    assert_same_bits(actual, oracle.gemm_chain_np(*canonical(arguments)), any_nan=True)
    assert_same_bits(actual[:2], np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("tile_k", [200, 64], ids=["one piece", "four pieces"])
@pytest.mark.parametrize("exponents", [(-149, -120), (-90, -60), (-149, -149)], ids=str)
def test_subnormal_scales_scale_products_and_results_are_kept(
    tile_k: int, exponents: tuple[int, int], kernel_row: str
) -> None:
    arguments = matmul_arguments(7, 30, 40, 200, (1, tile_k), (tile_k, 1), exponents=exponents)
    if exponents[0] != -90:  # a subnormal scale against one that lifts the product
        arguments["rhs_scale"] = np.full_like(arguments["rhs_scale"], 2.0**10)
    with fp8.force_kernel(kernel_row):
        actual = np.asarray(fp8.scaled_matmul(**arguments))
    expected = oracle.gemm_chain_np(*canonical(arguments))
    assert_same_bits(actual, expected)
    scales = np.concatenate([arguments["lhs_scale"].ravel(), np.abs(expected).ravel()])
    assert ((scales > 0) & (scales < 2.0**-126)).any()


def test_subnormal_codes_are_kept(kernel_row: str) -> None:
    for fmt in formats.ALL:
        smallest = np.full((1, 1), fmt.smallest_subnormal).astype(fmt.dtype)
        with fp8.force_kernel(kernel_row):
            product = fp8.scaled_matmul(smallest, smallest, 1.0, 1.0)
        assert float(product[0, 0]) == fmt.smallest_subnormal**2


@pytest.mark.parametrize(
    "sizes", [(3, 4, 0), (0, 4, 5), (3, 0, 5), (0, 0, 0), (0, 4, 0), (3, 0, 0)], ids=str
)
@pytest.mark.parametrize("batch", [(), (2,), (0,), (2, 0)], ids=str)
@every_out
def test_any_size_may_be_zero(
    sizes: tuple[int, int, int],
    batch: tuple[int, ...],
    out_dtype: np.dtype[Any],
    kernel_row: str,
) -> None:
    m, n, k = sizes
    arguments = matmul_arguments(8, m, n, k, (1, 2), (2, 3), batch=batch)
    with fp8.force_kernel(kernel_row):
        actual = fp8.scaled_matmul(**arguments, preferred_element_type=out_dtype)
    assert_same_bits(actual, np.zeros((*batch, m, n), out_dtype))


# --- scaled_matmul: forms of scales and batch dims ------------------------------------------------


def test_every_form_of_scale_means_what_its_full_form_means() -> None:
    m, n, k = 20, 30, 64
    full = matmul_arguments(9, m, n, k, (1, k), (k, 1))
    lhs, rhs = full["lhs"], full["rhs"]
    rng = np.random.default_rng(10)
    for lhs_shape, rhs_shape in (
        ((), ()), ((1,), (1, 1)), ((m, 1), (1, n)), ((m, 4), (4, n)), ((5, 1), (1, 3)),
        ((), (2, n)), ((1, 64), (64, 1)),
    ):  # fmt: skip
        lhs_scale = random_scales(rng, lhs_shape)
        rhs_scale = random_scales(rng, rhs_shape)
        actual = fp8.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale)
        grids, tiles = [], []
        for scale, shape in ((lhs_scale, (m, k)), (rhs_scale, (k, n))):
            grid = scale.reshape(scale.shape if scale.ndim == 2 else (1, 1))
            grids.append(grid)
            tiles.append(tuple(s // g for s, g in zip(shape, grid.shape, strict=True)))
        chain = oracle.gemm_chain_np(lhs, rhs.T, grids[0], grids[1].T, tiles[0], tiles[1][::-1])
        assert_same_bits(actual, chain)


def test_python_numbers_are_scales() -> None:
    lhs, rhs = (np.full((2, 2), 3.0).astype(formats.E4M3FN.dtype) for _ in range(2))
    assert fp8.scaled_matmul(lhs, rhs, 0.5, 2).tolist() == [[18.0, 18.0]] * 2


@pytest.mark.parametrize(
    ("lhs_batch", "rhs_batch", "lhs_scale_batch", "rhs_scale_batch"),
    [
        ((3,), (3,), (3,), (3,)),
        ((3,), (3,), (1,), ()),
        ((3,), (1,), (3,), (1,)),
        ((3,), (), (1,), ()),
        ((1,), (3,), (1,), (3,)),
        ((), (2, 3), (), (2, 1)),
        ((2, 1), (1, 3), (1, 1), (1, 3)),
        ((2, 3), (3,), (1, 3), (1,)),
        ((1,), (1,), (3,), (1,)),
    ],
    ids=str,
)
def test_batch_dims_broadcast(
    lhs_batch: tuple[int, ...],
    rhs_batch: tuple[int, ...],
    lhs_scale_batch: tuple[int, ...],
    rhs_scale_batch: tuple[int, ...],
    kernel_row: str,
) -> None:
    rng = np.random.default_rng(11)
    lhs = random_codes(rng, formats.E4M3FN, (*lhs_batch, 9, 21))
    rhs = random_codes(rng, formats.E5M2, (*rhs_batch, 21, 14))
    lhs_scale = random_scales(rng, (*lhs_scale_batch, 9, 3))
    rhs_scale = random_scales(rng, (*rhs_scale_batch, 3, 2))
    with fp8.force_kernel(kernel_row):
        actual = fp8.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale)
    batch = np.broadcast_shapes(lhs_batch, rhs_batch, lhs_scale_batch, rhs_scale_batch)

    def whole(x: Array) -> Array:
        return np.broadcast_to(x, (*batch, *x.shape[-2:]))

    expected = oracle.gemm_chain_np(
        whole(lhs),
        whole(rhs).swapaxes(-1, -2),
        whole(lhs_scale),
        whole(rhs_scale).swapaxes(-1, -2),
        (1, 7),
        (7, 7),
    )
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("tile", [None, (1, 128)])
@pytest.mark.parametrize("sizes", [(0, 4, 8), (3, 0, 8), (3, 4, 0), (0, 0, 0), (1, 1, 0)])
def test_raw_operands_of_size_zero_take_every_usual_scale(sizes, tile):
    m, n, k = sizes
    lhs, rhs = np.zeros((m, k), formats.E4M3FN.dtype), np.zeros((k, n), formats.E5M2.dtype)
    row, column = np.full((m, 1), 2, np.float32), np.full((1, n), np.inf, np.float32)
    scales = [(row, column)]
    if tile is None:
        scales += [(1.0, 2.0), (np.ones((1, 1), np.float32), np.ones((1,), np.float32))]
    for lhs_scale, rhs_scale in scales:
        out = fp8.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, lhs_tile=tile)
        np.testing.assert_array_equal(out, np.zeros((m, n), np.float32))
