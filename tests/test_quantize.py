"""The quantiser against the independent oracle, bit for bit: codes, scales, tiles."""

import functools
import itertools
from typing import Any

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_fp8 as fp8
import strategies
from checks import assert_same_bits
from jax_fp8 import config, formats
from jax_fp8.formats import Format
from jax_fp8.quantize_primitive import quantize_two_axes
from jax_fp8.testing import oracle

INPUTS = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
NUM_RANDOM = 1 << 20

every_format = pytest.mark.parametrize("fmt", formats.ALL, ids=lambda fmt: fmt.name)
every_input = pytest.mark.parametrize("dtype", INPUTS.values(), ids=INPUTS)

quantize = jax.jit(fp8.quantize, static_argnames=("format", "tile", "power_of_two", "saturate"))
dequantize = jax.jit(fp8.dequantize, static_argnums=1)


def assert_equals_oracle(
    x: Any, fmt: Format, tile: tuple[int, ...] | None, row: str, **options: Any
) -> None:
    """Quantises on one row and compares codes and scales with the oracle's."""
    with fp8.force_kernel(row):
        q = quantize(x, fmt, tile, **options)
    whole = (-1,) * np.ndim(x)
    values, scale = oracle.quantize_np(x, fmt.name, whole if tile is None else tile, **options)
    assert_same_bits(q.scale, scale, any_nan=True)
    assert_same_bits(q.values, values)


def random_bits(rng: np.random.Generator, dtype: np.dtype[Any], size: int) -> np.ndarray:
    """Every bit pattern with equal chance: NaN, infinity and subnormals included."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return rng.integers(0, 1 << 8 * dtype.itemsize, size, unsigned).view(dtype)


def all_bits(dtype: np.dtype[Any]) -> np.ndarray:
    """All 65,536 patterns of a 16-bit dtype."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


# --- Every code, tie and neighbour ----------------------------------------------------------------


def turning_points(fmt: Format) -> np.ndarray:
    """float32 values of all codes, all ties between neighbours, and what lies next to either."""
    values = np.arange(256, dtype=np.uint8).view(fmt.dtype).astype(np.float32)
    magnitudes = np.unique(np.abs(values[np.isfinite(values)]))
    beyond = np.float32([fmt.saturation_threshold])
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2  # exact in float32
    points = np.concatenate([magnitudes, ties, beyond])
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))]
    )
    return np.concatenate([points, -points])


@every_format
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("exponent", [0, -7, 100])
def test_ties_and_their_neighbours_round_to_nearest_even(
    fmt: Format, saturate: bool, exponent: int, quantize_row: str
) -> None:
    x = turning_points(fmt)
    assert x.size > 6 * 120
    scale = np.float32(2.0**exponent)
    exact = np.asarray(x * scale)  # powers of two lose nothing of these values
    with fp8.force_kernel(quantize_row):
        q = quantize(exact, fmt, scale=scale, saturate=saturate)
    expected = np.clip(x, -fmt.max, fmt.max) if saturate else x
    assert_same_bits(q.values, expected.astype(fmt.dtype))


@every_format
def test_codes_survive_dequantize_and_quantize(fmt: Format, quantize_row: str) -> None:
    codes = np.arange(256, dtype=np.uint8).view(fmt.dtype)
    scale = np.float32(0.37)
    with fp8.force_kernel(quantize_row):
        real = dequantize(fp8.ScaledArray(codes, np.full(1, scale), (256,)), np.dtype(np.float32))
        q = quantize(real, fmt, scale=scale)
    # The canonical NaN takes the place of the others.
    assert_same_bits(q.values, codes.astype(np.float32).astype(fmt.dtype))


# --- Random bit patterns --------------------------------------------------------------------------


