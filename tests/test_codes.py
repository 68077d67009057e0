"""All 65,536 pairs of codes of each pair of formats through every GEMM row: every product is exact.

Beside each pair the other products are zero, so a result is one product: bit-determined, NaN and
infinity included.
"""

import itertools

import jax
import numpy as np
import pytest

import jax_fp8 as fp8
from checks import assert_same_bits
from jax_fp8 import formats
from jax_fp8.formats import Format

#: A register tile of the widest row: rows of lhs × columns of rhs. Others divide it.
TILE_ROWS, TILE_COLS = 12, 32
#: Rows with which every code, shifted by 0 to 11, comes to lie at each row of a full tile.
NUM_ROWS, NUM_COLS = 264, 256

LAYOUTS = {"nt": (1, 1), "nn": (1, 0), "tn": (0, 0), "tt": (0, 1)}

every_pair = pytest.mark.parametrize(
    ("lhs_format", "rhs_format"),
    list(itertools.product(formats.ALL, repeat=2)),
    ids=lambda fmt: fmt.name,
)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_format = pytest.mark.parametrize("fmt", formats.ALL, ids=lambda fmt: fmt.name)


def codes(fmt: Format, count: int = 256, first: int = 0) -> np.ndarray:
    """`count` codes of `fmt` in order from `first`, cyclically."""
    return ((np.arange(count) + first) % 256).astype(np.uint8).view(fmt.dtype)


def exact_products(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """float32 products of all pairs as a GEMM gives them, where a sum that is zero is +0."""
    with np.errstate(invalid="ignore"):
        products = lhs.astype(np.float64)[..., :, None] * rhs.astype(np.float64)[..., None, :]
        rounded = products.astype(np.float32)
    np.testing.assert_array_equal(rounded, products)  # the claim that FP32 holds every product
    return rounded + np.float32(0)


def multiply(row: str, layout: str, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """(*b, m, n) product of (*b, m, k) and (*b, n, k) with scales of one, in a memory order."""
    lhs_axis, rhs_axis = LAYOUTS[layout]
    batch = lhs.ndim - 2

    def scaled(x: np.ndarray, k_last: int) -> fp8.ScaledArray:
        x = x if k_last else np.ascontiguousarray(np.swapaxes(x, -1, -2))
        scale = np.ones((*x.shape[:-2], 1, 1), np.float32)
        return fp8.ScaledArray(x, scale, x.shape[-2:])

    contracting = ((batch + lhs_axis,), (batch + rhs_axis,))
    dims = (contracting, (tuple(range(batch)),) * 2)
    with fp8.force_kernel(row):
        call = jax.jit(fp8.scaled_dot_general, static_argnums=2)
        return np.asarray(call(scaled(lhs, lhs_axis), scaled(rhs, rhs_axis), dims))


@every_pair
@every_layout
def test_every_pair_of_codes_multiplies_exactly(
    kernel_row: str, layout: str, lhs_format: Format, rhs_format: Format
) -> None:
    lhs, rhs = codes(lhs_format), codes(rhs_format)
    actual = multiply(kernel_row, layout, lhs[:, None], rhs[:, None])
    assert_same_bits(actual, exact_products(lhs, rhs), any_nan=True)


def test_shifted_codes_reach_every_place_of_a_full_register_tile() -> None:
    for tile, count in ((TILE_ROWS, NUM_ROWS), (TILE_COLS, NUM_COLS)):
        assert count % tile == 0
        reached = np.zeros((256, tile), bool)
        for shift in range(tile):
            reached[(np.arange(count) + shift) % 256, np.arange(count) % tile] = True
        assert reached.all()


@every_pair
@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize("place", [0, 1], ids=["first of k pair", "second of k pair"])
def test_every_pair_of_codes_is_exact_at_every_place_of_a_register_tile(
    kernel_row: str, place: int, layout: str, lhs_format: Format, rhs_format: Format
) -> None:
    rhs = np.stack([codes(rhs_format, NUM_COLS, shift) for shift in range(TILE_COLS)])
    rhs_matrix = np.zeros((*rhs.shape, 2), rhs.dtype)
    rhs_matrix[..., place] = rhs
    for shift in range(TILE_ROWS):
        lhs = np.broadcast_to(codes(lhs_format, NUM_ROWS, shift), (TILE_COLS, NUM_ROWS))
        lhs_matrix = np.zeros((*lhs.shape, 2), lhs.dtype)
        lhs_matrix[..., place] = lhs
        actual = multiply(kernel_row, layout, lhs_matrix, rhs_matrix)
        expected = exact_products(lhs[0], rhs[0])
        # Column c of example b holds code c + b.
        columns = (np.arange(NUM_COLS) + np.arange(TILE_COLS)[:, None]) % 256
        expected = np.stack([expected[:, column] for column in columns])
        assert_same_bits(actual, expected, any_nan=True)


@every_format
@every_layout
@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_every_code_is_decoded_at_every_k(
    kernel_row: str, side: str, layout: str, fmt: Format
) -> None:
    k = 150  # beyond two vectors of 64 codes, and ragged
    holder = np.zeros((k, 256, k), fmt.dtype)  # example p holds the codes at k = p
    holder[np.arange(k), :, np.arange(k)] = codes(fmt)
    weights = np.ones((k, 5, k), formats.E4M3FN.dtype)
    expected = np.broadcast_to(exact_products(codes(fmt), weights[0, :, 0]), (k, 256, 5))
    if side == "lhs":
        actual = multiply(kernel_row, layout, holder, weights)
    else:
        actual = multiply(kernel_row, layout, weights, holder).swapaxes(1, 2)
    assert_same_bits(actual, expected, any_nan=True)
