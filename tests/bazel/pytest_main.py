"""Runs pytest on what BUILD names, as `py_test` wants a program and a pytest file is none."""

import importlib.util
import os
import pathlib
import sys

import pytest


def main(arguments: list[str]) -> int:
    spec = importlib.util.find_spec("jax_fp8")
    origin = spec and spec.origin
    if not origin or not pathlib.Path(origin).is_relative_to(os.environ["TEST_SRCDIR"]):
        print(
            f"the tests would import {origin} instead of the module that Bazel built: uninstall "
            f"jax_fp8 from the environment of {sys.executable}, or name another one"
        )
        return 1
    report = f"--junitxml={os.environ['XML_OUTPUT_FILE']}"
    return pytest.main(["-p", "no:cacheprovider", report, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
