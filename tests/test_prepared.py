"""Prepared weights: the bits of the same call with weights that were not prepared.

What an unprepared call gives is compared with the oracle elsewhere; one test here does it again.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_fp8 as fp8
from checks import assert_same_bits
from emulation_cases import OCP, Case, every_pair
from jax_fp8 import formats, gemm
from jax_fp8.testing import oracle
from strategies import canonical, matmul_arguments, random_codes, random_scales

Array = np.ndarray[Any, Any]
NUMBERS = (((1,), (0,)), ((), ()))
RECIPES = {
    "tensor": fp8.TensorScaling(),
    "row": fp8.RowScaling(power_of_two=True),
    "block": fp8.BlockScaling(weight_format=fp8.E5M2),
    "tile": fp8.TileScaling(24, 40),
    "mx": fp8.MXScaling(),
    "static": fp8.StaticScaling(input=2.0**-6, weight=2.0**-7, gradient=2.0**-12),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- All rows, sizes and granularities -----------------------------------------------------------

#: m, n, k: one row and many, columns and k on both sides of a panel's, a tile's and a block's edge.
SIZES = [
    (1, 1, 1), (1, 63, 127), (1, 130, 257), (1, 64, 130), (2, 65, 0), (2, 64, 257), (7, 130, 130),
    (8, 65, 127), (9, 63, 130), (9, 130, 1), (33, 65, 257), (33, 1, 130), (0, 65, 127), (8, 0, 130),
    (3, 700, 300), (5, 1100, 600),
]  # fmt: skip
#: Tiles (m, k) and (k, n) of lhs and rhs, -1 for a whole dim.
TILES = {
    "tensor": ((-1, -1), (-1, -1)),
    "row": ((1, -1), (-1, 1)),
    "tile": ((1, 128), (128, 128)),
    "mx": ((1, 32), (32, 1)),
    "ragged": ((5, 33), (50, 60)),
    "a scale per code": ((-1, 1), (1, 1)),
}
OUT_DTYPES = [np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16)]


def scaled_operand(rng: np.random.Generator, shape: tuple[int, ...], tile: Any, fmt: Any) -> Any:
    """Codes, a few of them NaN or infinite, with positive scales."""
    codes = random_codes(rng, fmt, shape)
    if codes.size > 200:
        special = random_codes(rng, fmt, (4,), finite=False)
        special[0] = np.float32(np.inf)
        codes.reshape(-1)[rng.integers(0, codes.size, 4)] = special
    tile = tuple(max(d, 1) if t == -1 else t for t, d in zip(tile, shape[-2:], strict=True))
    scales = tuple(-(-d // t) for d, t in zip(shape[-2:], tile, strict=True))
    return fp8.ScaledArray(codes, random_scales(rng, (*shape[:-2], *scales), (-8, 8)), tile)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_row_has_the_bits_of_unprepared_weights(
    sizes: tuple[int, int, int], kernel_row: str
) -> None:
    m, n, k = sizes
    rng, out_dtype = np.random.default_rng(sum(sizes)), OUT_DTYPES[sum(sizes) % 3]
    pairs = [
        (
            scaled_operand(rng, (m, k), lhs_tile, formats.E4M3FN),
            scaled_operand(rng, (k, n), rhs_tile, formats.ALL[i % 2]),
        )
        for i, (lhs_tile, rhs_tile) in enumerate(TILES.values())
    ]

    @jax.jit
    def both(pairs: Any) -> Any:
        dot = functools.partial(
            fp8.scaled_dot_general, dimension_numbers=NUMBERS, preferred_element_type=out_dtype
        )
        return [(dot(x, fp8.prepare(w)), dot(x, w)) for x, w in pairs]

    with fp8.force_kernel(kernel_row):
        for actual, expected in both(pairs):
            assert_same_bits(actual, expected, any_nan=True)


def test_every_row_has_the_bits_of_the_chain(kernel_row: str) -> None:
    arguments = matmul_arguments(1, 3, 130, 300, (1, 128), (128, 64))
    w = fp8.prepare(fp8.ScaledArray(arguments["rhs"], arguments["rhs_scale"], (128, 64)))
    with fp8.force_kernel(kernel_row):
        actual = fp8.scaled_matmul(
            arguments["lhs"], w, arguments["lhs_scale"], lhs_tile=arguments["lhs_tile"]
        )
    assert_same_bits(actual, oracle.gemm_chain_np(*canonical(arguments)))


@every_pair
@pytest.mark.filterwarnings("ignore:.*overflow beyond 65504")
def test_every_accumulation_model_has_the_bits_of_unprepared_weights(
    row: str, machine: str
) -> None:
    case = Case(machine, m=3, n=130, k=101)
    dtypes = [np.dtype(d) for d in OCP.values()]
    rng = np.random.default_rng(5)
    mx = case.facts.scales_inside
    tiles = ((1, 32), (32, 1)) if mx else ((3, 70), (101, 1))
    operands = []
    for shape, tile, dtype in zip(((3, 101), (101, 130)), tiles, dtypes, strict=False):
        q = scaled_operand(rng, shape, tile, formats.lookup(dtype))
        if mx:
            bits = rng.integers(112, 143, q.scale.shape, np.uint8)
            q = dataclasses.replace(q, scale=bits.view(formats.E8M0))
        operands.append(q)
    lhs, rhs = operands
    dot = functools.partial(fp8.scaled_dot_general, dimension_numbers=NUMBERS, accumulation=machine)
    with fp8.force_kernel(row):
        assert_same_bits(dot(lhs, fp8.prepare(rhs)), dot(lhs, rhs), any_nan=True)


@pytest.mark.parametrize(
    ("lhs_batch", "rhs_batch"),
    [((3,), (3,)), ((3,), (1,)), ((1,), (3,)), ((3,), ()), ((), (2, 3)), ((2, 1), (1, 3))],
    ids=str,
)
def test_batch_dims_broadcast(
    lhs_batch: tuple[int, ...], rhs_batch: tuple[int, ...], kernel_row: str
) -> None:
    x, w = normal(0, *lhs_batch, 2, 70), normal(1, *rhs_batch, 70, 80)
    with fp8.force_kernel(kernel_row):
        assert_same_bits(fp8.matmul(x, fp8.prepare(w)), fp8.matmul(x, w))
        q = fp8.quantize(w, "e4m3", (35, 16))
        x = random_codes(np.random.default_rng(0), fp8.E5M2, x.shape)
        actual = fp8.scaled_matmul(x, fp8.prepare(q), 0.5)
        assert_same_bits(actual, fp8.scaled_matmul(x, q.values, 0.5, q.scale, rhs_tile=q.tile))


def test_the_reference_reads_panels() -> None:
    x, q = normal(0, 4, 70), fp8.quantize(normal(1, 2, 70, 130), tile=(32, 32))
    lhs, w = fp8.quantize(x[None], tile=(1, 70)), fp8.prepare(q)
    common = {"lhs_axis": -1, "rhs_axis": -2, "lhs_tile": (1, 70), "rhs_tile": (32, 32)}
    common |= {"out_dtype": "float32", "execution": None}
    plain = gemm._reference(lhs.values, q.values, lhs.scale, q.scale, rhs_n=None, **common)
    actual = gemm._reference(lhs.values, w.values, lhs.scale, w.scale, rhs_n=130, **common)
    assert_same_bits(actual, plain)


# --- prepare, and back ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "dtype"), list(zip(RECIPES.values(), OUT_DTYPES * 2, strict=True)), ids=str
)
def test_weights_are_quantised_as_the_forward_pass_does(recipe: Any, dtype: Any) -> None:
    w = normal(1, 2, 100, 70).astype(dtype)
    w[0, 3, 4], w[1, 0, 69] = np.nan, -np.inf
    rows, k = recipe.tile("weight")
    given = recipe.static_scale("weight")
    for i, matrix in enumerate(w):
        values, scale = oracle.quantize_np(
            matrix,
            recipe.weight_format.name,
            (k, rows),
            scale=None if given is None else np.full((1, 1), given, np.float32),
            power_of_two=recipe.power_of_two,
        )
        for prepared in (
            fp8.prepare(matrix, recipe=recipe),
            fp8.prepare(matrix.T, recipe=recipe, k_axis=-1),
            jax.tree.map(lambda x, i=i: x[i], fp8.prepare(w, recipe=recipe)),
            jax.jit(functools.partial(fp8.prepare, recipe=recipe))(matrix),
        ):
            q = prepared.unprepare()
            assert_same_bits(q.values, values)
            assert_same_bits(q.scale, scale)
            assert prepared.shape == q.shape == (100, 70)
            assert prepared.format == recipe.weight_format


@every_recipe
def test_products_have_the_bits_of_unprepared_weights(recipe: Any, kernel_row: str) -> None:
    w = normal(1, 130, 70)
    prepared = fp8.prepare(w, recipe=recipe)
    with fp8.force_kernel(kernel_row):
        for shape in ((130,), (1, 130), (2, 3, 130)):
            x = normal(2, *shape).astype(jnp.bfloat16)
            actual = fp8.matmul(x, prepared, recipe=recipe)
            expected = fp8.matmul(x, w, recipe=recipe, preferred_element_type=jnp.bfloat16)
            assert_same_bits(actual, expected)
            numbers = (((len(shape) - 1,), (0,)), ((), ()))
            assert_same_bits(fp8.dot_general(x, prepared, numbers, recipe=recipe), expected)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 130])
def test_unprepare_is_the_inverse_for_every_code(n: int) -> None:
    k = {0: 3, 1: 0, 63: 1}.get(n, 67)

    @jax.jit
    def there_and_back(q: Any, transposed: Any) -> Any:
        prepared = fp8.prepare(q)
        return prepared, prepared.unprepare(), fp8.prepare(transposed, k_axis=-1)

    for fmt in formats.ALL:
        values = np.resize(np.arange(256, dtype=np.uint8), (2, k, n)).view(fmt.dtype)
        scale = np.arange(2 * -(-k // 5) * -(-n // 7), dtype=np.float32)
        scale = scale.reshape(2, -(-k // 5), -(-n // 7))
        transposed = fp8.ScaledArray(values.swapaxes(-1, -2), scale.swapaxes(-1, -2), (7, 5))
        prepared, again, other = there_and_back(fp8.ScaledArray(values, scale, (5, 7)), transposed)
        assert prepared.values.shape == (2, -(-n // 64), k, 64)
        assert prepared.nbytes == prepared.values.size + 4 * scale.size
        assert not np.asarray(prepared.values)[:, -1:, :, n % 64 or 64 :].view(np.uint8).any()
        assert prepared.shape == again.shape == (2, k, n)
        assert other.tile == prepared.tile == again.tile
        for actual, expected in (
            (again.values, values), (again.scale, scale), (other.values, prepared.values),
            (other.scale, scale),
        ):  # fmt: skip
            assert_same_bits(actual, expected)


def test_one_scale_over_a_stack_becomes_one_for_each_matrix() -> None:
    w = normal(0, 5, 8, 70)
    q = fp8.quantize(w, tile=(2, -1, -1))
    prepared = fp8.prepare(q)
    assert prepared.scale.shape == (5, 1, 1)
    assert_same_bits(prepared.dequantize(), q.dequantize())
    assert_same_bits(fp8.prepare(fp8.quantize(w)).dequantize(), fp8.quantize(w).dequantize())


def test_e8m0_scales_are_kept_and_go_with_e8m0_scales_and_real_numbers() -> None:
    x, w = normal(0, 3, 64), normal(1, 64, 70)
    q = fp8.quantize(w, tile=(32, 1), scale_dtype=formats.E8M0)
    prepared = fp8.prepare(q)
    assert prepared.scale.dtype == formats.E8M0
    recipe = fp8.MXScaling()
    assert_same_bits(fp8.matmul(x, prepared, recipe=recipe), fp8.matmul(x, w, recipe=recipe))
    lhs = fp8.quantize(x, tile=(1, 32), scale_dtype=formats.E8M0)
    expected = fp8.scaled_dot_general(lhs, q, NUMBERS)
    assert_same_bits(fp8.scaled_dot_general(lhs, prepared, NUMBERS), expected)
    assert_same_bits(fp8.scaled_matmul(lhs.values, prepared, lhs.scale), expected)
    with pytest.raises(ValueError, match="'tensor' and rhs of kind 'mx'"):
        fp8.scaled_matmul(lhs.values, prepared, 1.0)


def test_tile_and_format_of_the_weights_count_before_those_of_the_recipe() -> None:
    x, w = normal(0, 3, 200), normal(1, 200, 70)
    prepared = fp8.prepare(w, recipe=fp8.RowScaling(weight_format="e5m2"))
    lhs = fp8.quantize(x, tile=(1, 128))
    expected = fp8.scaled_dot_general(lhs, prepared.unprepare(), NUMBERS)
    assert_same_bits(fp8.matmul(x, prepared, recipe=fp8.BlockScaling()), expected)


def test_einsum_takes_prepared_weights() -> None:
    x, w = normal(0, 4, 2, 3, 40), normal(1, 4, 40, 70)
    prepared = fp8.prepare(w)
    for subscripts in ("esbk,ekn->esbn", "esbk,ekn->bens", "seb...,e...n->sebn"):
        y = np.swapaxes(x, 0, 1) if subscripts.startswith("seb") else x
        assert_same_bits(fp8.einsum(subscripts, y, prepared), fp8.einsum(subscripts, y, w))
