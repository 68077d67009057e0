"""The GEMM through its public calls: bound, bits, zero sizes, transformations.

Sums are held to `oracle.gemm_bound_np` against float64, and where sizes allow to the very bits of
the contract's chain of FMAs.
"""

import functools
import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_fp8 as fp8
import strategies
from checks import assert_gemm_close, assert_same_bits
from jax_fp8 import formats
from jax_fp8.gemm import gemm_p
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


# --- Determinism ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> dict[str, Any]:
    """Large enough that threads share it, ragged everywhere."""
    return matmul_arguments(2, 277, 531, 700, (1, 128), (128, 100))


@pytest.mark.parametrize("layouts", list(itertools.product((0, 1), repeat=2)), ids=str)
def test_all_rows_have_the_same_bits(large: dict[str, Any], layouts: tuple[int, int]) -> None:
    lhs = fp8.ScaledArray(large["lhs"], large["lhs_scale"], large["lhs_tile"])
    rhs = fp8.ScaledArray(large["rhs"], large["rhs_scale"], large["rhs_tile"])
    if layouts[0] == 0:
        lhs = transposed(lhs)
    if layouts[1] == 1:
        rhs = transposed(rhs)
    contracting = ((layouts[0],), (layouts[1],))
    results = []
    for row in ROWS:
        with fp8.force_kernel(row):
            results.append(fp8.scaled_dot_general(lhs, rhs, (contracting, ((), ()))))
    for result in results:
        assert_same_bits(result, results[0])
    assert_gemm_close(
        results[0], oracle.gemm_np(*canonical(large)), oracle.gemm_bound_np(*canonical(large))
    )


def transposed(q: fp8.ScaledArray) -> fp8.ScaledArray:
    values, scale = (np.ascontiguousarray(np.swapaxes(x, 0, 1)) for x in (q.values, q.scale))
    return fp8.ScaledArray(values, scale, q.tile[::-1])


def test_runs_and_jit_have_the_same_bits(large: dict[str, Any], kernel_row: str) -> None:
    tiles = {name: large[name] for name in ("lhs_tile", "rhs_tile")}
    arrays = {name: array for name, array in large.items() if name not in tiles}
    with fp8.force_kernel(kernel_row):
        first = fp8.scaled_matmul(**large)
        for _ in range(4):
            assert_same_bits(fp8.scaled_matmul(**large), first)
        jitted = jax.jit(functools.partial(fp8.scaled_matmul, **tiles))
        assert_same_bits(jitted(**arrays), first)


