"""The command line: JSON where piped, tables on a terminal, exit status by success."""

from __future__ import annotations

import json

import jax
import pytest

import jax_fp8 as fp8
from jax_fp8 import __main__ as cli
from jax_fp8 import lowering


def run(capsys, *argv):
    assert cli.main(argv) == 0
    return capsys.readouterr().out


def test_info_names_versions_formats_and_every_kernel_with_its_reason(capsys):
    result = json.loads(run(capsys, "info"))
    assert result["versions"]["jax"] == jax.__version__
    assert {f["format"]: f["max"] for f in result["formats"]} == {"e4m3fn": 448.0, "e5m2": 57344.0}
    rows = [(k["operation"], k["kernel"], k["why not"]) for k in result["kernels"]]
    assert rows == list(lowering.kernel_table())
    assert ("gemm", "scalar", "") in rows


def test_explain_tells_which_kernel_takes_each_gemm(capsys):
    result = json.loads(run(capsys, "explain", "--shape", "64,512,300", "--recipe", "row"))
    forward, lhs, rhs = result["gemms"]
    assert forward["request"] == "m=64 n=512 k=300 e4m3fn[1x300,mk]·e4m3fn[1x300,kn]->f32"
    assert lhs["request"] == "m=64 n=300 k=512 e5m2[1x512,mk]·e4m3fn[1x512,nk]->f32"
    assert rhs["request"] == "m=300 n=512 k=64 e4m3fn[1x64,km]·e5m2[1x64,kn]->f32"
    usable = [r.name for r in lowering.kernel_table() if r.operation == "gemm" and not r.why_not]
    assert forward["kernel"] == usable[0]


def test_tables_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    out = run(capsys, "info")
    assert "e4m3fn" in out
    assert "{" not in out
    out = run(capsys, "explain", "--shape", "8,8,8", "--rhs", "nk", "--dtype", "bfloat16")
    assert "lhs gradient" in out


@pytest.mark.parametrize("argv", [["explain", "--shape", "1,2"], ["explain"], ["nothing"], []])
def test_bad_arguments_exit_with_status_2(capsys, argv):
    with pytest.raises(SystemExit) as error:
        cli.main(argv)
    assert error.value.code == 2


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
