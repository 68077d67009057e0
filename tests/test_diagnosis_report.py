"""The report as text, HTML, PNG and JSON, and the command that writes it."""

from __future__ import annotations

import html.parser
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from diagnosis_data import WEIGHTS, normal, product, spike, tensor_product
from jax_fp8 import __main__ as cli
from test_diagnosis_verdicts import broken_run, broken_training


@pytest.fixture(scope="module")
def broken() -> Any:
    return fp8.diagnose(broken_training, *broken_run())


class Page(html.parser.HTMLParser):
    """Tags that do not match, references that leave the page, and the visible words."""

    VOID = frozenset({"meta", "br", "wbr", "rect", "line", "circle", "path", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self._check(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self._check(tag, attrs)

    def _check(self, tag: str, attrs: Any) -> None:
        if tag in ("script", "link", "iframe", "img", "object", "embed"):
            self.problems.append(f"<{tag}>")
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset") or "url(" in (value or ""):
                self.problems.append(f"{name}={value}")
            if "nan" in (value or "").lower().split() or re.search(r"\bnan\b|\binf\b", value or ""):
                self.problems.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)


def check_page(text: str) -> str:
    """The visible text of a page that is well-formed and refers to nothing outside itself."""
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    assert not page.problems
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    return " ".join("".join(page.words).split())


def test_html_is_well_formed_self_contained_and_starts_with_the_verdict(broken, tmp_path) -> None:
    text = broken.to_html(tmp_path / "report.html").read_text("utf-8")
    words = check_page(text)
    start = words[:600]
    assert "gate w (forward, dgrad)" in start
    assert "saturate under the given scale 0.02" in start
    assert "Compute the scale from amax" in start
    for step in ("Scale factors", "Accumulator", "Depth", "Comparison"):
        assert step in words
    assert "width=device-width" in text
    assert "prefers-color-scheme:dark" in text
    assert text.count("<svg viewBox") > 10


def test_awkward_diagnoses_have_a_report(tmp_path) -> None:
    x = spike()[:7, :33]
    x[0, 0] = np.inf
    awkward = {
        "zeros": (product(fp8.BlockScaling()), np.zeros((4, 40), np.float32), WEIGHTS[:40, :3]),
        "infinite": (tensor_product(), x, WEIGHTS[:33, :5]),
        "one": (tensor_product(), np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)),
        "loose": (lambda x: fp8.quantize(x, "e5m2"), normal(4, 8)),
    }
    codes = jnp.ones((4, 8), jnp.float8_e4m3fn)
    awkward["codes"] = (lambda x: fp8.scaled_matmul(x, x.T, 1.0, 1.0), codes)
    for name, (fn, *args) in awkward.items():
        found = fp8.diagnose(fn, *args)
        check_page(found.to_html(tmp_path / f"{name}.html").read_text("utf-8"))
        assert "Checklist" in str(found)
        json.loads(found.to_json())


def test_history_of_a_run_in_the_report(broken, tmp_path) -> None:
    params, x, y = broken_run()
    watched = jax.jit(fp8.watch(jax.value_and_grad(broken_training), every=5))
    history = []
    for step in range(16):
        (_, gradient), stats = watched(step, params, x, y)
        params = jax.tree.map(lambda p, g: p - 50 * g, params, gradient)
        history.append((step, stats))
    text = broken.to_html(tmp_path / "report.html", history).read_text("utf-8")
    words = check_page(text)
    assert "Over the steps of the run" in words
    assert "tensor, step051015" in words.replace(" 0", "0")
    assert "▲" in words  # gate w saturates
    assert text.index("gate/<wbr/>forward/<wbr/>w") > 0


def test_markup_in_names_is_escaped(tmp_path) -> None:
    found = fp8.diagnose(
        lambda p, x: fp8.matmul(x, p["<b>&"]).sum(), {"<b>&": WEIGHTS[:40, :8]}, normal(4, 40)
    )
    text = found.to_html(tmp_path / "a.html").read_text("utf-8")
    assert "&lt;b&gt;&amp;" in text
    check_page(text)


def test_text_has_the_verdict_first_and_json_has_everything(broken) -> None:
    text = str(broken)
    assert text.index("BAD") < text.index("Checklist") < text.index("Tensors")
    assert "gate w" in text[: text.index("Checklist")]
    data = json.loads(broken.to_json())
    assert data["verdicts"][0]["layer"] == "gate"
    assert {"gemms", "tensors", "curves", "machine"} <= set(data)
    assert len(data["gemms"]) == len(broken.gemms) == 8
    assert data["tensors"][0]["plots"]["exponents"]


def test_png(broken, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    assert broken.to_png(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def run(capsys: Any, *argv: str) -> tuple[int, Any, str]:
    status = cli.main(["diagnose", *argv])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


def test_command_on_arrays(tmp_path, capsys) -> None:
    path, report = tmp_path / "run.npz", tmp_path / "report.html"
    arrays = {"lhs": normal(64, 256).astype(np.float64), "rhs": normal(256, 32)}
    np.savez(path, **arrays, recipe="row")
    status, result, _ = run(capsys, str(path), "-o", str(report))
    assert status == 0
    assert [gemm["direction"] for gemm in result["gemms"]] == ["forward"]
    assert {tensor["tile"][0] for tensor in result["tensors"]} == {1}
    check_page(report.read_text("utf-8"))

    np.savez(path, **arrays, cotangent=normal(64, 32))
    assert len(run(capsys, str(path))[1]["gemms"]) == 3

    arrays["lhs"][3, 5] = 1e6
    np.savez(path, **arrays)
    status, result, errors = run(
        capsys, str(path), "--recipe", "tensor", "--png", str(tmp_path / "a.png")
    )
    assert status == 1
    assert "a spike of 1e+06" in errors
    assert result["failures"] == errors.strip().splitlines()


def test_command_on_functions(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_run.py").write_text(
        "import jax.numpy as jnp, jax_fp8 as fp8\n"
        "def good():\n"
        "    loss = lambda w, x: fp8.matmul(x, w).sum()\n"
        "    return loss, jnp.ones((32, 16)), jnp.ones((8, 32))\n"
        "def bare():\n"
        "    return fp8.matmul(jnp.ones((4, 8)), jnp.ones((8, 4)))\n"
    )
    status, result, _ = run(capsys, "my_run:good")
    assert status == 0
    assert [gemm["direction"] for gemm in result["gemms"]] == ["forward", "wgrad"]
    assert [gemm["direction"] for gemm in run(capsys, "my_run:bare")[1]["gemms"]] == ["forward"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main(["diagnose", "my_run:good"]) == 0
    assert "Where FP8 hurts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "neither MODULE:FUNCTION nor a file"),
        (["no_such_module:f"], "No module named"),
        (["json:no_such_function"], "no_such_function"),
        (["missing.npz"], "missing.npz"),
        (["empty.npz"], "no array 'lhs'"),
        (["integers.npz"], "lhs has dtype int64"),
        (["json:dumps", "--recipe", "row"], "a function chooses its own"),
        (["json:dumps", "-o", "no/such/folder.html"], "there is no folder"),
    ],
)
def test_command_refuses(argv, message, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    np.savez("empty.npz", x=np.ones(3))
    np.savez("integers.npz", lhs=np.ones((2, 2), int), rhs=np.ones((2, 2), int))
    with pytest.raises(SystemExit) as error:
        cli.main(["diagnose", *argv])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
