"""Same bits on every row, run after run, for any number of threads, place in a batch and split."""

import functools
import hashlib
import itertools
from typing import Any

import jax
import numpy as np
import pytest

import jax_fp8 as fp8
from checks import assert_gemm_close, assert_same_bits
from jax_fp8.testing import oracle
from rows import runnable_rows
from strategies import canonical, matmul_arguments
from threads import digest_with_threads

NAMES = ("lhs", "rhs", "lhs_scale", "rhs_scale")
ROWS = runnable_rows("gemm")


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
    digests = {n: digest_with_threads("test_determinism", n) for n in (1, 2, 7)}
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


@pytest.mark.parametrize("layouts", list(itertools.product((0, 1), repeat=2)), ids=str)
@pytest.mark.parametrize(
    ("n", "k", "lhs_tile", "rhs_tile"),
    [
        (130, 700, (1, 128), (128, 100)),
        (70, 333, (70, 333), (333, 70)),  # one piece, cut by every block
        (200, 530, (1, 37), (61, 64)),  # pieces of odd length
    ],
    ids=str,
)
def test_any_number_of_rows_has_the_bits_of_them_all(
    n: int,
    k: int,
    lhs_tile: tuple[int, int],
    rhs_tile: tuple[int, int],
    layouts: Any,
    kernel_row: str,
) -> None:
    # Few rows are computed on other paths, which walk the operands in other orders.
    m = 70
    case = matmul_arguments(4, m, n, k, lhs_tile, rhs_tile)
    lhs = fp8.ScaledArray(case["lhs"], case["lhs_scale"], case["lhs_tile"])
    rhs = fp8.ScaledArray(case["rhs"], case["rhs_scale"], case["rhs_tile"])
    if layouts[1]:
        rhs = transposed(rhs)

    def multiply(num_rows: int) -> np.ndarray[Any, Any]:
        scale = lhs.scale[: -(-num_rows // lhs.tile[0])]
        tile = (min(lhs.tile[0], num_rows), lhs.tile[1])
        top = fp8.ScaledArray(lhs.values[:num_rows], scale, tile)
        if layouts[0] == 0:
            top = transposed(top)
        contracting = ((layouts[0],), (layouts[1],))
        return np.asarray(fp8.scaled_dot_general(top, rhs, (contracting, ((), ()))))

    with fp8.force_kernel(kernel_row):
        whole = multiply(m)
        for num_rows in (1, 2, 3, 4, 5, 8, 9, 13, 32, 33, 64, 65):
            assert_same_bits(multiply(num_rows), whole[:num_rows])
    assert_same_bits(whole[:3], oracle.gemm_chain_np(*canonical(first_rows(case, 3))))


def first_rows(case: dict[str, Any], num_rows: int) -> dict[str, Any]:
    tile_rows, tile_k = case["lhs_tile"]
    scale = case["lhs_scale"][: -(-num_rows // tile_rows)]
    tile = (min(tile_rows, num_rows), tile_k)
    return case | {"lhs": case["lhs"][:num_rows], "lhs_scale": scale, "lhs_tile": tile}


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
