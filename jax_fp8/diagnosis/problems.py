"""Some rows of both operands of a GEMM, their codes, and errors of their product.

Rows are spread evenly, those with the largest and the smallest amax among them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jax_fp8.diagnosis.capture import Gemm, Operand
from jax_fp8.testing.oracle import dequantize_np

__all__ = ["Errors", "Problem", "by_row", "errors", "examples", "problem_of", "safe", "stack"]

Array = npt.NDArray[Any]

#: Sampled results of a GEMM: at most so many rows and columns, and products in all.
MAX_ROWS, MAX_PRODUCTS = 96, 2**27
#: Examples of a batch that are sampled.
MAX_BATCH: Final = 2


@dataclasses.dataclass(frozen=True)
class Errors:
    """Of a result C + e against C, in per cent.

    Attributes:
      frobenius: ‖e‖ / ‖C‖.
      evened: the same with e and C divided by the norms of the operands' rows, ‖lhs row m‖ and
        ‖rhs row n‖: every row and column counts the same, and no huge one hides the others.
      worst_row: largest ‖e‖ / ‖C‖ of a row or column.
      median: median |e| / |C| of single results.
      bias: mean(e · sign C) / mean |C|; negative where results are too small.
    """

    frobenius: float
    evened: float
    worst_row: float
    median: float
    bias: float


def errors(result: Array, exact: Array, even: Array | float = 1.0) -> Errors:
    """Errors of (batch, m, n) results; `even` are the weights of `Errors.evened`.

    >>> errors(np.array([[[2.02, 1.0]]]), np.array([[[2.0, 1.0]]])).worst_row
    1.0
    """
    with np.errstate(all="ignore"):
        e, size = result - exact, np.abs(exact)
        rows, columns = by_row(e, exact, -1), by_row(e, exact, -2)
        relative = np.abs(e[size > 0]) / size[size > 0]
        return Errors(
            frobenius=100 * safe(np.linalg.norm(e), np.linalg.norm(exact)),
            evened=100 * safe(np.linalg.norm(e * even), np.linalg.norm(exact * even)),
            worst_row=round(float(max(rows.max(initial=0), columns.max(initial=0))), 6),
            median=100 * float(np.median(relative)) if relative.size else 0.0,
            bias=100 * safe(np.mean(e * np.sign(exact)), np.mean(size)),
        )


@dataclasses.dataclass(eq=False)
class Problem:
    """Sampled rows of one example: operands (rows, k) and codes with a scale per row and tile."""

    wholes: tuple[Operand, Operand]
    rows: Array
    columns: Array
    codes: tuple[Array, Array]
    scales: tuple[Array, Array]
    tiles_k: tuple[int, int]
    operands: tuple[Array, Array]
    out: Array

    @property
    def known(self) -> bool:
        return all(x.exact is not None for x in self.wholes)

    @property
    def k(self) -> int:
        return int(self.codes[0].shape[1])

    @property
    def formats(self) -> tuple[str, str]:
        return self.wholes[0].format.name, self.wholes[1].format.name

    @property
    def dequantized(self) -> list[Array]:
        return [
            dequantize_np(values, scale, (1, tile))
            for values, scale, tile in zip(self.codes, self.scales, self.tiles_k, strict=True)
        ]

    @property
    def product(self) -> Array:
        lhs, rhs = self.dequantized
        with np.errstate(all="ignore"):
            return lhs @ rhs.T

    @property
    def exact(self) -> Array:
        lhs, rhs = (x.astype(np.float64) for x in self.operands)
        with np.errstate(all="ignore"):
            return lhs @ rhs.T

    @property
    def even(self) -> Array:
        """Weights of the results that make all rows and columns count the same."""
        norms = [np.linalg.norm(x.astype(np.float64), axis=1) for x in self.operands]
        weights = [np.divide(1.0, n, out=np.zeros_like(n), where=n > 0) for n in norms]
        return np.outer(weights[0], weights[1])

    @staticmethod
    def of(sides: list[tuple[Array, Array]], like: Problem) -> Problem:
        """The same rows with other codes and scales per row."""
        k = sides[0][0].shape[1]
        return dataclasses.replace(
            like,
            codes=(sides[0][0], sides[1][0]),
            scales=(sides[0][1], sides[1][1]),
            tiles_k=(max(k, 1), max(k, 1)),
        )


def examples(batch: int) -> list[int]:
    return sorted({0, batch - 1} if batch >= MAX_BATCH else {0})


def problem_of(g: Gemm, example: int, edge: int = MAX_ROWS) -> Problem:
    wholes = (_example(g.lhs, example), _example(g.rhs, example))
    edge = min(edge, max(16, math.isqrt(MAX_PRODUCTS // max(g.k, 1))))
    rows, columns = (_chosen_rows(x, edge) for x in wholes)
    codes, scales, operands = [], [], []
    for x, index in zip(wholes, (rows, columns), strict=True):
        codes.append(x.codes[0][index])
        scales.append(x.scale[0][index // x.tile[0]])
        known = x.exact[0][index] if x.exact is not None else None
        operands.append(
            dequantize_np(codes[-1], scales[-1], (1, x.tile[1])).astype(np.float32)
            if known is None
            else known
        )
    return Problem(
        wholes=wholes,
        rows=rows,
        columns=columns,
        codes=(codes[0], codes[1]),
        scales=(scales[0], scales[1]),
        tiles_k=(wholes[0].tile[1], wholes[1].tile[1]),
        operands=(operands[0], operands[1]),
        out=g.out[example][np.ix_(rows, columns)].astype(np.float64),
    )


def _example(x: Operand, example: int) -> Operand:
    """One example of a batch, 0 where it is not finite: a NaN would hide all else."""

    def pick(y: Array) -> Array:
        return y[min(example, y.shape[0] - 1)][None]

    codes = pick(x.codes)
    if not (finite := np.isfinite(codes.astype(np.float32))).all():
        codes = np.where(finite, codes, np.zeros((), codes.dtype))
    exact = None if x.exact is None else pick(x.exact)
    if exact is not None and not (finite := np.isfinite(exact)).all():
        exact = np.where(finite, exact, np.float32(0))
    return dataclasses.replace(x, codes=codes, scale=pick(x.scale), exact=exact)


def _chosen_rows(x: Operand, count: int) -> Array:
    """Indices of rows spread evenly, with those of the largest and the smallest amax."""
    rows = x.codes.shape[1]
    if rows <= count:
        return np.arange(rows)
    source = x.exact[0] if x.exact is not None else x.codes[0].astype(np.float32)
    amax = np.max(np.where(np.isfinite(source), np.abs(source), 0), axis=1, initial=0)
    extremes = {int(amax.argmax()), int(np.where(amax > 0, amax, np.inf).argmin())}
    spread = np.linspace(0, rows - 1, count - len(extremes)).round().astype(int)
    return np.array(sorted({*spread.tolist(), *extremes}))


def safe(a: Any, b: Any) -> float:
    return float(a / b) if b else 0.0


def stack(matrices: list[Array]) -> Array:
    return np.stack(matrices)


def by_row(e: Array, exact: Array, axis: int) -> Array:
    above, below = np.linalg.norm(e, axis=axis), np.linalg.norm(exact, axis=axis)
    return 100 * np.divide(above, below, out=np.zeros_like(above), where=below > 0).ravel()