@every_format
@every_input
@pytest.mark.parametrize("given", ["computed scale", "scale of one", "random scale"])
def test_random_bit_patterns_quantize_as_the_oracle_says(
    fmt: Format, dtype: np.dtype[Any], given: str, quantize_row: str
) -> None:
    rng = np.random.default_rng([len(given), dtype.num])
    x = random_bits(rng, dtype, NUM_RANDOM).reshape(-1, 256)
    if dtype.itemsize == 2:
        x = np.concatenate([x, all_bits(dtype).reshape(-1, 256)])
    scale = None
    if given == "scale of one":
        scale = np.ones((x.shape[0], 2), np.float32)
    elif given == "random scale":
        scale = random_bits(rng, INPUTS["float32"], 2 * x.shape[0]).reshape(-1, 2)
    assert_equals_oracle(x, fmt, (1, 128), quantize_row, scale=scale)


@every_format
@pytest.mark.parametrize("out", INPUTS.values(), ids=INPUTS)
def test_random_codes_and_scales_dequantize_with_one_rounding(
    fmt: Format, out: np.dtype[Any], quantize_row: str
) -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(0, 256, (NUM_RANDOM // 256, 256), np.uint8).view(fmt.dtype)
    scale = random_bits(rng, INPUTS["float32"], NUM_RANDOM // 4).reshape(-1, 64)
    with fp8.force_kernel(quantize_row):
        real = dequantize(fp8.ScaledArray(values, scale, (1, 4)), out)
    with np.errstate(all="ignore"):
        exact = values.astype(np.float32) * np.repeat(scale, 4, axis=1)
        assert_same_bits(real, exact.astype(out), any_nan=True)
    subnormal = (np.abs(exact) > 0) & (np.abs(exact) < np.float32(2.0**-126))
    assert subnormal.any()


@every_format
@pytest.mark.parametrize("saturate", [True, False])
def test_given_scales_of_any_value_divide_like_any_other(
    fmt: Format, saturate: bool, quantize_row: str
) -> None:
    special = [0.0, 1e-45, 2.0**-126, 1e-3, 1.0, 3.0, 448.0, 1e30, 3.4e38, np.inf, np.nan]
    x, scale = (np.float32(v) for v in zip(*itertools.product(special, repeat=2), strict=True))
    for x_sign, scale_sign in itertools.product((1, -1), repeat=2):
        assert_equals_oracle(
            x * x_sign, fmt, (1,), quantize_row, scale=scale * scale_sign, saturate=saturate
        )


# --- amax to scale --------------------------------------------------------------------------------

AMAXES = np.concatenate(
    [
        np.ldexp(np.float32(1), np.arange(-149, 128)),
        np.float32([1e-45, 1e-38, 1.1754942e-38, 2.0**-126 * 448, 1.0, 448, 449, 57344, 3e38]),
        np.nextafter(np.ldexp(np.float32(1.75), np.arange(-120, 127)), np.float32(np.inf)),
        np.ldexp(np.float32(1.75), np.arange(-120, 127)),
    ]
).astype(np.float32)


@every_format
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scale_of_every_magnitude_is_the_oracles(
    fmt: Format, power_of_two: bool, quantize_row: str
) -> None:
    fractions = np.float32([0.3, -1.0, 0.0, 0.77, 2.0**-9, -0.5])
    x = AMAXES[:, None] * fractions
    assert_equals_oracle(x, fmt, (1, -1), quantize_row, power_of_two=power_of_two)


@every_format
def test_power_of_two_scale_is_the_smallest_that_saturates_nothing(
    fmt: Format, quantize_row: str
) -> None:
    with fp8.force_kernel(quantize_row):
        q = quantize(AMAXES, fmt, (1,), power_of_two=True)
    scale = np.asarray(q.scale, np.float64)
    mantissa, exponent = np.frexp(scale)
    assert (mantissa == 0.5).all()
    assert (fmt.max * scale >= AMAXES).all()
    assert ((fmt.max * scale / 2 < AMAXES) | (exponent - 1 == -126)).all()


@every_format
def test_scale_of_a_tile_of_zeros_is_one(fmt: Format, quantize_row: str) -> None:
    x = np.zeros((3, 8), np.float32)
    x[1] = [-0.0, 0.0, -0.0, 0.0, np.nan, np.inf, -np.inf, np.nan]
    with fp8.force_kernel(quantize_row):
        for power_of_two in (False, True):
            q = quantize(x, fmt, (1, -1), power_of_two=power_of_two)
            assert_same_bits(q.scale, np.ones((3, 1), np.float32))
            assert_same_bits(q.values, x.astype(fmt.dtype))


@every_format
def test_scale_is_never_below_the_smallest_normal_number(fmt: Format, quantize_row: str) -> None:
    with fp8.force_kernel(quantize_row):
        q = quantize(np.float32([1e-45, 1e-38, 2e-38]), fmt, (1,))
    assert_same_bits(q.scale, np.full(3, 2.0**-126, np.float32))


@every_format
@every_input
def test_non_finite_entries_leave_their_neighbours_alone(
    fmt: Format, dtype: np.dtype[Any], quantize_row: str
) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, 200)).astype(dtype)
    spoilt, at = x.copy(), rng.random(x.shape) < 0.1
    at[np.arange(40), np.abs(x.astype(np.float32)).argmax(1)] = False
    spoilt[at] = rng.choice(np.array([np.nan, np.inf, -np.inf]), at.sum()).astype(dtype)
    with fp8.force_kernel(quantize_row):
        clean, dirty = quantize(x, fmt, (1, -1)), quantize(spoilt, fmt, (1, -1))
    assert_same_bits(dirty.scale, clean.scale)
    codes = np.asarray(dirty.values)
    assert_same_bits(codes[~at], np.asarray(clean.values)[~at])
    assert_same_bits(codes[at], spoilt[at].astype(fmt.dtype))
    assert not np.isfinite(codes[at].astype(np.float32)).any()


@every_format
def test_an_overflowing_quotient_of_a_finite_entry_saturates(
    fmt: Format, quantize_row: str
) -> None:
    x = np.float32([3e38, -3e38, np.inf, -np.inf])
    with fp8.force_kernel(quantize_row):
        codes = np.asarray(quantize(x, fmt, scale=1e-30).values).astype(np.float32)
    assert codes[:2].tolist() == [fmt.max, -fmt.max]
    assert not np.isfinite(codes[2:]).any()


@hypothesis.given(st.integers(-60, 60), strategies.seeds, strategies.formats_of_values)
@hypothesis.settings(max_examples=30)
def test_rescaling_by_a_power_of_two_changes_the_scale_alone(
    exponent: int, seed: int, fmt: Format
) -> None:
    x = np.random.default_rng(seed).standard_normal((8, 40)).astype(np.float32)
    q = quantize(x, fmt, (1, 16))
    rescaled = quantize(np.ldexp(x, exponent), fmt, (1, 16))
    assert_same_bits(rescaled.values, q.values)
    assert_same_bits(rescaled.scale, np.ldexp(np.asarray(q.scale), exponent))


# --- Tiles ----------------------------------------------------------------------------------------

#: (shape, tile): each way in which tiles can lie on an array, whole, ragged or larger than it.
TILINGS: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
    ((), None), ((), ()), ((7,), None), ((7,), (1,)), ((7,), (3,)), ((7,), (100,)),
    ((0,), None), ((0,), (4,)), ((3, 0), (1, -1)), ((0, 5), (2, 2)), ((3, 0, 4), (1, 2, 2)),
    ((520, 600), None), ((520, 600), (1, -1)), ((520, 600), (-1, 1)), ((520, 600), (1, 128)),
    ((520, 600), (128, 1)), ((520, 600), (128, 128)), ((520, 600), (128, 32)),
    ((520, 600), (3, 300)), ((520, 600), (257, 64)), ((520, 600), (521, 7)),
    ((520, 600), (1, 1)), ((520, 600), (13, 11)), ((1, 70_001), (1, 65)), ((70_001, 1), (65, 1)),
    ((70_001, 3), (-1, 1)), ((5, 129, 257), None), ((5, 129, 257), (128, 128)),
    ((5, 129, 257), (1, 128)), ((5, 129, 257), (-1, -1)), ((5, 129, 257), (2, 128, 128)),
    ((5, 129, 257), (2, -1, 1)), ((5, 129, 257), (-1, 1, -1)), ((5, 129, 257), (3, 1, 1)),
    ((2, 3, 4, 5), (2, 2, 3)), ((2, 3, 4, 5), (-1, 1, 3, -1)), ((2, 3, 4, 5), (1, 2, -1, 2)),
    ((4, 5, 6), (2, 50, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "tile"), TILINGS, ids=str)
@every_input
def test_every_kind_of_tile_equals_the_oracle(
    shape: tuple[int, ...],
    tile: tuple[int, ...] | None,
    dtype: np.dtype[Any],
    quantize_row: str,
) -> None:
    x = strategies.varied_numbers(shape, dtype)
    for fmt in formats.ALL:
        assert_equals_oracle(x, fmt, tile, quantize_row)


@pytest.mark.parametrize(("shape", "tile"), TILINGS, ids=str)
def test_every_kind_of_tile_takes_given_scales(
    shape: tuple[int, ...], tile: tuple[int, ...] | None, quantize_row: str
) -> None:
    x = strategies.varied_numbers(shape, INPUTS["float32"])
    whole = (-1,) * len(shape)
    _, computed = oracle.quantize_np(x, "e4m3fn", whole if tile is None else tile)
    rng = np.random.default_rng(3)
    scale = np.asarray(computed * strategies.random_scales(rng, computed.shape, (-2, 2)))
    assert_equals_oracle(x, formats.E4M3FN, tile, quantize_row, scale=scale)
    with fp8.force_kernel(quantize_row):
        real = dequantize(quantize(x, "e4m3", tile, scale=scale), np.dtype(np.float32))
    values, _ = oracle.quantize_np(x, "e4m3fn", whole if tile is None else tile, scale=scale)
    expected = oracle.dequantize_np(values, scale, whole if tile is None else tile)
    assert_same_bits(real, expected.astype(np.float32), any_nan=True)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_generated_tiles_equal_the_oracle(data: st.DataObject, quantize_row: str) -> None:
    shape = data.draw(strategies.shapes())
    x = strategies.varied_numbers(shape, data.draw(st.sampled_from(list(INPUTS.values()))))
    assert_equals_oracle(
        x,
        data.draw(strategies.formats_of_values),
        data.draw(strategies.tiles(shape)),
        quantize_row,
        power_of_two=data.draw(st.booleans()),
    )


PAIRS = [
    ((1, 128), (128, 1)), ((1, -1), (-1, 1)), ((-1, -1), (1, 32)), ((128, 128), (3, 5)),
    ((1, 1), (7, 300)), ((64, 1), (1, 64)),
]  # fmt: skip


@every_format
@pytest.mark.parametrize("tiles", PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(70, 130), (3, 129, 257), (1, 600), (0, 4, 4), (700, 900)])
def test_two_axis_form_equals_two_single_ones(
    shape: tuple[int, ...], tiles: Any, fmt: Format, quantize_row: str
) -> None:
    x = strategies.varied_numbers(shape, INPUTS["float32"])
    resolved = tuple(
        tuple(size if size != -1 else dim for size, dim in zip(tile, shape[-2:], strict=True))
        for tile in tiles
    )
    for power_of_two in (False, True):
        with fp8.force_kernel(quantize_row):
            run = functools.partial(
                quantize_two_axes,
                fmt=fmt,
                tiles=resolved,
                execution=config.without_sums("test"),
                power_of_two=power_of_two,
            )
            out = jax.jit(run)(x)
        for tile, got in zip(resolved, (out[:2], out[2:]), strict=True):
            values, scale = oracle.quantize_np(x, fmt.name, tile, power_of_two=power_of_two)
            assert_same_bits(got[0], values)
            assert_same_bits(got[1], scale)
