"""`python -m jax_fp8 gradcheck`: the gradient checks of one recipe and shape, on random data."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Final

import jax
import numpy as np
from rich.console import Console

from jax_fp8.recipes import Recipe
from jax_fp8.testing.report import CheckResult, VjpReport
from jax_fp8.testing.vjp import case_of, check_ids, intent_of, matmul_of, report_of

__all__ = ["add_arguments", "gradcheck", "show"]

_DTYPES: Final = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser, recipes: Mapping[str, Recipe]) -> None:
    """Declares the options of the command."""
    parser.add_argument("--recipe", choices=tuple(recipes), default="block")
    parser.add_argument(
        "--shape", type=_shape, default=(256, 256, 256), metavar="M,N,K",
        help="of the product (default: 256,256,256, from which on all checks see)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the random data (default: 0)")
    parser.add_argument(
        "--checks", default="all", metavar="IDS", help="such as C2,C4 (default all)"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the operands")
    parser.add_argument(
        "--rounding", choices=("nearest", "stochastic"), default="nearest", help="of gradients"
    )
    parser.add_argument("--accumulation", help="accumulation model to emulate (default: native)")
    parser.set_defaults(recipes=recipes)


def gradcheck(arguments: argparse.Namespace) -> dict[str, Any]:
    """Whether result and gradients of a product are what the recipe says, by nine checks."""
    m, n, k = arguments.shape
    recipe = dataclasses.replace(
        arguments.recipes[arguments.recipe], rounding=arguments.rounding
    )  # fmt: skip
    try:
        ids = check_ids(arguments.checks)
        if arguments.accumulation:
            recipe = dataclasses.replace(recipe, accumulation=arguments.accumulation)
    except ValueError as error:
        arguments.fail(str(error))
    rng = np.random.default_rng(arguments.seed)
    dtype = jax.numpy.dtype(arguments.dtype)
    x = rng.standard_normal((m, k)).astype(dtype)
    w = (rng.standard_normal((k, n)) / np.sqrt(k)).astype(dtype)
    key = jax.random.key(arguments.seed) if recipe.rounding == "stochastic" else None
    begin = time.perf_counter()
    op = matmul_of(recipe, key=key)
    intent = intent_of(recipe, op, x, w, key=key)
    report = report_of(case_of(op, x, w, intent, seed=arguments.seed), ids)
    return {
        "recipe": arguments.recipe,
        "shape": [m, n, k],
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - begin, 2),
        "checks": report.as_json(),
        "failures": [str(result) for result in report.failures],
    }


def show(console: Console, result: dict[str, Any]) -> None:
    """Prints the report as a table."""
    fields = [field.name for field in dataclasses.fields(CheckResult) if field.name != "explain"]
    rows = []
    for row in result["checks"]:
        own = {name: row[name] for name in fields}
        own["value"] = float("nan") if row["value"] is None else row["value"]
        limit = row["limit"]
        own["limit"] = None if limit is None else tuple(
            float("inf") if value is None else value for value in limit
        )  # fmt: skip
        own["index"] = None if row["index"] is None else tuple(row["index"])
        rows.append(CheckResult(**own))
    size, failed = " × ".join(map(str, result["shape"])), len(result["failures"])
    title = f"recipe {result['recipe']}, M × N × K = {size}, seed {result['seed']}"
    console.print(title, highlight=False)
    console.print(VjpReport(tuple(rows)).table())
    seconds = result["seconds"]
    console.print(f"{failed or 'none'} of {len(rows)} failed, {seconds} s", highlight=False)


def _shape(text: str) -> tuple[int, int, int]:
    sizes = tuple(int(size) for size in text.split(","))
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not three sizes m,n,k such as 64,512,128")
    return sizes