def digest_of_results() -> str:
    """Of products and quantised arrays large enough for several threads, on every row."""
    digest = hashlib.sha256()
    x = np.random.default_rng(0).standard_normal((500, 600)).astype(np.float32)
    for operation in ("gemm", "quantize"):
        for row in runnable_rows(operation):
            with fp8.force_kernel(row):
                arguments = matmul_arguments(0, 277, 531, 300, (1, 128), (128, 100))
                digest.update(np.asarray(fp8.scaled_matmul(**arguments)).tobytes())
                for tile in (None, (1, 128), (128, 128), (-1, 1)):
                    for leaf in jax.tree.leaves(fp8.quantize(x, "e4m3", tile)):
                        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def test_number_of_threads_changes_no_bit() -> None:
    def run(num_threads: int) -> str:
        # XLA's pool has as many threads as the larger of PJRT_NPROC and the number of devices.
        environment = os.environ | {
            "PJRT_NPROC": str(num_threads),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        script = "import test_gemm; print(test_gemm.digest_of_results())"
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=os.path.dirname(__file__),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    digests = {num_threads: run(num_threads) for num_threads in (1, 2, 7)}
    assert set(digests.values()) == {digest_of_results()}, digests


def test_place_in_the_batch_changes_no_bit(kernel_row: str) -> None:
    example = matmul_arguments(3, 50, 70, 200, (1, 128), (128, 64))
    batch = matmul_arguments(4, 50, 70, 200, (1, 128), (128, 64), batch=(3, 4))
    for name in NAMES:
        batch[name][0, 1] = batch[name][2, 3] = example[name]
    with fp8.force_kernel(kernel_row):
        alone = fp8.scaled_matmul(**example)
        together = np.asarray(fp8.scaled_matmul(**batch))
    assert_same_bits(together[0, 1], alone)
    assert_same_bits(together[2, 3], alone)


def test_split_of_m_and_n_changes_no_bit(large: dict[str, Any], kernel_row: str) -> None:
    tiles = {"lhs_tile": large["lhs_tile"], "rhs_tile": large["rhs_tile"]}
    lhs, lhs_scale = large["lhs"], large["lhs_scale"]
    rhs, rhs_scale = large["rhs"], large["rhs_scale"]
    with fp8.force_kernel(kernel_row):
        whole = np.asarray(fp8.scaled_matmul(**large))
        for m in (1, 11, 12, 100, 276):
            top = fp8.scaled_matmul(lhs[:m], rhs, lhs_scale[:m], rhs_scale, **tiles)
            bottom = fp8.scaled_matmul(lhs[m:], rhs, lhs_scale[m:], rhs_scale, **tiles)
            assert_same_bits(np.concatenate([top, bottom]), whole)
        for n in (100, 300, 500):  # edges of the column tiles
            at = n // 100
            left = fp8.scaled_matmul(lhs, rhs[:, :n], lhs_scale, rhs_scale[:, :at], **tiles)
            right = fp8.scaled_matmul(lhs, rhs[:, n:], lhs_scale, rhs_scale[:, at:], **tiles)
            assert_same_bits(np.concatenate([left, right], axis=1), whole)


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


# --- Transformations ------------------------------------------------------------------------------

SUBSETS = [subset for subset in itertools.product((False, True), repeat=4) if any(subset)]


def product_of_pieces(*arrays: Any) -> jax.Array:
    return fp8.scaled_matmul(*arrays, lhs_tile=(1, 16), rhs_tile=(16, 8))


def batched_operands(subset: tuple[bool, ...], axes: tuple[int, ...], size: int) -> list[Array]:
    """Arrays of which those in `subset` have a batch dim at their axis."""
    plain = matmul_arguments(12, 7, 18, 40, (1, 16), (16, 8))
    many = matmul_arguments(13, 7, 18, 40, (1, 16), (16, 8), batch=(size,))
    return [
        np.moveaxis(many[name], 0, axis) if batched else plain[name]
        for name, batched, axis in zip(NAMES, subset, axes, strict=True)
    ]


def loop(
    function: Callable[..., Any], arrays: list[Any], in_axes: tuple[int | None, ...], size: int
) -> Array:
    """What vmap must equal."""
    return np.stack(
        [
            function(
                *(
                    x if axis is None else np.take(x, i, axis)
                    for x, axis in zip(arrays, in_axes, strict=True)
                )
            )
            for i in range(size)
        ]
    )


@pytest.mark.parametrize("subset", SUBSETS, ids=str)
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (1, 2, -1, 1)], ids=str)
def test_vmap_over_any_operands_equals_a_loop(
    subset: tuple[bool, ...], axes: tuple[int, ...]
) -> None:
    arrays = batched_operands(subset, axes, 3)
    in_axes = tuple(axis if batched else None for batched, axis in zip(subset, axes, strict=True))
    mapped = jax.jit(jax.vmap(product_of_pieces, in_axes=in_axes))(*arrays)
    assert_same_bits(mapped, loop(product_of_pieces, arrays, in_axes, 3))


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ((0, None, None, None), (None, 0, None, None)),
        ((0, None, 0, None), (None, 0, None, 0)),
        ((1, 0, None, None), (0, None, 0, None)),
        ((None, None, 0, None), (None, None, None, 1)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
        ((2, None, 1, 0), (None, 1, None, -1)),
    ],
    ids=str,
)
def test_nested_vmap_equals_nested_loops(
    outer: tuple[int | None, ...], inner: tuple[int | None, ...]
) -> None:
    plain = matmul_arguments(14, 7, 18, 40, (1, 16), (16, 8))
    rng = np.random.default_rng(15)
    arrays = []
    for name, first, second in zip(NAMES, outer, inner, strict=True):
        x = plain[name]
        for axis, size in ((second, 3), (first, 2)):  # the outer map takes its axis off first
            if axis is not None:
                x = np.stack([x[..., rng.permutation(x.shape[-1])] for _ in range(size)], axis)
        arrays.append(x)
    mapped = jax.jit(jax.vmap(jax.vmap(product_of_pieces, inner), outer))(*arrays)

    def inner_loop(*slices: Any) -> Array:
        return loop(product_of_pieces, list(slices), inner, 3)

    assert_same_bits(mapped, loop(inner_loop, arrays, outer, 2))


