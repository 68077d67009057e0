"""The benchmark command: honest figures from times, right contenders, peaks, targets, options."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8 import __main__ as cli
from jax_fp8.bench import command, contenders, operands, peaks, peers, targets
from jax_fp8.bench.cases import (
    READ,
    Case,
    Contender,
    Options,
    WrongResult,
    case_as_json,
    check_results,
)
from jax_fp8.bench.presets import PRESETS
from jax_fp8.bench.presets import quantize as quantize_preset
from jax_fp8.bench.timing import Timed, Times

#: A small shape for each preset.
SHAPES = {
    "square": "16,24,32",
    "decode": "2,128,128",
    "llm": "4,24,32",
    "train": "8,16,32",
    "quantize": "128,1,256",
    "emulate": "8,8,32",
    "overhead": "4,4,4",
    "accuracy": "8,16,32",
}
FAST = ("--repeats", "1", "--budget", "0.01", "--footprint", "1", "--peers", "xla")


@pytest.fixture(autouse=True)
def _quick_peaks(monkeypatch):
    def quick(threads, repeats=1):
        return peaks.multiply_peaks(threads, seconds=0.001, repeats=repeats)

    monkeypatch.setattr(command, "multiply_peaks", quick)


def run(capsys, *argv, status=0):
    assert cli.main(["bench", *argv]) == status
    return capsys.readouterr().out


# Figures from times.


def contender(name, group, kind="peer", **more):
    return Contender(name=name, group=group, kind=kind, timed=Timed(lambda: None), **more)


def figures():
    case = Case(
        name="case",
        shape=(8, 4096, 4096),
        contenders=[
            contender("read", READ, "machine", counted_bytes=4e9),
            contender("block (N,K)", "block", "ours", flops=100e9, peak="avx512"),
            contender("block (K,N)", "block", "ours", flops=100e9, counted_bytes=3e9, peak=READ),
            contender("XLA f32 (N,K)", "XLA f32", flops=100e9),
            contender("XLA f32 (K,N)", "XLA f32", flops=100e9),
        ],
        steps=[("block (N,K)", "block (K,N)")],
    )
    times = {
        "read": Times((1.0, 2.0, 3.0)),
        "block (N,K)": Times((2.0, 2.0, 9.0)),
        "block (K,N)": Times((1.5, 1.5, 1.0)),
        "XLA f32 (N,K)": Times((8.0,)),
        "XLA f32 (K,N)": Times((6.0,)),
    }
    return case_as_json(case, times, {"avx512": 200e9}, threads=2)


def test_rates_shares_and_ratios_follow_from_the_times():
    found = figures()
    rows = {row["name"]: row for row in found["contenders"]}
    row = rows["block (N,K)"]
    assert (row["median"], row["min"], row["gflops"], row["share"]) == (2.0, 2.0, 50.0, 0.25)
    assert row["gmacs_per_thread"] == 12.5
    assert row["seconds"] == [2.0, 2.0, 9.0]
    row = rows["block (K,N)"]
    assert (row["gbs"], row["share"]) == (2.0, 1.0)  # reading moves 4e9 bytes in 2 s
    assert found["best"]["XLA f32"] == "XLA f32 (K,N)"
    assert found["ratios"] == {"block": {"XLA f32": 4.0}}  # each with its faster layout
    assert found["steps"] == {"block (N,K) / block (K,N)": 2.0}  # of least times
    assert rows["XLA f32 (N,K)"]["share"] is None


def test_peaks_take_turns_with_the_contenders():
    assert figures()["peaks"] == {"avx512": 200e9}
    timed = peaks.timed_peaks(["scalar"], 1)
    assert 0 < timed["scalar"].sample() < 1e3  # seconds of a GFLOP


def test_a_busy_machine_is_told():
    quiet = peaks.Peak("avx2", "FLOP", "vfmadd231ps ymm", "", (100e9, 90e9, 20e9))
    busy = dataclasses.replace(quiet, rates=(100e9, 70e9, 20e9))
    assert command._disturbed(quiet) == ""
    assert "vfmadd231ps ymm ran at 20 to 100 GFLOP/s; do not quote" in command._disturbed(busy)


def test_a_contender_that_computes_something_else_is_refused():
    sample = operands.Sample(4, 4)
    lhs = np.ones((4, 8), np.float32)
    right = sample.check(lambda: np.full((4, 4), 8.0), lhs, lhs, 1e-5)
    wrong = sample.check(lambda: np.full((4, 4), 8.1), lhs, lhs, 1e-5)
    nan = sample.check(lambda: np.full((4, 4), np.nan), lhs, lhs, 1e-5)
    assert right() == ""
    assert "relative error" in wrong()
    assert "relative error nan" in nan()
    bad = Case(name="c", shape=(4, 4, 8), contenders=[contender("cheat", "cheat", check=wrong)])
    with pytest.raises(WrongResult, match="c: cheat computes something else: relative error 0.01"):
        check_results(bad)


def test_a_wrong_result_fails_the_command(capsys, monkeypatch):
    true = contenders._dot
    monkeypatch.setattr(contenders, "_dot", lambda *operands: 1.01 * true(*operands))
    out = run(capsys, "square", "--shape", SHAPES["square"], *FAST, status=1)
    result = json.loads(out)
    assert "XLA f32 (N,K) computes something else" in result["failures"][0]
    assert result["presets"][0]["cases"] == []


def test_an_interrupted_run_shows_what_it_has(capsys, monkeypatch):
    def interrupt(case):
        if case.shape[0] == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "check_results", interrupt)
    shapes = ("--shape", "8,8,8", "--shape", "9,8,8")
    result = json.loads(run(capsys, "overhead", *shapes, *FAST, status=1))
    assert [case["name"] for case in result["presets"][0]["cases"]] == ["8 x 8 x 8"]
    assert "overhead: interrupted" in result["failures"][0]


def test_contenders_of_the_same_weights_take_turns_in_their_copies():
    weights = operands.Weights(16, 32, seed=0, footprint_bytes=16 * 32 * 4 * 3)
    assert [len(weights.real(dtype, "(K,N)")) for dtype in ("f32", "bf16")] == [3, 6]
    assert len(weights.scaled("block", "(N,K)")) == 12
    turns = weights.turns("f32", "(N,K)")
    assert [next(turns) for _ in range(2)] == [0, 1]
    assert next(weights.turns("f32", "(N,K)")) == 2
    assert next(weights.turns("f32", "(K,N)")) == 0


@pytest.mark.parametrize("recipe", ["tensor", "row", "block", "mx"])
def test_float64_of_scaled_operands_is_what_they_stand_for(recipe):
    q = operands.Inputs(6, 160, seed=1).scaled(recipe)
    rows = np.array([0, 5])
    expected = np.asarray(fp8.dequantize(q), np.float64)[rows]
    np.testing.assert_allclose(operands.float64_of(q, rows), expected, rtol=1e-6)
    weights = operands.Weights(160, 130, seed=1)
    nk, kn = (weights.scaled(recipe, layout)[0] for layout in ("(N,K)", "(K,N)"))
    assert np.array_equal(fp8.dequantize(nk).T, fp8.dequantize(kn))


# Presets.


def test_xla_computes_the_same_codes_and_scales_but_for_rounding():
    x = operands.Inputs(128, 256, seed=2).real("f32")
    for scheme in quantize_preset._SCHEMES.values():
        ours = quantize_preset._ours(x, scheme)
        for own, theirs in zip(ours, quantize_preset._theirs(x, scheme), strict=True):
            scales = (np.asarray(q.scale).astype(np.float32) for q in (own, theirs))
            np.testing.assert_allclose(*scales, rtol=2**-23)  # XLA multiplies by 1 / 448
            codes = (np.asarray(q.values).view(np.uint8) for q in (own, theirs))
            assert np.mean(np.not_equal(*codes)) < 1e-3


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gives_figures_for_every_contender(capsys, name):
    result = json.loads(run(capsys, name, "--shape", SHAPES[name], *FAST))
    assert result["schema"] == 1
    assert set(result) == {
        "schema", "machine", "versions", "options", "peaks", "presets", "missing", "cut",
        "warnings", "targets", "failures",
    }  # fmt: skip
    assert result["failures"] == []
    assert result["versions"]["jax_fp8"] == fp8.__version__
    (preset,) = result["presets"]
    assert preset["name"] == name
    assert len(preset["cases"]) == PRESETS[name].cases_per_shape
    for case in preset["cases"]:
        kinds = {row["kind"] for row in case["contenders"]}
        assert "ours" in kinds
        assert "peer" in kinds or name == "emulate"
        for row in case["contenders"]:
            assert row["median"] > 0
            assert len(row["seconds"]) == 1
            assert row["kernel"] or row["kind"] != "ours"
            assert (row["gflops"] or row["gbs"]) > 0
        for ratios in case["ratios"].values():
            assert all(ratio > 0 for ratio in ratios.values())
    if name in ("decode", "quantize"):
        assert all(row["share"] for row in preset["cases"][0]["contenders"])
    if name == "accuracy":
        errors = {row["group"]: row["error"] for row in preset["cases"][0]["contenders"]}
        assert errors["XLA f32"] < 1e-5 < errors["XLA bf16"] < errors["block"] < 0.06


def test_a_forced_row_runs_and_its_peak_counts(capsys):
    out = run(capsys, "square", "--shape", "8,8,8", *FAST, "--kernel", "scalar", "--recipe", "row")
    rows = json.loads(out)["presets"][0]["cases"][0]["contenders"]
    assert {(r["kernel"], r["peak"]) for r in rows if r["kind"] == "ours"} == {("scalar",) * 2}
    assert {r["group"] for r in rows if r["kind"] == "ours"} == {"row"}


def test_cliff_compares_each_m_with_the_next(capsys, monkeypatch):
    decode = sys.modules["jax_fp8.bench.presets.decode"]
    monkeypatch.setattr(decode, "CLIFF_ROWS", range(8, 11))
    out = run(capsys, "decode", "--shape", SHAPES["decode"], *FAST, "--cliff")
    steps = json.loads(out)["presets"][0]["cases"][1]["steps"]
    assert list(steps) == [f"block, M = {m + 1} / block, M = {m}" for m in (8, 9, 10)]


def test_peers_that_are_not_installed_are_named_with_the_remedy(capsys, monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda name: False)
    fast = [*FAST[:-1], "xla,torch,qwix"]
    result = json.loads(run(capsys, "square", "--shape", "8,8,8", *fast))
    assert result["missing"] == [
        {"peer": "torch", "install": "pip install torch"},
        {"peer": "qwix", "install": "pip install qwix"},
    ]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    out = run(capsys, "square", "--shape", "8,8,8", *fast)
    assert "not installed: torch (pip install torch)" in out


def test_torch_multiplies_the_same_operands():
    pytest.importorskip("torch", reason="a peer, not a requirement")
    gemm = contenders.Gemm(8, operands.Weights(16, 32, seed=0), Options(peers=("torch",)))
    found = peers.torch_contenders(gemm, "", [])
    assert {"torch f32", "torch bf16"} <= {c.group for c in found}
    assert [c.check() for c in found] == [""] * len(found)


def test_qwix_multiplies_what_it_quantized():
    pytest.importorskip("qwix", reason="a peer, not a requirement")
    cut: list[str] = []
    gemm = contenders.Gemm(8, operands.Weights(128, 256, seed=0), Options())
    (tiled,) = peers.qwix_contenders(gemm, cut)
    assert (tiled.check(), cut) == ("", [])
    gemm = contenders.Gemm(8, operands.Weights(100, 256, seed=0), Options())
    assert peers.qwix_contenders(gemm, cut) == []
    assert "must divide N and K" in cut[0]


# Output.


def test_tables_and_a_roofline(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="of the extra test")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    plot, out = tmp_path / "roofline.png", tmp_path / "bench.json"
    options = (*FAST, "--plot", str(plot), "--out", str(out))
    text = run(capsys, "square", "overhead", "--shape", "16,16,16", *options)
    for part in ("The machine's peaks", "square: 16 x 16 x 16", "vs block", "µs", "XLA f32"):
        assert part in text
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(out.read_text())["presets"][1]["name"] == "overhead"


def test_list_names_every_preset(capsys, monkeypatch):
    listed = json.loads(run(capsys, "--list"))["available"]
    assert [preset["name"] for preset in listed] == list(PRESETS)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "decode" in run(capsys, "--list")


def test_one_thread_keeps_the_process_on_one_cpu():
    argv = ["bench", "overhead", "--threads", "1", *FAST, "--peers", "none"]
    done = subprocess.run(
        [sys.executable, "-m", "jax_fp8", *argv], capture_output=True, text=True, check=True
    )
    machine = json.loads(done.stdout)["machine"]
    assert (machine["cpus"], machine["threads"]) == (1, 1)


# Targets.


def test_targets_are_about_presets_and_floors_are_no_higher_than_aims():
    for target in targets.TARGETS:
        assert target.preset in PRESETS
        assert target.aim >= target.floor
        shapes = PRESETS[target.preset].shapes
        assert any(target.applies(shape) for shape in shapes), target


def outcomes(value, at_most=False):
    target = targets.Target(
        "square", "any", lambda shape: True, "block", "XLA f32", 2.0, 1.5, at_most=at_most
    )
    case = figures() | {"steps": {}, "ratios": {"block": {"XLA f32": value}}}
    presets = [{"name": "square", "cases": [case]}]
    return targets.evaluate(presets, threads=1, targets=[target])


@pytest.mark.parametrize(
    ("value", "verdict"), [(2.0, "aim met"), (1.7, "floor met"), (1.4, "missed")]
)
def test_a_value_meets_the_aim_or_the_floor_or_misses(value, verdict):
    (found,) = outcomes(value)
    assert (found.value, found.verdict) == (value, verdict)
    assert targets.failures([found]) == ([str(found)] if verdict == "missed" else [])


def test_less_is_better_where_a_target_says_so():
    assert outcomes(1.6, at_most=True)[0].verdict == "aim met"
    assert outcomes(2.5, at_most=True)[0].verdict == "missed"


def test_targets_of_one_thread_do_not_judge_several():
    case = figures() | {"shape": [1024] * 3, "steps": {}}
    presets = [{"name": "square", "cases": [case]}]
    shares = {
        threads: [o.aim for o in targets.evaluate(presets, threads) if o.metric == "share"]
        for threads in (1, 2, 8)
    }
    assert shares == {1: [0.88], 2: [0.83], 8: [0.83]}


def test_check_prints_verdicts_and_fails_where_a_floor_is_missed(capsys, monkeypatch):
    easy = targets.Target("overhead", "any", lambda _: True, "block", "µs", 1e9, 1e9, at_most=True)
    hard = dataclasses.replace(easy, aim=0.0, floor=0.0)
    argv = ("overhead", "--shape", "4,4,4", *FAST, "--check")
    monkeypatch.setattr(targets, "TARGETS", (easy,))
    found = json.loads(run(capsys, *argv))["targets"]
    assert [o["verdict"] for o in found["outcomes"]] == ["aim met"]
    assert "Zen 4" in found["machine"]
    monkeypatch.setattr(targets, "TARGETS", (easy, hard))
    assert cli.main(["bench", *argv]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["failures"] == captured.err.splitlines()
    assert "block: µs is" in captured.err
    monkeypatch.setattr(targets, "TARGETS", ())
    assert "no target is about" in json.loads(run(capsys, *argv, status=1))["failures"][0]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(targets, "TARGETS", (easy,))
    assert "aim met" in run(capsys, *argv)


# Options.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("cubes",), "there is no preset 'cubes'; there are square, decode,"),
        (("--shape", "1,2"), "'1,2' is not three sizes M,N,K"),
        (("--shape", "1,x,2"), "'1,x,2' is not three sizes M,N,K"),
        (("--recipe", "col"), "--recipe: there is no 'col'; there are tensor, row, block"),
        (("--kernel", "avx9"), "--kernel: no row 'avx9'; there are"),
        (("--peers", "numpy"), "--peers: there is no 'numpy'; there are xla, torch, qwix"),
        (("--repeats", "0"), "--repeats is 0; it must be more than 0"),
        (("--budget", "-1"), "--budget is -1.0; it must be more than 0"),
        (("--footprint", "0"), "--footprint is 0; it must be more than 0"),
        (("--threads", "4096"), "CPUs, not 4096"),
        (("--threads", "0"), "CPUs, not 0"),
        (("square", "--cliff"), "--cliff belongs to the preset decode"),
        (("--out", "no_such_folder/x.json"), "there is no folder no_such_folder"),
        (("--plot", "no_such_folder/x.png"), "there is no folder no_such_folder"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(capsys, argv, message):
    if "--plot" in argv:
        pytest.importorskip("matplotlib", reason="of the extra test")
    with pytest.raises(SystemExit) as error:
        cli.main(["bench", *argv])
    assert error.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
