"""Every figure of a diagnosis against a computation of its own in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import jax_fp8 as fp8
from diagnosis_data import WEIGHTS, K, M, normal, product, row_spread, spike
from jax_fp8.diagnosis.capture import Operand, capture
from jax_fp8.diagnosis.gemm_stats import Accumulation, error_against_k, longest_interval, study_gemm
from jax_fp8.diagnosis.problems import errors
from jax_fp8.diagnosis.stats import THRESHOLDS, TensorStats, sample_rows, study
from jax_fp8.diagnosis.what_if import WhatIf, cheapest
from jax_fp8.emulation import error_study

DATA = {
    "normal": normal(48, 300),
    "lognormal": np.random.default_rng(5).lognormal(0, 3, (48, 300)).astype(np.float32),
    "zeros": np.where(np.random.default_rng(6).random((48, 300)) < 0.5, 0, normal(48, 300)),
    "tiny": normal(3, 5) * 1e-30,
}
DATA["zeros"][:, 128:256] = 0
FMT = {
    "e4m3fn": (448.0, 464.0, 2.0**-6),
    "e5m2": (57344.0, 61440.0, 2.0**-14),
}


def operand(x: Any, fmt: str, tile: tuple[int, int], scale: Any = None) -> Operand:
    q = fp8.quantize(x, fmt, tile, scale=scale)
    rows, k = (n if t == -1 else min(t, n) for n, t in zip(x.shape, tile, strict=True))
    return Operand(
        layer="layer", role="input", directions=("forward",),
        codes=np.asarray(q.values)[None], scale=np.asarray(q.scale)[None], tile=(rows, k),
        exact=np.asarray(x)[None], given_scale=scale is not None, path="",
    )  # fmt: skip


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("fmt", FMT)
@pytest.mark.parametrize(
    ("tile", "scale"), [((-1, -1), None), ((1, -1), None), ((1, 128), None), ((-1, -1), 1e-3)]
)
def test_each_column_by_loops(name: str, fmt: str, tile: tuple[int, int], scale: Any) -> None:
    x = DATA[name].astype(np.float32)
    q = fp8.quantize(x, fmt, tile, scale=scale)
    found = study(operand(x, fmt, tile, scale))
    largest, threshold, smallest_normal = FMT[fmt]
    rows, k = x.shape
    tile_rows, tile_k = (n if t == -1 else min(t, n) for n, t in zip(x.shape, tile, strict=True))
    scales = np.asarray(q.scale, np.float64)
    codes = np.asarray(q.values).astype(np.float64)
    counts = {"nonzero": 0, "flushed": 0, "subnormal": 0, "saturated": 0}
    real, headroom, zero_tiles, tile_range = np.zeros_like(codes), math.inf, 0, 0.0
    sizes = np.sort(np.abs(x[x != 0]).astype(np.float64))
    floor = np.percentile(sizes, 0.1, method="nearest")
    for i0 in range(0, rows, tile_rows):
        for k0 in range(0, k, tile_k):
            s = scales[i0 // tile_rows, k0 // tile_k]
            part = np.s_[i0 : i0 + tile_rows, k0 : k0 + tile_k]
            real[part] = codes[part] * s
            own = np.abs(x[part]).astype(np.float64)
            if not own.any():
                zero_tiles += 1
                continue
            headroom = min(headroom, math.log2(largest * s / own.max()))
            kept = own[own >= floor]
            tile_range = max(tile_range, math.log2(own.max() / kept.min()) if kept.size else 0)
            for value, code in zip(x[part].ravel(), codes[part].ravel(), strict=True):
                counts["nonzero"] += value != 0
                counts["flushed"] += value != 0 and code == 0
                counts["subnormal"] += code != 0 and abs(code) < smallest_normal
                counts["saturated"] += np.float32(abs(value)) / np.float32(s) >= threshold

    def percent(what: str) -> float:
        return 100 * counts[what] / counts["nonzero"]

    assert found.flushed_percent == pytest.approx(percent("flushed"))
    assert found.subnormal_percent == pytest.approx(percent("subnormal"))
    assert found.saturated_percent == pytest.approx(percent("saturated"))
    assert found.headroom_bits == pytest.approx(headroom, abs=1e-6)
    assert found.zero_tiles == zero_tiles
    assert found.tile_range_bits == pytest.approx(tile_range)
    assert found.amax == sizes[-1]
    assert found.range_bits == pytest.approx(math.log2(sizes[-1] / sizes[0]))
    assert (found.scale_min, found.scale_max) == (scales.min(), scales.max())
    error = real - x
    if error.any():
        sqnr = 10 * math.log10(np.sum(x.astype(np.float64) ** 2) / np.sum(error**2))
        assert found.sqnr_db == pytest.approx(sqnr)
        expected = {"e4m3fn": 31.5, "e5m2": 25.6}[fmt]
        assert found.sqnr_gap_db == pytest.approx(sqnr - expected)
    norms = np.linalg.norm(x.astype(np.float64), axis=1)
    by_row = 100 * np.linalg.norm(error, axis=1) / np.where(norms > 0, norms, 1)
    assert found.worst_row_percent == pytest.approx(max(by_row))
    assert by_row[found.worst_row] == pytest.approx(max(by_row))
    assert found.row_rms_percent == pytest.approx(math.sqrt(np.mean(np.square(by_row))))
    outward = np.mean(error * np.sign(x)) / np.mean(np.abs(x, dtype=np.float64))
    assert found.bias_percent == pytest.approx(100 * abs(outward), rel=1e-6, abs=1e-9)
    centred = x.astype(np.float64) - x.mean(dtype=np.float64)
    kurtosis = np.mean(centred**4) / np.mean(centred**2) ** 2 if name != "tiny" else None
    if kurtosis is not None:
        assert found.kurtosis == pytest.approx(kurtosis, rel=1e-4)
    assert sum(found.plots.exponents.values()) == counts["nonzero"]
    assert found.plots.exponents[math.floor(math.log2(sizes[-1]))] >= 1


def test_outlier_channels_spikes_and_rows() -> None:
    x = normal(64, 256)
    x[:, [7, 9]] *= 100
    found = study(operand(x, "e4m3fn", (-1, -1)))
    assert (found.outlier_channels, found.steady_channels) == (2, 2)
    x = spike(1e6)
    found = study(operand(x, "e4m3fn", (-1, -1)))
    assert (found.outlier_channels, found.steady_channels) == (1, 0)
    assert found.spike_ratio == pytest.approx(1e6 / np.median(np.abs(x)), rel=1e-6)
    assert found.spike_rows_percent == pytest.approx(100 / M)
    assert 18 < study(operand(row_spread(), "e4m3fn", (-1, -1))).row_spread_bits < 21


def test_non_finite_values_are_counted_and_disturb_nothing() -> None:
    x = normal(32, 64)
    clean = study(operand(x, "e4m3fn", (1, -1)))
    x[4, 4], x[5, 5] = np.nan, np.inf
    found = study(operand(x, "e4m3fn", (1, -1)))
    assert found.non_finite == 2
    assert found.levels()["non_finite"] == "bad"
    assert found.sqnr_db == pytest.approx(clean.sqnr_db, abs=0.1)


def test_acceptance_figures_of_a_spike() -> None:
    """Per tensor nearly all is flushed, per row and by tile next to nothing."""
    flushed = {
        tile: study(operand(spike(), "e4m3fn", tile)).flushed_percent
        for tile in ((-1, -1), (1, -1), (1, 128))
    }
    assert flushed[-1, -1] >= 95
    assert flushed[1, -1] == pytest.approx(100 / M, rel=0.1)  # its own row
    assert flushed[1, 128] <= 0.06


def test_levels_have_the_limits_of_the_table() -> None:
    columns = {column for column, _ in THRESHOLDS}
    assert columns <= set(TensorStats.__dataclass_fields__)
    assert study(operand(normal(256, 256), "e4m3fn", (-1, -1))).levels() == dict.fromkeys(
        columns, "ok"
    )


def test_large_operands_are_sampled_by_blocks_that_hold_amax() -> None:
    x = normal(4096, 64)
    x[2000, 7] = 10
    for tile in ((-1, -1), (1, -1), (128, 128), (3, -1)):
        whole = operand(x, "e4m3fn", tile)
        part = sample_rows(whole, 2**16)
        assert part.codes.shape[1] <= 1024
        assert np.abs(part.exact).max() == 10
        found, all_of_it = study(part), study(whole)
        assert found.amax == all_of_it.amax
        assert found.sqnr_db == pytest.approx(all_of_it.sqnr_db, abs=0.5)
        assert found.headroom_bits == pytest.approx(0, abs=1e-6)


# --- GEMMs ----------------------------------------------------------------------------------------


def gemm_stats(x: Any, recipe: fp8.Recipe, w: Any = WEIGHTS, **options: Any) -> Any:
    return study_gemm(capture(product(recipe), x, w).gemms[0], **options)


def test_errors_of_normal_data_are_those_of_theory() -> None:
    """3.6 to 3.8 %, from both sides: a quantiser that is off would read less."""
    found = gemm_stats(normal(M, K), fp8.TensorScaling())
    assert 3.6 < found.quantization.frobenius < 3.9
    assert found.expected == pytest.approx(3.75, rel=0.02)
    assert found.total.frobenius == pytest.approx(found.quantization.frobenius, rel=1e-3)
    assert found.accumulation < 1e-4
    assert found.granularity < 0.3
    assert found.cheapest == "tensor"


def test_gemm_errors_against_numpy_on_the_sampled_results() -> None:
    x, recipe = normal(64, 320), fp8.RowScaling()
    w = WEIGHTS[:320, :64]
    found = gemm_stats(x, recipe, w)
    assert found.sampled == (64, 64)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    qx, qw = fp8.quantize(x, "e4m3", (1, -1)), fp8.quantize(w, "e4m3", (-1, 1))
    real = np.asarray(qx.dequantize(), np.float64) @ np.asarray(qw.dequantize(), np.float64)
    e = real - exact
    expected = 100 * np.linalg.norm(e) / np.linalg.norm(exact)
    assert found.quantization.frobenius == pytest.approx(expected, rel=1e-5)
    even = 1 / np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(w, axis=0))
    evened = 100 * np.linalg.norm(e * even) / np.linalg.norm(exact * even)
    assert found.quantization.evened == pytest.approx(evened, rel=1e-5)
    assert found.quantization.bias == pytest.approx(
        100 * np.mean(e * np.sign(exact)) / np.mean(np.abs(exact)), abs=1e-5
    )
    row = next(r for r in found.what_if if r.recipe == "row")
    assert row.error == pytest.approx(expected, rel=1e-5)


def test_errors_of_a_spike_even_out_rows() -> None:
    found = gemm_stats(spike(), fp8.TensorScaling())
    assert found.quantization.frobenius < 5  # the norm is that of the spike's row
    assert found.quantization.evened > 90
    by_name = {row.recipe: row for row in found.what_if}
    assert by_name["row"].evened < 4.1
    assert by_name["tensor"].flushed_percent > 95


def test_what_if_bytes() -> None:
    rows = {row.recipe: row for row in gemm_stats(normal(M, K), fp8.BlockScaling()).what_if}
    copies = M * K, K * 256
    assert rows["tensor"].extra_bytes == 8
    assert rows["row"].extra_bytes == 4 * (M + 256) + sum(copies)
    assert rows["block"].extra_bytes == 4 * (M * 8 + 2 * 8) + copies[0]
    assert rows["mx"].extra_bytes == (M + 256) * 32 + sum(copies)


def test_the_cheapest_is_within_a_factor_of_the_best() -> None:
    def row(name: str, evened: float, size: int) -> WhatIf:
        return WhatIf(name, evened, evened, evened, 0.0, size)

    tried = [row("tensor", 9, 8), row("row", 4.1, 900), row("block", 3.9, 500), row("mx", 3.6, 99)]
    assert cheapest(tried) == "row"  # scales that are the same along k go first
    assert cheapest(tried, along_k=True) == "mx"
    tried[0] = row("tensor", 4.3, 8)
    assert cheapest(tried) == "tensor"
    assert cheapest([]) == ""


@pytest.mark.parametrize("interval", [None, 128])
def test_accumulation_errors_are_those_of_the_study(interval: int | None) -> None:
    x = np.random.default_rng(0).random((64, 2048)).astype(np.float32)
    found = gemm_stats(x, fp8.TensorScaling(), x.T.copy())
    (row,) = error_study("hopper_wgmma", "uniform01", (interval,), (2048,), (64, 64))
    assert found.run(interval).error == pytest.approx(row.frobenius, rel=0.1)
    assert found.run(interval).bias == pytest.approx(row.bias, rel=0.1)
    assert found.runs[0].machine == "exact"
    assert found.runs[0].error < 1e-5


def test_the_interval_named_is_the_longest_that_costs_little_beside_quantisation() -> None:
    zero_mean = gemm_stats(normal(32, 2048), fp8.TensorScaling(), normal(2048, 32))
    assert zero_mean.run(None).error < 0.1 * zero_mean.quantization.frobenius
    assert zero_mean.promote_every is None
    x = np.random.default_rng(0).random((64, 2048)).astype(np.float32)
    one_sign = gemm_stats(x, fp8.TensorScaling(), x.T.copy())
    assert one_sign.run(512).error > 0.1 * one_sign.quantization.frobenius
    assert one_sign.promote_every == 128
    for scale, expected in ((0.5, None), (4.0, 512), (40.0, 128)):
        errors_by_interval = {None: 1.0, 512: 0.2, 128: 0.1}
        runs = [
            Accumulation("hopper_wgmma", interval, scale * error, 0.0)
            for interval, error in errors_by_interval.items()
        ]
        assert longest_interval(runs, 10.0) == expected


def test_the_run_in_use_is_that_of_the_program() -> None:
    with fp8.emulate("hopper_wgmma", promotion_interval=None):
        found = gemm_stats(normal(32, 2048), fp8.TensorScaling(), normal(2048, 32))
    assert (found.in_use.machine, found.in_use.interval) == ("hopper_wgmma", None)
    assert found.accumulation == pytest.approx(found.run(None).error)
    assert found.accumulation > 0.05


def test_error_grows_with_k_unless_promoted() -> None:
    gemm = capture(product(fp8.BlockScaling()), normal(16, 4096), normal(4096, 16)).gemms[0]
    curve = error_against_k(gemm)
    assert [k for k, _, _ in curve] == [32, 128, 512, 2048, 4096]
    _, never, promoted = curve[-1]
    assert 0.08 < never < 0.2
    assert 0.009 < promoted < 0.02


def test_errors_by_hand() -> None:
    found = errors(np.array([[[1.1, -2.0], [3.0, 4.0]]]), np.array([[[1.0, -2.0], [3.0, 4.0]]]))
    assert found.frobenius == pytest.approx(100 * 0.1 / math.sqrt(30))
    assert found.worst_row == pytest.approx(100 * 0.1 / math.sqrt(5))
    assert found.bias == pytest.approx(100 * 0.025 / 2.5)
    assert found.median == 0
