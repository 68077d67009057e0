"""`python -m jax_fp8 diagnose`: a function or two saved arrays, as tables, JSON, HTML or PNG."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jax_fp8 import dot, recipes
from jax_fp8.diagnosis import diagnose as diagnosing
from jax_fp8.diagnosis.gemm_stats import DEFAULT_MACHINE
from jax_fp8.diagnosis.report import renderables
from jax_fp8.emulation.machines import MACHINES

__all__ = ["add_arguments", "diagnose", "show"]


class Result(dict[str, Any]):
    """The result as JSON, and the diagnosis that it shows."""

    diagnosis: Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument(
        "target",
        metavar="MODULE:FUNCTION|FILE.npz",
        help="a function without arguments that returns (loss, *arguments), or that multiplies "
        "in FP8 itself; or arrays lhs (m, k) and rhs (k, n), with a cotangent (m, n) for the "
        "gradients and a recipe if you like",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="write a report")
    parser.add_argument("--png", type=Path, metavar="FILE.png", help="draw with matplotlib")
    parser.add_argument(
        "--recipe",
        choices=tuple(recipes.BY_NAME),
        help="how to quantise the arrays of a file (default: what it says, else block)",
    )
    parser.add_argument(
        "--machine",
        choices=tuple(MACHINES),
        default=DEFAULT_MACHINE,
        help=f"accumulator that sums are tried with (default: {DEFAULT_MACHINE})",
    )


def diagnose(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where FP8 hurts in a function or a product: causes, remedies, figures. Fails if it is bad."""
    try:
        for path in (arguments.output, arguments.png):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{path}: there is no folder {path.parent}")
        is_file = arguments.target.endswith(".npz")
        if arguments.recipe and not is_file:
            raise ValueError("--recipe is for arrays of a file; a function chooses its own")
        fn, operands = (_product if is_file else _target)(arguments)
    except (ValueError, TypeError, ImportError, OSError, AttributeError) as error:
        arguments.fail(str(error))
    if not is_file:
        fn, operands = _call(fn)
    argnums = (0, 1) if is_file else 0
    found = diagnosing(fn, *operands, argnums=argnums, machine=arguments.machine)
    if arguments.output is not None:
        found.to_html(arguments.output)
    if arguments.png is not None:
        found.to_png(arguments.png)
    result = Result(found.as_dict())
    for tensor in result["tensors"]:
        del tensor["plots"]  # a file of `to_json` has them
    result["failures"] = [str(v) for v in found.verdicts if v.severity == "bad"]
    result.diagnosis = found
    return result


def show(console: Console, result: dict[str, Any]) -> None:
    """Prints the report."""
    assert isinstance(result, Result)
    for part in renderables(result.diagnosis):
        console.print(part)


def _target(arguments: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    module_name, _, name = arguments.target.partition(":")
    if not name:
        raise ValueError(f"{arguments.target!r} is neither MODULE:FUNCTION nor a file .npz")
    sys.path.insert(0, os.getcwd())  # as `python -m` would, for a module of the user's
    return getattr(importlib.import_module(module_name), name), ()


def _call(target: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What a function without arguments stands for: the loss that it returns, or itself."""
    returned = target()
    if isinstance(returned, tuple) and returned and callable(returned[0]):
        return returned[0], returned[1:]
    return target, ()


def _product(arguments: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    with np.load(arguments.target) as file:
        arrays = {name: file[name] for name in file.files}
    missing = [name for name in ("lhs", "rhs") if name not in arrays]
    if missing:
        raise ValueError(f"{arguments.target}: no array {missing[0]!r}; it has {', '.join(arrays)}")
    name = arguments.recipe or str(arrays.get("recipe", "block"))
    if name not in recipes.BY_NAME:
        known = ", ".join(recipes.BY_NAME)
        raise ValueError(f"{arguments.target}: recipe {name!r}; there are {known}")
    recipe = recipes.BY_NAME[name]
    lhs, rhs = (_float_array(arrays[side], side) for side in ("lhs", "rhs"))

    def product(lhs: Any, rhs: Any) -> Any:
        with jax.named_scope("product"):  # the name of its only layer
            return dot.matmul(lhs, rhs, recipe=recipe)

    if "cotangent" not in arrays:
        return product, (lhs, rhs)
    cotangent = _float_array(arrays["cotangent"], "cotangent")

    def loss(lhs: Any, rhs: Any) -> Any:
        return jnp.vdot(product(lhs, rhs), cotangent)

    return loss, (lhs, rhs)


def _float_array(x: Any, name: str) -> Any:
    if x.dtype.kind != "f":
        raise TypeError(
            f"{name} has dtype {x.dtype}; NumPy's files hold float32, float16 and float64: convert "
            "bfloat16 and FP8 to float32 before saving"
        )
    return jnp.asarray(x if x.dtype == np.float16 else x.astype(np.float32))
