"""The command line: JSON where piped, tables on a terminal, exit status by success."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
import subprocess
import sys

import jax
import pytest

import jax_fp8 as fp8
from jax_fp8 import __main__ as cli
from jax_fp8 import lowering, recipes
from jax_fp8.emulation import tables
from jax_fp8.testing import command as gradcheck_command
from rows import runnable_rows


def run(capsys, *argv):
    assert cli.main(argv) == 0
    return capsys.readouterr().out


def test_info_names_versions_formats_and_every_kernel_with_its_reason(capsys):
    result = json.loads(run(capsys, "info"))
    assert result["versions"]["jax"] == jax.__version__
    assert {f["format"]: f["max"] for f in result["formats"]} == {"e4m3fn": 448.0, "e5m2": 57344.0}
    rows = [(k["operation"], k["kernel"], k["why not"]) for k in result["kernels"]]
    table = lowering.kernel_table()
    assert rows == [(row.operation, row.name, row.why_not or row.unless_asked) for row in table]
    assert ("gemm", "scalar", "") in rows


def test_explain_tells_which_kernel_takes_each_gemm(capsys):
    result = json.loads(run(capsys, "explain", "--shape", "64,512,300", "--recipe", "row"))
    forward, lhs, rhs = result["gemms"]
    assert forward["request"] == "m=64 n=512 k=300 e4m3fn[1x300,mk]·e4m3fn[1x300,kn]->f32"
    assert lhs["request"] == "m=64 n=300 k=512 e5m2[1x512,mk]·e4m3fn[1x512,nk]->f32"
    assert rhs["request"] == "m=300 n=512 k=64 e4m3fn[1x64,km]·e5m2[1x64,kn]->f32"
    assert forward["kernel"] == runnable_rows("gemm")[0]


def test_tables_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    out = run(capsys, "info")
    assert "e4m3fn" in out
    assert "{" not in out
    out = run(capsys, "explain", "--shape", "8,8,8", "--rhs", "nk", "--dtype", "bfloat16")
    assert "lhs gradient" in out


def refusal(capsys, *argv):
    with pytest.raises(SystemExit) as error:
        cli.main(argv)
    assert error.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("argv", [["explain", "--shape", "1,2"], ["explain"], ["nothing"], []])
def test_bad_arguments_exit_with_status_2(capsys, argv):
    refusal(capsys, *argv)


def test_explain_agrees_with_what_is_lowered():
    x, w = jax.ShapeDtypeStruct((5, 40), "float32"), jax.ShapeDtypeStruct((7, 40), "bfloat16")
    dims = (((1,), (1,)), ((), ()))
    for recipe in (fp8.TensorScaling(), fp8.RowScaling(), fp8.BlockScaling()):
        found = fp8.explain(x, w, dims, recipe=recipe)
        step = jax.value_and_grad(
            lambda x, w: fp8.dot_general(x, w, dims, recipe=recipe).sum(),  # noqa: B023
            (0, 1),
        )
        text = jax.jit(step).lower(x, w).as_text()
        calls = [line for line in text.splitlines() if "@jax_fp8.gemm.v1" in line]
        assert len(calls) == len(found.gemms) == 3
        for line, choice in zip(calls, found.gemms, strict=True):
            lhs_tile, lhs_layout = choice.request.split("[")[1].split("]")[0].split(",")
            rhs_tile, rhs_layout = choice.request.split("[")[2].split("]")[0].split(",")
            assert f'lhs_layout = "{lhs_layout}"' in line
            assert f'rhs_layout = "{rhs_layout}"' in line
            assert f"lhs_tile = dense<[{lhs_tile.replace('x', ', ')}]>" in line.replace(
                "dense<1>", "dense<[1, 1]>"
            )
            assert f"rhs_tile = dense<[{rhs_tile.replace('x', ', ')}]>" in line.replace(
                "dense<40>", "dense<[40, 40]>"
            )


def test_explain_honours_contexts_and_missing_platforms():
    x, w = jax.ShapeDtypeStruct((5, 40), "float32"), jax.ShapeDtypeStruct((40, 7), "float32")
    with fp8.force_kernel("scalar"):
        assert {c.kernel for c in fp8.explain(x, w).gemms} == {"scalar"}
    required = fp8.explain(x, w, platform="cuda")
    assert {c.kernel for c in required.gemms} == {"none"}
    assert "no kernel for the platform cuda" in str(required)
    with pytest.raises(TypeError, match="explain: lhs has dtype int32"):
        fp8.explain(jax.ShapeDtypeStruct((5, 40), "int32"), w)


EMULATE = ("emulate", "--k", "32,512", "--shape", "8,8")


def test_emulate_measures_what_is_chosen(capsys):
    out = run(
        capsys, *EMULATE, "--machine", "fp32,hopper_wgmma", "--data", "relu:normal,uniform01",
        "--intervals", "none,64", "--seed", "5",
    )  # fmt: skip
    result = json.loads(out)
    (table,) = result["tables"]
    study = tables.Study(
        machines=("fp32", "hopper_wgmma"),
        data=("relu:normal", "uniform01"),
        intervals=(None, 64),
        ks=(32, 512),
        shape=(8, 8),
        seed=5,
    )
    expected = [json.loads(json.dumps(row.as_json())) for row in study.rows()]
    assert table["rows"] == expected
    assert len(expected) == 12
    assert "failures" not in result


def test_emulate_takes_all_machines_by_one_word(capsys):
    out = run(capsys, "emulate", "--machine", "all", "--k", "32", "--shape", "2,3")
    (table,) = json.loads(out)["tables"]
    assert {row["machine"] for row in table["rows"]} == set(fp8.emulation.MACHINES)


def test_emulate_prints_columns_of_k_or_of_metrics(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    out = run(capsys, *EMULATE, "--machine", "hopper_wgmma,fp16", "--fp16-scales", "amax")
    assert "K = 512" in out
    assert "hopper_wgmma, promoted every 128" in out
    assert "100.0 % inf" in out
    assert "mean |C|" in run(capsys, *EMULATE, "--metric", "bias")
    one_k = run(capsys, "emulate", "--k", "32", "--shape", "8,8")
    assert "max |e| / rms C" in one_k
    assert run(capsys, *EMULATE, "--json").startswith("{")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--intervals", "48"), "hopper_wgmma cannot be promoted every 48: it adds 32 products"),
        (("--intervals", "never"), "argument --intervals: invalid"),
        (("--machine", "h100"), "no machine 'h100'; there are hopper_wgmma"),
        (("--data", "gauss"), "there is no 'gauss'"),
        (("--table", "wgrad"), "--k chooses what to measure, and so does --table"),
        (("--check",), "--k chooses what to measure, and so does --check"),
        (("--k", "64", "--plot", "error.png"), "--plot draws error against K: give two K or more"),
        (("--plot", "no_such_folder/error.png"), "there is no folder no_such_folder"),
        (("--plot", "error.xls"), "plot error.xls: the suffix must be one of"),
    ],
)
def test_emulate_refuses_before_it_measures(capsys, options, message):
    if "--plot" in options:
        pytest.importorskip("matplotlib", reason="of the extra test")
    assert message in " ".join(refusal(capsys, *EMULATE, *options).split())


def test_emulate_draws_a_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="of the extra test")
    path = tmp_path / "error.png"
    run(capsys, *EMULATE, "--data", "normal,relu", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_with_the_remedy(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = refusal(capsys, *EMULATE, "--plot", str(tmp_path / "error.png"))
    assert "pip install 'jax_fp8[plot]'" in message


def test_emulate_check_fails_where_a_cell_is_out_of_its_bounds(capsys, monkeypatch):
    table = tables.TABLES["accumulators"]
    small = dataclasses.replace(table.studies[0], data=("uniform01",), ks=(32, 512), shape=(16, 16))
    monkeypatch.setattr(
        tables, "TABLES", {"accumulators": dataclasses.replace(table, studies=(small,))}
    )
    result = json.loads(run(capsys, "emulate", "--check"))
    assert (result["checks"], result["failures"]) == (4, [])
    monkeypatch.setattr(
        tables, "BOUNDS", tuple(dataclasses.replace(b, high=b.low) for b in tables.BOUNDS)
    )
    assert cli.main(["emulate", "--check"]) == 1
    captured = capsys.readouterr()
    failures = json.loads(captured.out)["failures"]
    assert len(failures) == 4
    assert captured.err.splitlines() == failures


GRADCHECK = ("gradcheck", "--shape", "6,5,40", "--recipe", "row")


def test_gradcheck_reports_each_check(capsys):
    result = json.loads(run(capsys, *GRADCHECK, "--checks", "C2,c4,C7,C8", "--seed", "3"))
    assert [(c["id"], c["verdict"]) for c in result["checks"]] == [
        ("C2", "passed"), ("C4", "passed"), ("C7", "not applicable"), ("C8", "report"),
    ]  # fmt: skip
    assert result["failures"] == []
    assert (result["recipe"], result["shape"], result["seed"]) == ("row", [6, 5, 40], 3)


def test_gradcheck_prints_a_table_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    out = run(capsys, *GRADCHECK, "--checks", "C4,C5,C7", "--rounding", "stochastic")
    assert "element-wise bound" in out
    assert "none of 3 failed" in out


def test_gradcheck_fails_with_the_text_of_the_check(capsys, monkeypatch):
    real = gradcheck_command.matmul_of
    harmed = dataclasses.replace(recipes.BY_NAME["row"], gradient_format="e4m3")
    monkeypatch.setattr(gradcheck_command, "matmul_of", lambda recipe, key: real(harmed, key=key))
    assert cli.main([*GRADCHECK, "--checks", "C4"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["checks"][0]["verdict"] == "FAILED"
    assert "g in E4M3FN where E5M2 was expected" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--checks", "C11"), "there is no check 'C11'; there are C1, C2"),
        (("--shape", "1,2"), "is not three sizes m,n,k"),
        (("--accumulation", "h100"), "there is no such accumulation model"),
    ],
)
def test_gradcheck_refuses_bad_options(capsys, options, message):
    assert message in " ".join(refusal(capsys, *GRADCHECK, *options).split())


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: pathlib.Path) -> None:
    # Through a shell, since this process ignores the signal and keeps its pipes open.
    command = f"{shlex.quote(sys.executable)} -m jax_fp8 emulate --k 32,64 --json | head -c 1"
    # In another folder than the sources, which would hide an installed package.
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("{", "")
