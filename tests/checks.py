"""Comparisons: bits where the numbers contract fixes them, else a bound that reports the worst."""

from typing import Any

import numpy as np
import numpy.typing as npt

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def bits(x: npt.ArrayLike) -> npt.NDArray[Any]:
    """The array's elements as unsigned integers of their size."""
    x = np.ascontiguousarray(x)
    return x.view(_UNSIGNED[x.dtype.itemsize])


def assert_same_bits(
    actual: npt.ArrayLike, expected: npt.ArrayLike, *, any_nan: bool = False
) -> None:
    """Asserts equal dtype, shape and bits.

    Args:
      actual: what the library returned.
      expected: what it must be.
      any_nan: whether a NaN equals every other NaN. Which one arithmetic returns is no claim.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    differ = bits(actual) != bits(expected)
    if any_nan:
        differ &= ~(np.isnan(actual) & np.isnan(expected))
    if differ.any():
        at = tuple(int(i) for i in np.argwhere(differ)[0])
        raise AssertionError(
            f"{differ.sum()} of {differ.size} elements differ; first at {at}: {actual[at]!r} "
            f"(0x{bits(actual)[at]:x}), expected {expected[at]!r} (0x{bits(expected)[at]:x})"
        )


def assert_gemm_close(
    actual: npt.ArrayLike, expected: npt.NDArray[np.float64], bound: npt.NDArray[np.float64]
) -> None:
    """Asserts |actual - expected| <= bound, and that nothing is non-finite."""
    wide = np.asarray(actual).astype(np.float64)
    assert wide.shape == expected.shape == bound.shape
    error = np.abs(wide - expected)
    wrong = ~(error <= bound)
    if wrong.any():
        with np.errstate(all="ignore"):
            ratio = np.where(wrong, np.nan_to_num(error / bound, nan=np.inf, posinf=np.inf), 0)
        at = np.unravel_index(np.argmax(ratio), ratio.shape)
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} elements out of bounds; worst at "
            f"{tuple(int(i) for i in at)}: {wide[at]!r}, expected {expected[at]!r}, error "
            f"{error[at]:.3g} is {ratio[at]:.3g} times the bound {bound[at]:.3g}"
        )
