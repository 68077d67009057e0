"""Every example of a minute or less runs, in a short form, and its table says what it should."""

from __future__ import annotations

import importlib
import json
import pathlib
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs an example as a script; returns what it printed."""

    def run_script(name: str, *arguments: str) -> str:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def rows_of(output: str) -> dict[str, list[float]]:
    """The body of a table: first column to the numbers of the columns with "%" or a decimal."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {
        name: [float(cell.split()[0]) for cell in rest if "×" not in cell] for name, *rest in cells
    }


@pytest.mark.parametrize(
    ("name", "baseline", "recipes"),
    [
        ("flax_dense.py", "f32", ["block", "row", "tensor", "mx", "unscaled"]),
        ("nnx_linear.py", "f32", ["FP8", "FP8, a scale per row"]),
    ],
)
def test_digits_are_learnt_in_fp8_about_as_well_as_in_f32(run, name, baseline, recipes) -> None:
    pytest.importorskip("sklearn", reason="data from scikit-learn, of the extra test")
    rows = rows_of(run(name, "--epochs", "4"))
    assert list(rows) == [baseline, *recipes]
    loss, accuracy, _ = rows[baseline]
    assert accuracy > 88
    for recipe in recipes:
        own_loss, own_accuracy, _ = rows[recipe]
        assert own_loss != loss
        if recipe != "unscaled":
            assert own_loss == pytest.approx(loss, rel=0.15)
            assert own_accuracy == pytest.approx(accuracy, abs=3)


def test_diagnosis_of_a_broken_run_names_what_stalls_it(run, tmp_path) -> None:
    output = run("diagnose_broken_run.py", "--steps", "100", "--out", str(tmp_path))
    losses = {name: last for name, (_, last) in rows_of(output).items()}
    best, broken, mended = losses.values()
    assert best < mended < 0.6 * broken
    verdicts = [line.strip() for line in output.splitlines() if " → " in line]
    assert verdicts[0].startswith("BAD down w (forward, dgrad): 11 % saturate")
    assert "use TensorScaling()" in verdicts[0]
    assert (tmp_path / "report.html").exists()


def test_custom_recipe_orders_recipes_by_what_shares_a_scale_with_outliers(run) -> None:
    rows = rows_of(run("custom_recipe.py", "--size", "512"))
    flushed, x_error, product, dx, dw = range(5)
    names = ["TensorScaling", "RowScaling", "BlockScaling", "SmallBlocks", "SmallBlocks, 16"]
    assert set(rows) == {*names, "MXScaling"}
    for column in (flushed, x_error):
        values = [rows[name][column] for name in names]
        assert values == sorted(values, reverse=True)
    assert rows["TensorScaling"][x_error] > 7
    assert 2 < rows["SmallBlocks, 16"][x_error] < 2.5
    for row in rows.values():
        assert 2 < row[product] < 4
        assert 5.6 < row[dx] < 6
    assert rows["TensorScaling"][dw] > 8
    assert 5.6 < rows["SmallBlocks"][dw] < 6


def test_quickstart_prints_an_error_for_each_call_and_the_kernel(run) -> None:
    output = run("quickstart.py")
    assert output.count("error") == 7
    assert "which kernel" in output.lower()


def test_emulate_h100_shows_what_promotion_is_for(run, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="of the extra test")
    output = run(
        "emulate_h100.py", "--steps", "2", "--batch", "1", "--held-out", "2", "--tokens", "16384",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert "H100, promoted every 128" in output
    result = json.loads((tmp_path / "results.json").read_text("utf-8"))
    runs = list(result["training"].values())
    assert len(runs) == 4
    assert runs[1]["gap_percent"] == 0
    first_losses = [run["losses"][0] for run in runs]
    assert len(set(first_losses)) == 4  # four arithmetics
    assert max(first_losses) == pytest.approx(min(first_losses), rel=0.02)
    errors = {(e["gradient"], e["interval"]): e for e in result["gradient"] if e["tokens"] == 16384}
    never, promoted = errors["of one sign", None], errors["of one sign", 128]
    assert never["bias"] == pytest.approx(-6.8, abs=0.7)
    assert never["total"] > 5
    assert abs(promoted["bias"]) < 0.02
    assert promoted["total"] < 1
    never, promoted = errors["normal", None], errors["normal", 128]
    assert never["accumulation"] > 10 * promoted["accumulation"]
    assert never["total"] == pytest.approx(promoted["total"], rel=0.01)  # quantisation dominates
    assert (tmp_path / "emulate_h100.png").stat().st_size > 10_000


def test_generate_decodes_with_weights_of_half_and_a_quarter_of_the_memory(run) -> None:
    output = run("generate.py", "--steps", "12", "--repeats", "1", "--windows", "1")
    assert "e4m3fn[128x128,panels]" in output
    rows = rows_of(output)
    assert list(rows) == ["float32", "bfloat16", "FP8"]
    for speed, _, loss, _ in rows.values():
        assert speed > 0
        assert loss == pytest.approx(rows["float32"][2], rel=0.01)
    assert [row[1] for row in rows.values()] == pytest.approx([2.10, 1.05, 0.53], abs=0.02)
    assert rows["float32"][3] == 100
    assert 80 < rows["FP8"][3] < 100
    assert output.count("written with") == 3


def test_generate_measures_an_untrained_model_of_any_width(run) -> None:
    output = run(
        "generate.py", "--width", "96", "--layers", "1", "--repeats", "1", "--batch", "3",
        "--recipe", "row",
    )  # fmt: skip
    assert "1 layers, 96 wide, untrained" in output
    assert "m=3 n=288 k=96 e4m3fn[1x96,mk]·e4m3fn[1x96,panels]" in output
    assert "decoding 3 streams" in output
    assert "written with" not in output


def test_decoding_step_by_step_gives_the_logits_of_the_whole_model(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    char_lm, decode = (importlib.import_module(name) for name in ("char_lm", "char_lm_decode"))
    pieces = jax.random.randint(jax.random.key(0), (2, char_lm.CONTEXT), 0, 11)
    model = char_lm.CharLM(11, None)
    params = model.init(jax.random.key(1), pieces)
    step_by_step = decode.logits_of(jnp.matmul, decode.weights_of(params), pieces)
    np.testing.assert_allclose(step_by_step, model.apply(params, pieces), atol=1e-4)


@pytest.mark.parametrize(
    "name", ["custom_recipe.py", "emulate_h100.py", "flax_dense.py", "generate.py", "nnx_linear.py"]
)
def test_help_is_the_first_line_of_the_docstring_and_bad_options_are_refused(
    run, capsys, name
) -> None:
    pytest.importorskip("sklearn", reason="data from scikit-learn, of the extra test")
    pytest.importorskip("matplotlib", reason="of the extra test")
    first_line = (EXAMPLES / name).read_text("utf-8").partition("\n")[0].strip('"')
    with pytest.raises(SystemExit) as exit_:
        run(name, "--help")
    assert exit_.value.code == 0
    assert first_line in " ".join(capsys.readouterr().out.split())
    options = {"custom_recipe.py": "--size", "emulate_h100.py": "--steps", "generate.py": "--width"}
    option = options.get(name, "--epochs")
    with pytest.raises(SystemExit) as exit_:
        run(name, option, "0")
    assert exit_.value.code == 2
    assert f"{option} 0: at least 1" in capsys.readouterr().err
