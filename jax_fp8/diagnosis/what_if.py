"""What other recipes would make of the operands of a GEMM, and the cheapest that is good enough."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jax_fp8.diagnosis.capture import Gemm, Operand
from jax_fp8.diagnosis.problems import Errors, Problem, errors, stack
from jax_fp8.testing.oracle import dequantize_np, quantize_np

__all__ = ["BFLOAT16_GRADIENT", "CALLS", "WhatIf", "cheapest", "what_if"]

Array = npt.NDArray[Any]
Tile = tuple[int, int]

#: A recipe is good enough within this factor of the best.
GOOD_ENOUGH: Final = 1.2
#: Recipes of the what-if: tiles of (input or gradient, weight), and whether scales are powers of
#: two. Formats stay those in use.
RECIPES: Final[dict[str, tuple[Tile, Tile, bool]]] = {
    "tensor": ((-1, -1), (-1, -1), False),
    "row": ((1, -1), (1, -1), False),
    "block": ((1, 128), (128, 128), False),
    "tile 1×128": ((1, 128), (1, 128), False),
    "mx": ((1, 32), (1, 32), True),
}
BFLOAT16_GRADIENT: Final = "row + bf16 dW"
CALLS: Final = {
    "tensor": "TensorScaling()",
    "row": "RowScaling()",
    "block": "BlockScaling()",
    "tile 1×128": "TileScaling(1, 128)",
    "mx": "MXScaling()",
    BFLOAT16_GRADIENT: 'RowScaling(weight_gradient="bfloat16")',
}


@dataclasses.dataclass(frozen=True)
class WhatIf:
    """One recipe tried on the operands of a GEMM.

    Attributes:
      recipe: name.
      error, evened, median: see `Errors`; quantisation alone.
      flushed_percent: nonzero values that become 0, of the operand that loses more.
      extra_bytes: scales, and second copies where a tile is neither square nor the whole, of both.
    """

    recipe: str
    error: float
    evened: float
    median: float
    flushed_percent: float
    extra_bytes: int


def what_if(g: Gemm, problems: list[Problem]) -> tuple[WhatIf, ...]:
    tried = []
    for name, (tile, weight_tile, power_of_two) in RECIPES.items():
        tiles = tuple(weight_tile if x.role == "weight" else tile for x in (g.lhs, g.rhs))
        found, flushed = _with_tiles(problems, (tiles[0], tiles[1]), power_of_two=power_of_two)
        size = sum(
            _extra_bytes(x, t, power_of_two) for x, t in zip((g.lhs, g.rhs), tiles, strict=True)
        )
        tried.append(WhatIf(name, found.frobenius, found.evened, found.median, flushed, size))
    if g.direction == "wgrad":
        rounded = [_bfloat16(p.operands[0]) @ _bfloat16(p.operands[1]).T for p in problems]
        found = _errors(rounded, problems)
        size = 2 * sum(x.codes.size for x in (g.lhs, g.rhs))
        tried.append(
            WhatIf(BFLOAT16_GRADIENT, found.frobenius, found.evened, found.median, 0.0, size)
        )
    return tuple(tried)


def _errors(results: list[Array], problems: list[Problem]) -> Errors:
    exact, even = (stack([getattr(p, name) for p in problems]) for name in ("exact", "even"))
    return errors(stack(results), exact, even)


def _bfloat16(x: Array) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def _with_tiles(
    problems: list[Problem], tiles: tuple[Tile, Tile], *, power_of_two: bool
) -> tuple[Errors, float]:
    """Errors of quantising with these tiles, and the share that is flushed to zero."""
    results, flushed = [], [0.0]
    for problem in problems:
        sides = []
        for x, chosen, tile in zip(
            problem.wholes, (problem.rows, problem.columns), tiles, strict=True
        ):
            assert x.exact is not None
            index, whole = chosen, x.exact[0]
            if tile[0] == 1:  # rows are apart from each other
                whole, index = whole[chosen], np.arange(len(chosen))
            elif tile == (-1, -1):  # all that counts of other rows is their amax
                peak = np.max(np.where(np.isfinite(whole), np.abs(whole), 0), axis=1, initial=0)
                whole = np.concatenate([whole[chosen], whole[[int(peak.argmax())]]])
                index = np.arange(len(chosen))
            codes, scale = quantize_np(whole, x.format.name, tile, power_of_two=power_of_two)
            real = dequantize_np(codes, scale, tile)[index]
            nonzero = whole[index] != 0
            zeros = np.count_nonzero(nonzero & (codes[index].astype(np.float32) == 0))
            flushed.append(100 * zeros / max(int(np.count_nonzero(nonzero)), 1))
            sides.append(real)
        with np.errstate(all="ignore"):
            results.append(sides[0] @ sides[1].T)
    return _errors(results, problems), float(max(flushed))


def _extra_bytes(x: Operand, tile: Tile, power_of_two: bool) -> int:
    batch, rows, k = x.codes.shape
    sizes = [n if t == -1 else min(t, max(n, 1)) for n, t in zip((rows, k), tile, strict=True)]
    scales = batch * math.prod(-(-n // t) for n, t in zip((rows, k), sizes, strict=True))
    one_copy = tile in ((-1, -1), (128, 128))  # the other GEMM takes the same codes
    return scales * (1 if power_of_two else 4) + (0 if one_copy else x.codes.size)


def cheapest(rows: Sequence[WhatIf], *, along_k: bool = False) -> str:
    """Of the FP8 recipes within 1.2 times the best error, the cheapest.

    A scale that is the same for all of k is applied once, to the finished sum, so it goes before
    any that varies along k; then fewer extra bytes go before more.

    Args:
      rows: recipes tried.
      along_k: only those whose scales vary along k.
    """
    fp8 = [row for row in rows if row.recipe != BFLOAT16_GRADIENT]
    if not fp8:
        return ""
    best = min(row.evened for row in fp8)
    good = [
        row
        for row in fp8
        if row.evened <= GOOD_ENOUGH * best and not (along_k and _is_constant_along_k(row))
    ]
    return min(good, key=_cost).recipe if good else ""


def _cost(row: WhatIf) -> tuple[bool, int]:
    return not _is_constant_along_k(row), row.extra_bytes


def _is_constant_along_k(row: WhatIf) -> bool:
    return all(tile[1] == -1 for tile in RECIPES[row.recipe][:2])
