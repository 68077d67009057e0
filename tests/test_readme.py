"""The README's Python runs as it stands there."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_python_blocks_of_the_readme_run_one_after_the_other() -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, README.name, "exec"), names)
