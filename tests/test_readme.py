"""The README's Python runs as it stands there."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def test_python_blocks_of_the_readme_run_one_after_the_other(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a report is written there
    blocks = re.findall(
        r"^```python\n(.*?)^```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, README.name, "exec"), names)