@pytest.mark.parametrize("subset", SUBSETS, ids=str)
def test_vmap_copies_no_operand_that_has_no_batch(subset: tuple[bool, ...]) -> None:
    size = 5
    arrays = batched_operands(subset, (0, 0, 0, 0), size)
    in_axes = tuple(0 if batched else None for batched in subset)
    mapped = jax.vmap(product_of_pieces, in_axes=in_axes)
    shapes = [
        (size if batched else 1, *x.shape[-2:]) for x, batched in zip(arrays, subset, strict=True)
    ]
    (equation,) = gemms(jax.make_jaxpr(mapped)(*arrays).jaxpr)
    assert [variable.aval.shape for variable in equation.invars] == shapes
    text = jax.jit(mapped).lower(*arrays).compile().as_text()
    (call,) = (line for line in text.splitlines() if 'custom_call_target="jax_fp8.gemm.v1"' in line)
    kinds = ("f8e4m3fn", "f8e5m2", "f32", "f32")
    for kind, shape in zip(kinds, shapes, strict=True):
        assert f"{kind}[{','.join(map(str, shape))}]" in call
    assert "broadcast(" not in text
    assert "dot(" not in text


def gemms(jaxpr: Any) -> list[Any]:
    """Equations of the GEMM primitive in a jaxpr and the jaxprs inside it."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive is gemm_p:
            found.append(equation)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                found += gemms(getattr(inner, "jaxpr", inner))
    return found


@pytest.mark.parametrize("layouts", list(itertools.product((0, 1), repeat=2)), ids=str)
def test_no_layout_needs_a_transposing_copy(layouts: tuple[int, int]) -> None:
    q = fp8.quantize(np.ones((48, 48), np.float32), "e4m3", (16, 16))
    dims = (((layouts[0],), (layouts[1],)), ((), ()))
    call = jax.jit(lambda q: fp8.scaled_dot_general(q, q, dims))
    text = call.lower(q).compile().as_text()
    assert text.count('custom_call_target="jax_fp8.gemm.v1"') == 1
    assert "transpose(" not in text
    assert "copy(" not in text


def test_scan_over_stacked_weights_equals_a_loop() -> None:
    rng = np.random.default_rng(16)
    x = rng.standard_normal((5, 32)).astype(np.float32)
    weights = rng.standard_normal((4, 32, 32)).astype(np.float32)
    q = fp8.quantize(weights, "e4m3", (16, 16))

    def layer(x: jax.Array, w: fp8.ScaledArray) -> tuple[jax.Array, None]:
        y = fp8.scaled_dot_general(fp8.quantize(x, "e4m3", (1, 16)), w, (((1,), (0,)), ((), ())))
        return y / 8, None

    scanned = jax.jit(lambda x, q: jax.lax.scan(layer, x, q)[0])(jnp.asarray(x), q)
    looped = jnp.asarray(x)
    for i in range(4):
        looped, _ = layer(looped, jax.tree.map(lambda leaf, i=i: leaf[i], q))
    assert_same_bits(scanned, looped)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES.values(), ids=OUT_DTYPES)
def test_matmul_is_its_quantisers_and_one_gemm(out_dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(17)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((20, 200), (200, 150)))
    for recipe, x_tile, w_tile in (
        (fp8.TensorScaling(), (-1, -1), (-1, -1)),
        (fp8.RowScaling(), (1, -1), (-1, 1)),
        (fp8.BlockScaling(), (1, 128), (128, 128)),
    ):
        qx, qw = fp8.quantize(x, "e4m3", x_tile), fp8.quantize(w, "e4m3", w_tile)
        expected = fp8.scaled_dot_general(qx, qw, (((1,), (0,)), ((), ())), out_dtype)
        actual = fp8.matmul(x, w, recipe=recipe, preferred_element_type=out_dtype)
        assert_same_bits(actual, expected)
