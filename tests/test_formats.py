"""The table of formats: what ml_dtypes says of each format, and what the kernels decode."""

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_fp8 as fp8
from checks import assert_same_bits
from jax_fp8 import _ffi, formats
from jax_fp8.formats import Format

every_format = pytest.mark.parametrize("fmt", formats.ALL, ids=lambda fmt: fmt.name)


def decoded(fmt: Format) -> np.ndarray:
    """The value of each code, by ml_dtypes."""
    return np.arange(256, dtype=np.uint8).view(fmt.dtype).astype(np.float32)


@every_format
def test_table_says_what_ml_dtypes_says(fmt: Format) -> None:
    info = ml_dtypes.finfo(fmt.dtype)
    assert fmt.max == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.eps == float(info.eps)
    assert fmt.mantissa_bits == info.nmant
    one = int(np.ones((), fmt.dtype).view(np.uint8))
    assert one == fmt.bias << fmt.mantissa_bits


@every_format
def test_table_says_what_the_codes_hold(fmt: Format) -> None:
    values = decoded(fmt)
    finite = np.abs(values[np.isfinite(values)])
    assert finite.max() == fmt.max
    assert finite[finite > 0].min() == fmt.smallest_subnormal
    assert np.isinf(values).any() == fmt.has_inf


@every_format
def test_saturation_starts_half_a_unit_above_the_largest_value(fmt: Format) -> None:
    threshold = np.float32(fmt.saturation_threshold)
    below = np.nextafter(threshold, np.float32(0))
    above = np.nextafter(threshold, np.float32(np.inf))
    assert float(below.astype(fmt.dtype)) == fmt.max
    assert not np.isfinite(above.astype(fmt.dtype).astype(np.float32))


def test_thresholds_are_those_of_the_numbers_contract() -> None:
    assert formats.E4M3FN.saturation_threshold == 464
    assert formats.E5M2.saturation_threshold == 61440


@every_format
def test_kernels_decode_every_code_as_ml_dtypes_does(fmt: Format, quantize_row: str) -> None:
    codes = np.arange(256, dtype=np.uint8).view(fmt.dtype)
    with fp8.force_kernel(quantize_row):
        real = fp8.dequantize(fp8.ScaledArray(codes, np.ones(1, np.float32), (256,)))
    assert_same_bits(real, decoded(fmt), any_nan=True)


@every_format
def test_kernels_know_the_largest_and_the_special_codes(fmt: Format, quantize_row: str) -> None:
    x = np.float32([1e30, -1e30, np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0])
    with fp8.force_kernel(quantize_row):
        codes = np.asarray(fp8.quantize(x, fmt, scale=1.0).values)
    signs = np.float32([1, -1])
    assert_same_bits(codes[:2], (signs * np.float32(fmt.max)).astype(fmt.dtype))
    assert_same_bits(codes[2:], x[2:].astype(fmt.dtype))


@every_format
def test_kernels_know_formats_by_the_names_of_the_table(fmt: Format) -> None:
    rows = _ffi.explain_gemm(
        1, 1, 1, fmt.name, fmt.name, "f32", "mk", "nk", (1, 1), (1, 1), "native", 0, 1, "", False
    )
    assert any(not why_not for _, why_not in rows)


@every_format
def test_lookup_takes_names_dtypes_and_formats(fmt: Format) -> None:
    jax_dtype = getattr(jax.numpy, fmt.dtype.name)
    for given in (fmt, fmt.name, fmt.name.upper(), *fmt.aliases, fmt.dtype, fmt.dtype.type):
        assert formats.lookup(given) is fmt
    assert formats.lookup(jax_dtype) is fmt


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"])
@pytest.mark.parametrize("as_dtype", [False, True])
def test_lookup_refuses_fnuz_by_name_and_says_what_to_use(name: str, as_dtype: bool) -> None:
    given = np.dtype(name) if as_dtype else name
    with pytest.raises(TypeError, match=rf"quantize: {name} is an FNUZ format.*float8_e4m3fn"):
        formats.lookup(given, call="quantize")


@pytest.mark.parametrize("given", ["e3m4", "float32", np.float32, np.dtype("int8")])
def test_lookup_lists_the_formats_for_anything_else(given: object) -> None:
    with pytest.raises(TypeError, match="'e4m3fn', 'e5m2'"):
        formats.lookup(given)
