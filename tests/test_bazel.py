"""BUILD, which pip never reads, agrees with what pip builds and with the test files."""

from __future__ import annotations

import collections
import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def glob(include: list[str], exclude: list[str] = (), allow_empty: bool = True) -> list[str]:
    def matches(patterns: list[str]) -> set[str]:
        return {
            str(path.relative_to(ROOT))
            for pattern in patterns
            for path in ROOT.glob(f"{pattern}/*" if pattern.endswith("**") else pattern)
            if path.is_file() and "tests/bazel/" not in str(path)  # a package of its own
        }

    return sorted(matches(include) - matches(exclude))


@pytest.fixture(scope="module")
def build() -> dict[str, Any]:
    """The names of BUILD; `targets` maps each rule to its targets' attributes."""
    targets: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)

    def rule(name: str) -> Any:
        return lambda **attributes: targets[name].append(attributes)

    rules = {name: rule(name) for name in ("cc_binary", "cc_library", "py_library", "py_test")}
    stubs = {"glob": glob, "load": lambda *_: None, "select": lambda choices: [choices]}
    names: dict[str, Any] = {**rules, **stubs}
    # Starlark's syntax is a part of Python's.
    exec(compile((ROOT / "BUILD").read_text("utf-8"), "BUILD", "exec"), names)
    return names | {"targets": targets}


@pytest.fixture(scope="module")
def cmake() -> str:
    text = (ROOT / "ffi" / "CMakeLists.txt").read_text("utf-8")
    return re.sub(r"#.*", "", text)


def cmake_list(cmake: str, variable: str) -> list[str]:
    (body,) = re.findall(rf"^set\({variable}\s+(.*?)\)", cmake, re.MULTILINE | re.DOTALL)
    return [entry.strip('"') for entry in body.split()]


def test_isa_files_have_the_flags_that_cmake_gives_them(build, cmake) -> None:
    expected = {
        f"ffi/{file}": flags
        for file, *flags in (entry.split("|") for entry in cmake_list(cmake, "ISA_FILES"))
    }
    assert expected
    compiled = {
        source: target["copts"]
        for target in build["targets"]["cc_library"]
        for source in target.get("srcs", ())
    }
    on_x86 = {"@platforms//cpu:x86_64": None, "//conditions:default": []}
    assert compiled == {
        file: [*build["CXX_OPTS"], on_x86 | {"@platforms//cpu:x86_64": flags}]
        for file, flags in expected.items()
    }


def test_every_source_of_cmake_is_built_once(build, cmake) -> None:
    targets = [*build["targets"]["cc_library"], *build["targets"]["cc_binary"]]
    built = [source for target in targets for source in target.get("srcs", ())]
    assert sorted(built) == sorted(f"ffi/{source}" for source in cmake_list(cmake, "SOURCES"))


def test_flags_of_all_files_are_those_of_cmake(build, cmake) -> None:
    (body,) = re.findall(r"target_compile_options\(\s*_ffi PRIVATE(.*?)\)", cmake, re.DOTALL)
    flags = set(re.findall(r"(?<![\w-])-[\w-]+(?:=\w+)?", body))
    assert "-ffp-contract=off" in flags
    assert flags <= set(build["CXX_OPTS"])
    (standard,) = re.findall(r"CMAKE_CXX_STANDARD (\d+)", cmake)
    assert f"-std=c++{standard}" in build["CXX_OPTS"]


def test_every_test_file_is_a_test_target(build) -> None:
    targets = {target["name"]: target for target in build["targets"]["py_test"]}
    files = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    assert set(targets) == files | {"doctests"}
    for name in files:
        assert f"tests/{name}.py" in targets[name]["srcs"]
        assert targets[name]["args"] == [f"$(location tests/{name}.py)"]


def test_small_tests_exist(build) -> None:
    small = {t["name"] for t in build["targets"]["py_test"] if "small" in t["tags"]}
    assert small == {*build["SMALL_TESTS"], "doctests"}


def test_every_helper_of_the_tests_comes_with_each_test(build) -> None:
    (support,) = (t for t in build["targets"]["py_library"] if t["name"] == "test_support")
    helpers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if not path.name.startswith("test_") and path.parent.name != "bazel"
    }
    assert {"tests/conftest.py", "tests/user_reports/__init__.py"} <= helpers
    assert helpers <= set(support["srcs"])
    assert all(":test_support" in target["deps"] for target in build["targets"]["py_test"])
