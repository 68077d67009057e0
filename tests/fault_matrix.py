"""Every injected fault against every gradient check: who catches whom.

`python tests/fault_matrix.py` prints the matrix for all recipes and shapes, or for those that
`--recipes` and `--shapes` name.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

import jax_fp8 as fp8
from jax_fp8.recipes import Recipe
from jax_fp8.testing import FAULTS, case_of, intent_of, mutate, report_of
from jax_fp8.testing.case import Case
from jax_fp8.testing.vjp import matmul_of

SHAPES = {"square": (256, 256, 256), "odd": (33, 45, 70), "tiny": (2, 3, 4)}  # (m, n, k)
RECIPES: dict[str, Recipe] = {
    "tensor": fp8.TensorScaling(),
    "row": fp8.RowScaling(),
    "block": fp8.BlockScaling(),
    "tile": fp8.TileScaling(16, 32),
    "mx": fp8.MXScaling(),
    "static": fp8.StaticScaling(input=2.0**-6, weight=2.0**-9, gradient=2.0**-20),
    "stochastic": fp8.BlockScaling(rounding="stochastic"),
}
#: Checks that look at one gradient on one set of operands.
CHECKS = ("C2", "C3", "C4", "C5", "C6")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fault under one recipe and shape: how many output elements differ, and who caught it."""

    recipe: str
    shape: str
    fault: str
    changed: int
    caught: tuple[str, ...]


def case(recipe: str, shape: str, seed: int = 0) -> Case:
    """The unharmed op on normal data: x ~ N(0, 1), w ~ N(0, 1/k), g ~ 1e-4."""
    m, n, k = SHAPES[shape]
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)).astype(np.float32)
    w = (rng.standard_normal((k, n)) / np.sqrt(k)).astype(np.float32)
    chosen = RECIPES[recipe]
    key = jax.random.key(seed) if chosen.rounding == "stochastic" else None
    op = matmul_of(chosen, key=key)
    return case_of(op, x, w, intent_of(chosen, op, x, w, key=key), seed=seed)


def faults_of(recipe: str) -> list[str]:
    """Faults that a recipe can have: only stochastic rounding can be replaced by nearest."""
    stochastic = RECIPES[recipe].rounding == "stochastic"
    return [name for name in FAULTS if name != "nearest" or stochastic]


def cells(recipe: str, shape: str, checks: Sequence[str] = CHECKS) -> Iterator[Cell]:
    """A cell per fault."""
    whole = case(recipe, shape)
    for fault in faults_of(recipe):
        harmed = whole.with_op(mutate(whole.op, fault, whole.intent, whole.x, whole.w))
        changed = sum(
            int((a.view(np.uint32) != b.view(np.uint32)).sum())
            for a, b in zip(whole.observed, harmed.observed, strict=True)
        )
        caught = tuple(result.id for result in report_of(harmed, checks).failures)
        yield Cell(recipe, shape, fault, changed, caught)


def main() -> None:
    """Prints the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--checks", default=",".join(("C1", *CHECKS)))
    arguments = parser.parse_args()
    begin, missed, empty = time.time(), 0, 0
    for shape in arguments.shapes.split(","):
        for recipe in arguments.recipes.split(","):
            print(f"{recipe}, {shape} {SHAPES[shape]}")
            for cell in cells(recipe, shape, arguments.checks.split(",")):
                verdict = " ".join(cell.caught) or ("MISSED" if cell.changed else "no-op")
                missed += bool(cell.changed) and not cell.caught
                empty += not cell.changed
                print(f"  {cell.fault:22}{cell.changed:8} elements differ: {verdict}", flush=True)
    print(f"{missed} missed, {empty} no-ops, {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
