"""Small measures of arrays, by rows, tiles and percentiles. Magnitudes are 0 where not finite."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "count_exponents",
    "count_outliers",
    "error_map",
    "kurtosis",
    "largest_tile_range",
    "least_headroom",
    "percentiles",
    "piece_errors",
    "place_of",
    "range_bits",
    "ratio",
    "reduce_tiles",
    "relative_norm",
    "root_mean_square",
    "row_amax",
    "sorted_sample",
    "sqnr_db",
]

Array = npt.NDArray[Any]

#: Largest edge of the pieces whose error is told apart, and cells along an edge of an error map.
PIECE, MAP_CELLS = 128, 40
#: A channel is an outlier whose amax is so many times the median channel's.
OUTLIER_RATIO: Final = 20.0


def row_amax(x: Array) -> Array:
    return np.max(np.where(np.isfinite(x), np.abs(x), 0), axis=-1, initial=0)


def ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def range_bits(low: float, high: float) -> float:
    return math.log2(high / low) if low > 0 and high > 0 else 0.0


def percentiles(x: Array, low: float, high: float) -> tuple[float, float]:
    if not x.size:
        return 0.0, 0.0
    first, second = np.percentile(x, (low, high), method="nearest")
    return float(first), float(second)


def relative_norm(error2: Array, size2: Array, axis: int) -> Array:
    above, below = error2.sum(axis=axis), size2.sum(axis=axis)
    return np.sqrt(np.divide(above, below, out=np.zeros_like(above), where=below > 0))


def sqnr_db(error: Array, size: Array) -> float:
    noise, signal = float(np.sum(error**2)), float(np.sum(size**2))
    if signal == 0 or noise == 0:
        return 200.0  # exact
    return 10 * math.log10(signal / noise)


def reduce_tiles(x: Array, tile: tuple[int, int], function: Any) -> Array:
    for axis, step in enumerate(tile):
        if x.shape[axis]:
            x = function.reduceat(x, np.arange(0, x.shape[axis], step), axis=axis)
    return x


def least_headroom(tile_amax: Array, scales: Array, largest: float) -> float:
    some = (tile_amax > 0) & (scales > 0)
    if not some.any():
        return 0.0
    return float(np.min(np.log2(largest * scales[some].astype(np.float64) / tile_amax[some])))


def largest_tile_range(size: Array, tile: tuple[int, int]) -> float:
    """Largest range of a tile, without the smallest thousandth of all magnitudes."""
    floor = percentiles(size[size > 0], 0.1, 100)[0]
    lowest = reduce_tiles(np.where(size >= max(floor, 1e-300), size, np.inf), tile, np.minimum)
    highest = reduce_tiles(size, tile, np.maximum)
    some = np.isfinite(lowest) & (highest > 0)
    return float(np.max(np.log2(highest[some] / lowest[some]), initial=0))


def piece_errors(error: Array, size: Array, tile: tuple[int, int]) -> tuple[Array, tuple[int, int]]:
    piece = (min(tile[0], PIECE), min(tile[1], PIECE))
    above = reduce_tiles(error**2, piece, np.add)
    below = reduce_tiles(size**2, piece, np.add)
    # A piece of nearly nothing beside its tensor says little: 2^-40 of the mean.
    floor = max(2.0**-80 * float(below.mean()) if below.size else 0.0, 1e-300)
    return np.sqrt(np.divide(above, below, out=np.zeros_like(above), where=below > floor)), piece


def place_of(pieces: Array, piece: tuple[int, int]) -> tuple[int, int]:
    if not pieces.size:
        return 0, 0
    row, column = np.unravel_index(int(pieces.argmax()), pieces.shape)
    return int(row) * piece[0], int(column) * piece[1]


def count_outliers(channels: Array) -> int:
    median = float(np.median(channels)) if channels.size else 0.0
    return int(np.count_nonzero(channels > OUTLIER_RATIO * median)) if median > 0 else 0


def kurtosis(x: Array) -> float:
    if not x.size:
        return 0.0
    centred = x - x.mean()
    variance = float(np.mean(centred**2))
    return float(np.mean((centred / math.sqrt(variance)) ** 4)) if variance > 0 else 0.0


def count_exponents(sizes: Array) -> dict[int, int]:
    found, counts = np.unique(np.frexp(sizes)[1] - 1, return_counts=True)
    return {int(e): int(c) for e, c in zip(found, counts, strict=True)}


def error_map(error: Array, size: Array) -> list[list[float]]:
    cell = tuple(max(1, -(-n // MAP_CELLS)) for n in error.shape)
    pair = (cell[0], cell[1])
    above, below = reduce_tiles(error**2, pair, np.add), reduce_tiles(size**2, pair, np.add)
    ratio = np.sqrt(np.divide(above, below, out=np.zeros_like(above), where=below > 0))
    rows: list[list[float]] = np.round(100 * ratio, 3).tolist()
    return rows


def sorted_sample(x: Array) -> list[float]:
    ordered = np.sort(x)
    if ordered.size > 200:
        ordered = ordered[np.linspace(0, ordered.size - 1, 200).round().astype(int)]
    values: list[float] = np.round(ordered, 4).tolist()
    return values


def root_mean_square(x: Array) -> float:
    """0 where there is nothing."""
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0
