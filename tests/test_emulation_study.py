"""Accumulation errors: what a study measures, and that bounds are about rows of their tables."""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.emulation import MACHINES, tables
from jax_fp8.emulation.study import DATA, METRICS, ErrorRow, Study, error_study

SMALL = {"ks": (32, 512), "shape": (16, 24)}


def errors(rows: list[ErrorRow]) -> list[float]:
    return [row.frobenius for row in rows]


def test_a_row_is_the_error_of_the_gemm_on_its_operands():
    (row,) = error_study("hopper_wgmma", "relu:normal", [128], ks=[256], shape=(8, 12), seed=3)
    rng = np.random.default_rng((3, 256))
    x = np.maximum(rng.standard_normal((8, 256)), 0)
    y = rng.standard_normal((12, 256))
    q, r = (fp8.quantize(jnp.asarray(z, jnp.float32), "e4m3") for z in (x, y))
    exact = np.asarray(q.values, np.float64) @ np.asarray(r.values, np.float64).T
    lhs, rhs = (jnp.asarray(z.values) for z in (q, r))
    out = fp8.scaled_matmul(
        lhs, rhs.T, 1.0, 1.0, accumulation="hopper_wgmma", promotion_interval=128
    )
    e = np.asarray(out, np.float64) - exact
    assert row == ErrorRow(
        machine="hopper_wgmma",
        data="relu:normal",
        k=256,
        interval=128,
        formats="e4m3fn·e4m3fn",
        narrow=False,
        shape=(8, 12),
        frobenius=pytest.approx(100 * np.sqrt((e**2).sum() / (exact**2).sum())),
        bias=pytest.approx(100 * (e * np.sign(exact)).sum() / np.abs(exact).sum()),
        max_to_rms=pytest.approx(100 * np.abs(e).max() / np.sqrt((exact**2).mean())),
        max_to_max=pytest.approx(100 * np.abs(e).max() / np.abs(exact).max()),
        non_finite=0,
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_can_be_studied(machine):
    study = Study(machines=(machine,), intervals=(None, 32), **SMALL)
    rows = list(study.rows())
    assert len(rows) == len(study) == (2 if MACHINES[machine].ignores_interval else 4)
    assert all(row.non_finite == 0 for row in rows)
    limit = 1.0 if MACHINES[machine].is_fp16 or "bf16" in machine else 0.1
    if not MACHINES[machine].is_short:
        limit = 1e-4
    assert 0 <= max(errors(rows)) < limit


@pytest.mark.parametrize("data", DATA)
def test_every_distribution_can_be_studied_and_is_quantised_to_the_largest_code(data):
    study = Study(machines=("exact",), data=(data,), ks=(64,), shape=(8, 8))
    (row,) = study.rows()
    assert row.frobenius < 6e-6  # one rounding to FP32
    problem = study._problem(data, 64, narrow=False)
    assert np.abs(problem.lhs.astype(np.float32)).max() == 448


def test_promotion_bounds_the_error_and_its_bias():
    rows = error_study("hopper_wgmma", "uniform01", (None, 128), ks=[128, 2048], shape=(16, 16))
    short, short_promoted, long, long_promoted = rows
    assert short.frobenius == short_promoted.frobenius
    assert long.bias == pytest.approx(-3.48, abs=0.15)
    assert long.frobenius == pytest.approx(-long.bias, rel=0.01)
    assert long_promoted.frobenius == pytest.approx(short.frobenius, rel=0.15)


def test_rows_do_not_depend_on_what_is_measured_beside_them():
    together = error_study(["fp16", "hopper_wgmma"], ["normal", "relu"], (None, 64), **SMALL)
    for row in together:
        (alone,) = error_study(row.machine, row.data, [row.interval], [row.k], SMALL["shape"])
        assert alone == row


def test_a_row_ignores_the_contexts_around_it():
    rows = error_study("hopper_wgmma", **SMALL)
    with fp8.emulate("fp16", promotion_interval=64, split_k=4):
        assert error_study("hopper_wgmma", **SMALL) == rows


def test_fp16_overflows_with_the_scales_of_the_others_and_not_with_its_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        narrow = error_study("fp16", intervals=[None], **SMALL)
        wide = error_study("fp16", intervals=[None], fp16_scales="amax", **SMALL)
    assert [row.non_finite for row in narrow] == [0, 0]
    assert 0 < wide[0].non_finite_percent < wide[1].non_finite_percent == 100
    assert all(math.isnan(getattr(row, metric)) for row in wide for metric in METRICS)
    assert wide[1].as_json()["frobenius"] is None
    assert wide[1].as_json()["non_finite"] == 16 * 24
    problem = Study(machines=("fp16",))._problem("normal", 32, narrow=True)
    assert np.abs(problem.rhs.astype(np.float32)).max() == 3.5


def test_gradients_in_e5m2_can_be_studied():
    rows = error_study(
        "hopper_wgmma", "relu:normal", (None, 128), [4096], (16, 16), formats=("e4m3", "e5m2")
    )
    assert [row.formats for row in rows] == ["e4m3fn·e5m2"] * 2
    never, promoted = errors(rows)
    assert never == pytest.approx(0.072, rel=0.25)
    assert promoted == pytest.approx(0.0075, rel=0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"machine": "hopper"}, "no machine 'hopper'; there are hopper_wgmma, "),
        ({"data": "relu:gauss"}, "data 'relu:gauss': there is no 'gauss'; there are normal, "),
        ({"intervals": [48]}, "hopper_wgmma cannot be promoted every 48: it adds 32 products"),
        ({"intervals": [0]}, "give a multiple of 32, or none"),
        ({"ks": [0]}, "a size is 0"),
        ({"formats": ("e4m3", "e3m4")}, "e3m4"),
        ({"fp16_scales": "wide"}, "fp16_scales is 'wide', not narrow or amax"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_anything_runs(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        error_study(**{"machine": "hopper_wgmma"} | arguments)


def test_each_bound_is_about_one_row_of_its_table():
    for bound in tables.BOUNDS:
        studies = [
            study
            for study in tables.TABLES[bound.table].studies
            if bound.machine in study.machines
            and bound.data in study.data
            and bound.interval in study.intervals
            and bound.k in study.ks
            and bound.formats == "·".join(fp8.formats.lookup(f).name for f in study.formats)
        ]
        assert len(studies) == 1, bound
        assert bound.low <= bound.high


def test_every_table_has_bounds():
    counts = collections.Counter(bound.table for bound in tables.BOUNDS)
    assert set(counts) == set(tables.TABLES)


def test_a_broken_bound_is_a_sentence_with_value_and_range():
    study = Study(machines=("hopper_wgmma",), intervals=(128,), ks=(512,))
    (row,) = study.rows()
    checked, failures = tables.check({"accumulators": [row]})
    assert (checked, failures) == (2, [])
    broken = dataclasses.replace(row, frobenius=0.02)
    checked, failures = tables.check({"accumulators": [broken]})
    assert checked == len(failures) == 2
    assert failures[1] == (
        "normal, K = 512, hopper_wgmma, promoted every 128: frobenius is 0.0200 %; "
        "expected 0.0100 to 0.0160 %"
    )
    unknown = dataclasses.replace(row, frobenius=math.nan)
    assert len(tables.check({"accumulators": [unknown]})[1]) == 2


@pytest.mark.parametrize(
    ("measured", "claimed"),
    [
        (("ada_mma", None), ("hopper_wgmma", None)),
        (("blackwell_tcgen05", None), ("hopper_wgmma", None)),
        (("hopper_wgmma", 128), ("hopper_wgmma", None)),
        (("hopper_wgmma", 64), ("hopper_wgmma", 128)),
        (("hopper_wgmma", 256), ("hopper_wgmma", 128)),
        (("hopper_wgmma", None), ("blackwell_tcgen05", None)),
        (("fp16_chunked", None), ("fp16", None)),
    ],
)
def test_bounds_tell_one_accumulator_from_another(measured, claimed):
    study = Study(
        machines=measured[:1], data=("uniform01", "normal"), intervals=measured[1:], ks=(32, 512)
    )
    rows = [dataclasses.replace(r, machine=claimed[0], interval=claimed[1]) for r in study.rows()]
    checked, failures = tables.check({"accumulators": rows})
    assert checked >= 2
    assert failures
