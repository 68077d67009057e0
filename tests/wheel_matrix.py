"""One wheel file on every supported jax: built once, installed beside each version, tested there.

    python tests/wheel_matrix.py           the whole suite on every row: hours on two cores
    python tests/wheel_matrix.py --smoke   the first and the last row, a few test files: as in CI

Python 3.11 has a wheel of its own; all later ones share one for CPython's stable ABI. The lowest
Python tests the oldest jax, one in the middle and the newest that it can have; each other Python
the newest. Pythons are those on PATH and pyenv's; --python names others. Needs a C++ compiler, and
`rich`, which jax_fp8 brings.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORK = ROOT / ".build" / "wheel_matrix"
VERSIONS = ("3.11", "3.12", "3.13")  # of Python
JAX_OF_LOWEST_PYTHON = ("jax==0.7.2", "jax==0.9.*", "jax")
SMOKE_TESTS = (
    "test_cli",
    "test_config",
    "test_flax",
    "test_formats",
    "test_kernel_table",
    "test_readme",
    "test_transformations",
)

console = Console(width=None if sys.stdout.isatty() else 120)


@dataclasses.dataclass
class Row:
    """A Python and a jax, and what came of them."""

    python: pathlib.Path
    version: str  # of Python, "3.12"
    jax: str  # a requirement
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    wheel: str = ""
    tests: str = ""
    seconds: float = 0.0
    failure: str = ""

    @property
    def name(self) -> str:
        return f"py{self.version}-{self.jax.replace('==', '-').replace('.*', '')}"

    @property
    def abi(self) -> str:
        return "cp311" if self.version == "3.11" else "abi3"


def find_pythons(named: Sequence[str]) -> dict[str, pathlib.Path]:
    """The interpreter for each of VERSIONS that there is, the lowest version first."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    candidates: Iterable[Any] = named or [
        *("python3", *(f"python{version}" for version in VERSIONS)),
        *(path for v in VERSIONS for path in sorted(pyenv.glob(f"versions/{v}.*/bin/python"))),
    ]
    ask = "import sys; print('%d.%d' % sys.version_info[:2], getattr(sys, '_base_executable'))"
    found: dict[str, pathlib.Path] = {}
    for candidate in candidates:
        try:
            answer = subprocess.run([candidate, "-c", ask], capture_output=True, text=True)
        except OSError as error:
            answer = subprocess.CompletedProcess([], 1, "", str(error))
        if answer.returncode == 0:
            version, executable = answer.stdout.split(maxsplit=1)
            if version in VERSIONS:
                found.setdefault(version, pathlib.Path(executable.strip()))
                continue
        if named:
            raise SystemExit(f"--python {candidate}: not a Python {' or '.join(VERSIONS)}")
    return dict(sorted(found.items(), key=lambda item: VERSIONS.index(item[0])))


def plan(pythons: dict[str, pathlib.Path], smoke: bool) -> list[Row]:
    (lowest, python), *others = pythons.items()
    rows = [Row(python, lowest, jax) for jax in JAX_OF_LOWEST_PYTHON]
    rows += [Row(python, version, "jax") for version, python in others]
    return [rows[0], rows[-1]] if smoke else rows


class StepFailed(Exception):
    pass


def run(row: Row, what: str, *command: str | pathlib.Path, cwd: pathlib.Path = WORK) -> str:
    """Runs a command, both streams into the row's log, and returns its standard output."""
    console.print(f"{row.name}: {what}")
    log = WORK / f"{row.name}.log"
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(map(str, command))}\n{done.stdout}{done.stderr}\n")
    if done.returncode:
        tail = (done.stdout + done.stderr).splitlines()[-60:]
        console.print("\n".join(tail), markup=False, highlight=False)
        raise StepFailed(f"{what}: exit status {done.returncode}; all of it is in {log}")
    return done.stdout


def wheel_for(row: Row, wheels: dict[str, pathlib.Path]) -> pathlib.Path:
    """The wheel of the row's ABI, built by the first row that needs it."""
    if row.abi not in wheels:
        folder = WORK / "wheels" / row.abi
        pip = (WORK / row.name / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
        run(row, "build the wheel", *pip, "wheel", "--no-deps", "-w", folder, ROOT)
        (wheels[row.abi],) = folder.glob("*.whl")
    return wheels[row.abi]


def test_row(row: Row, wheels: dict[str, pathlib.Path], smoke: bool) -> None:
    """Everything for one row.

    Raises:
      StepFailed: and which step.
    """
    venv = WORK / row.name
    python = venv / "bin" / "python"
    run(row, "create the environment", row.python, "-m", "venv", venv)
    wheel = wheel_for(row, wheels)
    row.wheel = f"{row.abi} {hashlib.sha256(wheel.read_bytes()).hexdigest()[:8]}"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(row, f"install the wheel and {row.jax}", *pip, "install", f"{wheel}[test]", row.jax)
    info = json.loads(run(row, "python -m jax_fp8 info", python, "-m", "jax_fp8", "info"))
    row.versions = info["versions"]
    run(row, "examples/quickstart.py", python, ROOT / "examples" / "quickstart.py")
    report = WORK / f"{row.name}.xml"
    files = [f"tests/{name}.py" for name in SMOKE_TESTS] if smoke else []
    # The program, not `-m pytest`: that would put the source folder on the path, before the wheel.
    pytest = (venv / "bin" / "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider")
    try:
        run(row, "tests", *pytest, f"--junitxml={report}", *files, cwd=ROOT)
    finally:
        if report.exists():
            suite = ET.parse(report).getroot()[0].attrib
            failed = int(suite["failures"]) + int(suite["errors"])
            passed = int(suite["tests"]) - failed - int(suite["skipped"])
            row.tests = f"{passed}, {failed}, {suite['skipped']}"


def table_of(rows: Sequence[Row]) -> Table:
    counts = "tests passed, failed, skipped"
    table = Table("Python", "jax", "jaxlib", "FFI of wheel, jaxlib", "wheel", counts, "s", "result")
    for row in rows:
        built = row.versions.get("XLA FFI API, built with", "?")
        runtime = row.versions.get("XLA FFI API, of jaxlib", "?")
        table.add_row(
            row.versions.get("python", row.version),
            row.versions.get("jax", row.jax),
            row.versions.get("jaxlib", "?"),
            f"{built}, {runtime}",
            row.wheel or "?",
            row.tests or "none",
            f"{row.seconds:.0f}",
            row.failure or "ok",
        )
    return table


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two rows and a few test files")
    parser.add_argument("--python", action="append", default=[], help="an interpreter; repeatable")
    parser.add_argument("--only", default="", help="run only rows whose name contains this")
    arguments = parser.parse_args(argv)

    pythons = find_pythons(arguments.python)
    if not pythons:
        raise SystemExit(f"no Python {' or '.join(VERSIONS)} found; name one with --python")
    rows = [row for row in plan(pythons, arguments.smoke) if arguments.only in row.name]
    if not rows:
        names = ", ".join(row.name for row in plan(pythons, arguments.smoke))
        raise SystemExit(f"--only {arguments.only}: no such row among {names}")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)

    wheels: dict[str, pathlib.Path] = {}
    for row in rows:
        start = time.monotonic()
        try:
            test_row(row, wheels, arguments.smoke)
        except StepFailed as error:
            row.failure = str(error).split(";")[0]
            console.print(f"[bold]{row.name}: failed: {error}")
        row.seconds = time.monotonic() - start
    console.print(table_of(rows))
    return int(any(row.failure for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
