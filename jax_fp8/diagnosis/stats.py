"""What FP8 did to one tensor: shares that became zero, subnormal or saturated, and where it hurts.

All in NumPy on the codes that the program computed. Shares are per cent of the nonzero values.
Large tensors are sampled by rows: `TensorStats.rows_seen` of `rows`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from jax_fp8.diagnosis.capture import LETTERS, Operand
from jax_fp8.diagnosis.numbers import (
    count_exponents,
    count_outliers,
    error_map,
    kurtosis,
    largest_tile_range,
    least_headroom,
    percentiles,
    piece_errors,
    place_of,
    range_bits,
    ratio,
    reduce_tiles,
    relative_norm,
    row_amax,
    sorted_sample,
    sqnr_db,
)
from jax_fp8.formats import Format
from jax_fp8.testing.oracle import expand_scale_np

__all__ = ["THRESHOLDS", "Level", "Plots", "TensorStats", "Threshold", "sample_rows", "study"]

Array = npt.NDArray[Any]
Level = Literal["ok", "warn", "bad"]

#: Elements of an operand that are looked at. Above it, whole blocks of rows are taken.
MAX_ELEMENTS: Final = 2**21
#: Rows of a block.
ROW_BLOCK: Final = 128
#: SQNR in dB of normal data with a scale from amax: measured errors of 2.65 % and 5.28 %.
EXPECTED_SQNR_DB: Final[Mapping[str, float]] = {"e4m3fn": 31.5, "e5m2": 25.6}


@dataclasses.dataclass(frozen=True)
class Threshold:
    """From where on a column is worth a warning, and bad.

    Attributes:
      warn: limit.
      bad: limit.
      below: whether values below the limits are the bad ones.
      roles: roles it applies to.
      formats: formats it applies to.
    """

    warn: float
    bad: float
    below: bool = False
    roles: tuple[str, ...] = ("input", "weight", "gradient")
    formats: tuple[str, ...] = ("e4m3fn", "e5m2")

    def level(self, value: float) -> Level:
        def beyond(limit: float) -> bool:
            return value < limit if self.below else value > limit

        return "bad" if beyond(self.bad) else "warn" if beyond(self.warn) else "ok"


_NEVER = math.inf
#: The one table of limits, a row per column of the report and kind of tensor it holds for.
THRESHOLDS: Final[tuple[tuple[str, Threshold], ...]] = (
    # Two bits of headroom are two binades of range lost. A value rounds above the largest one
    # from 464 / 448 = 2^0.051 on.
    ("headroom_bits", Threshold(2.0, _NEVER)),
    ("headroom_bits", Threshold(-0.051, -0.051, below=True)),
    ("flushed_percent", Threshold(0.1, 1.0, roles=("input", "weight"))),
    ("flushed_percent", Threshold(5.0, 20.0, roles=("gradient",))),
    ("subnormal_percent", Threshold(5.0, 25.0)),
    ("saturated_percent", Threshold(0.0, 0.1)),
    ("tile_range_bits", Threshold(15.0, 18.0, formats=("e4m3fn",))),
    ("tile_range_bits", Threshold(30.0, 32.0, formats=("e5m2",))),
    ("sqnr_gap_db", Threshold(-1.0, -3.0, below=True)),
    ("worst_row_percent", Threshold(8.0, 30.0)),
    ("worst_tile_percent", Threshold(8.0, 30.0)),
    # Rounding to nearest where density falls off is biased by itself: 0.09 % (E4M3) and 0.3 %
    # (E5M2, with a unit twice as large) for normal data.
    ("bias_percent", Threshold(0.2, 1.0, formats=("e4m3fn",))),
    ("bias_percent", Threshold(0.8, 2.0, formats=("e5m2",))),
    ("non_finite", Threshold(0.0, 0.0)),
)


@dataclasses.dataclass(frozen=True)
class Plots:
    """What the pictures of a tensor show.

    Attributes:
      exponents: count of nonzero finite values by floor(log2 |x|).
      scaled_exponents: the same of |x / scale|, which is what the format has to hold.
      error_map: error of pieces in per cent of their own norm, at most 40 × 40 cells.
      row_errors: error of each row in per cent of its own norm, sorted, at most 200 of them.
    """

    exponents: dict[int, int]
    scaled_exponents: dict[int, int]
    error_map: list[list[float]]
    row_errors: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorStats:
    """Columns of the report for one quantised tensor. NaN stands for unknown.

    Attributes:
      layer, role, directions, format, tile, given_scale: as in `capture.Operand`.
      rows, rows_seen, k: size, and rows that were looked at (batch dims are rows, too).
      amax: largest finite magnitude.
      scale_min, scale_max: scales.
      headroom_bits: log2(format.max · scale / amax), the least over all tiles that are not zero.
      flushed_percent: nonzero values whose code is 0.
      subnormal_percent: nonzero codes below the smallest normal number.
      saturated_percent: values that round above the largest code: |x / scale| ≥ 464 or 61440.
      range_bits: log2 of amax over the smallest nonzero magnitude.
      core_range_bits: the same between the percentiles 0.1 and 99.9.
      tile_range_bits: the largest range of one scale's tile, percentiles 0.1 to 100 of it.
      sqnr_db: 10 log10(Σx² / Σ(q - x)²).
      sqnr_gap_db: sqnr_db minus what normal data would have; negative is worse.
      row_rms_percent: root mean square of ‖q - x‖ / ‖x‖ of the rows: a huge row hides no other.
      worst_row_percent, worst_row: largest ‖q - x‖ / ‖x‖ of a row, and which.
      worst_tile_percent, worst_tile: the same of a tile, at most 128 × 128, and its row and k.
      outlier_channels: channels along k with amax above 20 times the median channel's.
      steady_channels: those whose median magnitude is, too: outliers in most rows.
      kurtosis: fourth standardised moment; 3 is normal. It foretells divergence (arXiv 2505.20524).
      bias_percent: |mean((q - x) · sign x)| / mean |x|.
      non_finite: values that are NaN or infinite.
      zero_tiles: tiles of zeros.
      floor_rule: whether the given scales are those of the MX specification, which saturate:
        2^(floor(log2 amax) - 8), or - 15 for E5M2.
      spike_ratio: amax over the median nonzero magnitude.
      row_spread_bits: log2 of the 99th over the 1st percentile of the rows' amax.
      spike_rows_percent: rows whose amax is within a factor 100 of amax.
      plots: data of the pictures.
    """

    layer: str
    role: str
    directions: tuple[str, ...]
    format: str
    tile: tuple[int, int]
    given_scale: bool
    rows: int
    rows_seen: int
    k: int
    amax: float
    scale_min: float
    scale_max: float
    headroom_bits: float
    flushed_percent: float
    subnormal_percent: float
    saturated_percent: float
    range_bits: float
    core_range_bits: float
    tile_range_bits: float
    sqnr_db: float
    sqnr_gap_db: float
    row_rms_percent: float
    worst_row_percent: float
    worst_row: int
    worst_tile_percent: float
    worst_tile: tuple[int, int]
    outlier_channels: int
    steady_channels: int
    kurtosis: float
    bias_percent: float
    non_finite: int
    zero_tiles: int
    floor_rule: bool
    spike_ratio: float
    row_spread_bits: float
    spike_rows_percent: float
    plots: Plots

    @property
    def name(self) -> str:
        return f"{self.layer} {LETTERS[self.role]} ({', '.join(self.directions)})"

    @property
    def scale_kind(self) -> str:
        """What one scale covers, in words."""
        rows, k = self.tile
        if k >= self.k:
            return "tensor" if rows >= self.rows else "row" if rows == 1 else f"{rows} rows"
        return f"{rows}×{k}"

    def levels(self) -> dict[str, Level]:
        """Every column with limits, by how bad it is."""
        order = ("ok", "warn", "bad")
        found: dict[str, Level] = {}
        for column, threshold in THRESHOLDS:
            if self.role in threshold.roles and self.format in threshold.formats:
                level = threshold.level(getattr(self, column))
                found[column] = max(found.get(column, "ok"), level, key=order.index)
        return found


def sample_rows(x: Operand, limit: int = MAX_ELEMENTS) -> Operand:
    """The operand with at most some `limit` elements: blocks of rows, spread evenly over it.

    The block that holds amax is always among them, so scales from amax stay what they are. Whole
    tiles are kept together. Batch dims become rows where each has its own scales.
    """
    x = _rows_only(x)
    rows, k = x.codes.shape[1:]
    if rows * k <= limit:
        return x
    whole = x.scale.shape[1] == 1
    unit = ROW_BLOCK if whole else x.tile[0] * -(-ROW_BLOCK // x.tile[0])
    blocks = -(-rows // unit)
    count = max(1, min(blocks, limit // (unit * k)))
    source = x.exact if x.exact is not None else x.codes.astype(np.float32)
    peak = int(np.argmax(row_amax(source[0]))) // unit
    chosen = {peak, *np.linspace(0, blocks - 1, count).round().astype(int).tolist()}
    chosen = {peak, *sorted(chosen - {peak})[: count - 1]} if count > 1 else {peak}
    index = np.concatenate([np.arange(b * unit, min((b + 1) * unit, rows)) for b in sorted(chosen)])
    scale_index = np.unique(index // x.tile[0]) if not whole else np.array([0])
    return dataclasses.replace(
        x,
        codes=x.codes[:, index],
        exact=None if x.exact is None else x.exact[:, index],
        scale=x.scale[:, scale_index],
        tile=(len(index) if whole else x.tile[0], x.tile[1]),
    )


def _rows_only(x: Operand) -> Operand:
    """Batch dims joined to the rows: (1, batch · rows, k)."""
    batch, rows, k = x.codes.shape
    if batch == 1 and x.scale.shape[0] == 1:
        return x
    tile_rows = x.tile[0]
    scale = np.broadcast_to(x.scale, (batch, *x.scale.shape[1:]))
    if rows % tile_rows:  # a tile must not straddle two examples
        scale, tile_rows = np.repeat(scale, tile_rows, axis=1)[:, :rows], 1
    joined = (1, batch * rows, k)
    return dataclasses.replace(
        x,
        codes=x.codes.reshape(joined),
        exact=None if x.exact is None else np.broadcast_to(x.exact, x.codes.shape).reshape(joined),
        scale=scale.reshape(1, -1, scale.shape[-1]),
        tile=(tile_rows, x.tile[1]),
    )


def study(operand: Operand) -> TensorStats:
    """Statistics of one operand.

    >>> import jax.numpy as jnp, jax_fp8 as fp8
    >>> from jax_fp8.diagnosis.capture import capture
    >>> x = jnp.ones((4, 8)).at[0, 0].set(1e6)
    >>> gemm = capture(lambda x, w: fp8.matmul(x, w, recipe=fp8.TensorScaling()), x, x.T).gemms[0]
    >>> study(gemm.lhs).flushed_percent
    96.875
    """
    x = sample_rows(operand)
    codes = x.codes[0].astype(np.float32)
    scale = expand_scale_np(x.scale[0], codes.shape, x.tile)
    real = codes.astype(np.float64) * scale
    known = x.exact is not None
    exact = x.exact[0].astype(np.float64) if x.exact is not None else real
    finite = np.isfinite(exact)
    size = np.where(finite, np.abs(exact), 0.0)
    nonzero = size > 0
    total = max(int(np.count_nonzero(nonzero)), 1)
    amax, nonzero_sizes = float(size.max(initial=0.0)), size[nonzero]
    error = np.where(finite & np.isfinite(real), real - exact, 0.0)
    fmt = x.format
    with np.errstate(all="ignore"):
        scaled = np.abs(exact.astype(np.float32) / scale)
    row_errors = relative_norm(error**2, size**2, axis=1)
    pieces, piece = piece_errors(error, size, x.tile)
    sqnr = sqnr_db(error, size)
    tile_amax = reduce_tiles(size, x.tile, np.maximum)
    nonzero_tiles = tile_amax > 0
    scales = x.scale[0][: tile_amax.shape[0], : tile_amax.shape[1]]
    channel_amax, channel_median = size.max(axis=0, initial=0), np.median(size, axis=0)
    low, high = percentiles(nonzero_sizes, 0.1, 99.9)
    row_amax = size.max(axis=1, initial=0)
    row_low, row_high = percentiles(row_amax[row_amax > 0], 1, 99)
    outward = float(np.sum(error * np.sign(np.where(finite, exact, 0))))
    nan = math.nan

    def percent(mask: Array) -> float:
        return 100 * float(np.count_nonzero(mask)) / total

    return TensorStats(
        layer=x.layer,
        role=x.role,
        directions=x.directions,
        format=fmt.name,
        tile=operand.tile,
        given_scale=x.given_scale,
        rows=operand.codes.shape[0] * operand.codes.shape[1],
        rows_seen=codes.shape[0],
        k=codes.shape[1],
        amax=amax,
        scale_min=float(x.scale.min(initial=np.inf)),
        scale_max=float(x.scale.max(initial=0)),
        headroom_bits=least_headroom(tile_amax, scales, fmt.max) if known else nan,
        flushed_percent=percent(nonzero & (codes == 0)) if known else nan,
        subnormal_percent=percent((codes != 0) & (np.abs(codes) < fmt.smallest_normal)),
        saturated_percent=percent(finite & (scaled >= fmt.saturation_threshold)) if known else nan,
        range_bits=range_bits(nonzero_sizes.min(initial=amax), amax),
        core_range_bits=range_bits(low, high),
        tile_range_bits=largest_tile_range(size, x.tile),
        sqnr_db=sqnr if known else nan,
        sqnr_gap_db=sqnr - EXPECTED_SQNR_DB[fmt.name] if known else nan,
        row_rms_percent=100 * float(np.sqrt(np.mean(row_errors**2)))
        if known and row_errors.size
        else nan,
        worst_row_percent=100 * float(row_errors.max(initial=0)) if known else nan,
        worst_row=int(row_errors.argmax()) if row_errors.size else 0,
        worst_tile_percent=100 * float(pieces.max(initial=0)) if known else nan,
        worst_tile=place_of(pieces, piece),
        outlier_channels=count_outliers(channel_amax),
        steady_channels=count_outliers(channel_median),
        kurtosis=kurtosis(exact[finite]),
        bias_percent=100 * abs(ratio(outward, float(size.sum()))) if known else nan,
        non_finite=int(exact.size - np.count_nonzero(finite)),
        zero_tiles=int(np.count_nonzero(~nonzero_tiles)),
        floor_rule=known and x.given_scale and _follows_floor_rule(tile_amax, scales, fmt),
        spike_ratio=ratio(amax, float(np.median(nonzero_sizes)) if nonzero_sizes.size else 0.0),
        row_spread_bits=range_bits(row_low, row_high),
        spike_rows_percent=100 * float(np.mean(row_amax >= amax / 100)) if row_amax.size else nan,
        plots=Plots(
            exponents=count_exponents(nonzero_sizes),
            scaled_exponents=count_exponents(scaled[nonzero & (scaled > 0)].astype(np.float64)),
            error_map=error_map(error, size),
            row_errors=sorted_sample(100 * row_errors),
        ),
    )


def _follows_floor_rule(tile_amax: Array, scales: Array, fmt: Format) -> bool:
    """Whether scales are 2^(floor(log2 amax) - floor(log2 fmt.max)) (OCP MX 1.0, section 6.3)."""
    some = tile_amax > 0
    if not some.any():
        return False
    exponent = np.frexp(tile_amax[some])[1] - math.frexp(fmt.max)[1]
    return bool(np.all(scales[some] == np.ldexp(1.0, exponent)))
