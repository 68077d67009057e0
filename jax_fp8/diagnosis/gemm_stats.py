"""What FP8 did to one GEMM: its error against the exact product, and which part comes from where.

The exact product is that of the high-precision operands in float64. Results are sampled: some
rows of each operand, spread evenly, those with the largest and smallest amax among them. Values
that are not finite count as 0 here; only `total` is NaN where the result is.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8.config import Execution
from jax_fp8.diagnosis.capture import Gemm
from jax_fp8.diagnosis.problems import (
    Errors,
    Problem,
    by_row,
    errors,
    examples,
    problem_of,
    safe,
    stack,
)
from jax_fp8.diagnosis.what_if import BFLOAT16_GRADIENT, WhatIf, cheapest, what_if
from jax_fp8.emulation.machines import MACHINES
from jax_fp8.emulation.overflow import OverflowWarning
from jax_fp8.gemm import Matrix, gemm
from jax_fp8.testing.oracle import quantize_np

__all__ = ["Accumulation", "GemmStats", "error_against_k", "longest_interval", "study_gemm"]

Array = npt.NDArray[Any]

DEFAULT_MACHINE: Final = "hopper_wgmma"
#: Interval of the run that is promoted (DeepSeek-V3, arXiv 2412.19437).
PROMOTED_EVERY: Final = 128
#: Intervals tried, the cheapest first: None is never.
INTERVALS: Final = (None, 512, PROMOTED_EVERY)
#: Sums may be off by this share of what quantisation is: both together then grow by 0.5 %.
SMALL_SHARE: Final = 0.1


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """Error of one way to add up the same codes, in per cent of their exact product.

    Attributes:
      machine: accumulation model.
      interval: promotion interval, None for never.
      error: ‖e‖ / ‖C‖.
      bias: see `Errors`.
    """

    machine: str
    interval: int | None
    error: float
    bias: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmStats:
    """The report's line for a GEMM. All errors in per cent, NaN where operands are unknown.

    Attributes:
      layer, direction: as in `capture.Gemm`.
      m, n, k, batch: sizes.
      sampled: rows and columns of the result that were looked at.
      formats: of lhs and rhs.
      total: the result as the program got it, against the exact product.
      quantization: the codes' exact product against the exact product of the operands.
      expected: what rounding errors that are independent of each other make of it.
      granularity: what the finest scales tried would save of `quantization.evened`; the rest is the
        format's own rounding.
      accumulation: as it was run, against the exact product of the codes.
      runs: the same codes with an exact accumulator, and with each interval of `INTERVALS`.
      promote_every: the longest interval whose error is a tenth of quantisation's or less, None if
        sums need not be promoted at all; 128 if none is that good.
      in_use: machine and interval that the program ran with.
      what_if: recipes tried.
      cheapest: the cheapest recipe within 1.2 times the best, see `cheapest`.
      row_errors: error of each sampled row of the result, sorted.
    """

    layer: str
    direction: str
    batch: int
    m: int
    n: int
    k: int
    sampled: tuple[int, int]
    formats: tuple[str, str]
    total: Errors
    quantization: Errors
    expected: float
    granularity: float
    accumulation: float
    runs: tuple[Accumulation, ...]
    promote_every: int | None
    in_use: Accumulation
    what_if: tuple[WhatIf, ...]
    cheapest: str
    row_errors: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.layer} {self.direction}"

    def run(self, interval: int | None) -> Accumulation:
        """The run of `runs` with this promotion interval, on a machine that has one."""
        found = [r for r in self.runs if r.interval == interval and r.machine != "exact"]
        return found[0] if found else self.runs[0]


def study_gemm(g: Gemm, machine: str = DEFAULT_MACHINE) -> GemmStats:
    """Statistics of one GEMM.

    Args:
      g: a captured GEMM.
      machine: name of `emulation.MACHINES`, whose accumulator the runs have.
    """
    problems = [problem_of(g, i) for i in examples(g.out.shape[0])]
    first = problems[0]
    exact, codes = stack([p.exact for p in problems]), stack([p.product for p in problems])
    runs = tuple(
        _accumulate(problems, name, interval)
        for name, interval in (("exact", None), *((machine, interval) for interval in INTERVALS))
    )
    used = g.execution.accumulation
    interval = g.execution.promotion_interval or None
    in_use = _accumulate(problems, "fp32" if used == "native" else used, interval)
    known = all(p.known for p in problems)
    tried = what_if(g, problems) if known else ()
    even = stack([p.even for p in problems])
    quantization = errors(codes, exact, even)
    finest = min((row.evened for row in tried if row.recipe != BFLOAT16_GRADIENT), default=math.nan)
    total = errors(stack([p.out for p in problems]), exact, even)
    return GemmStats(
        layer=g.layer,
        direction=g.direction,
        batch=g.out.shape[0],
        m=g.out.shape[1],
        n=g.out.shape[2],
        k=g.k,
        sampled=(len(first.rows), len(first.columns)),
        formats=(g.lhs.format.name, g.rhs.format.name),
        total=total,
        quantization=quantization if known else errors(codes * math.nan, exact),
        expected=_expected(first),
        granularity=max(0.0, quantization.evened - finest) if known else math.nan,
        accumulation=in_use.error,
        runs=runs,
        promote_every=longest_interval(
            runs[1:], quantization.frobenius if known else _expected(first)
        ),
        in_use=in_use,
        what_if=tried,
        cheapest=cheapest(tried),
        row_errors=_sorted(by_row(stack([p.out for p in problems]) - exact, exact, -1)),
    )


def error_against_k(g: Gemm, machine: str = DEFAULT_MACHINE) -> list[tuple[int, float, float]]:
    """(k, never promoted, promoted) of the first k products of each sum, up to all of them.

    In per cent of the exact product of the codes, which get a scale per row: tiles along k would
    promote by themselves.
    """
    problem = problem_of(g, 0, edge=32)
    sizes = [size for size in (32, 128, 512, 2048, 8192, 32768) if size < problem.k]
    curve = []
    for size in (*sizes, problem.k):
        sides = [
            quantize_np(x[:, :size], fmt, (1, -1))
            for x, fmt in zip(problem.operands, problem.formats, strict=True)
        ]
        part = Problem.of(sides, problem)
        never, promoted = (_accumulate([part], machine, i).error for i in (None, PROMOTED_EVERY))
        curve.append((size, never, promoted))
    return curve


# --- Accumulation ---------------------------------------------------------------------------------


def _accumulate(problems: list[Problem], machine: str, interval: int | None) -> Accumulation:
    row = MACHINES[machine]
    if interval is not None and not row.takes_interval(interval):
        interval = row.default_interval
    execution = Execution(accumulation=machine, promotion_interval=interval or 0)
    results = []
    for problem in problems:
        sides = [
            Matrix(jnp.asarray(values), jnp.asarray(scale), (1, tile))
            for values, scale, tile in zip(
                problem.codes, problem.scales, problem.tiles_k, strict=True
            )
        ]
        with warnings.catch_warnings(), jax.default_device(jax.devices("cpu")[0]):
            warnings.simplefilter("ignore", OverflowWarning)
            out = gemm(sides[0], -1, sides[1], -1, out_dtype=np.float32, execution=execution)
        results.append(np.asarray(out, np.float64))
    found = errors(stack(results), stack([p.product for p in problems]))
    return Accumulation(machine, interval, found.frobenius, found.bias)


def longest_interval(runs: Sequence[Accumulation], quantization: float) -> int | None:
    """Interval of the first of `runs` that costs little beside quantisation, else of the last."""
    good = (run for run in runs if run.error <= SMALL_SHARE * quantization)
    return next(good, runs[-1]).interval


# --- Helpers --------------------------------------------------------------------------------------


def _expected(p: Problem) -> float:
    """Relative error of a product whose operands have independent rounding errors, in per cent.

    sqrt(eA² + eB²) · sqrt(K E[a²] E[b²]) / ‖C‖ of one element, with the errors of normal data.
    """
    eps = {"e4m3fn": 0.0265, "e5m2": 0.0528}
    both = math.hypot(*(eps[name] for name in p.formats))
    a, b = (np.where(np.isfinite(x), x, 0).astype(np.float64) for x in p.operands)
    mean2, square = float(np.mean(a) * np.mean(b)) ** 2, float(np.mean(a**2) * np.mean(b**2))
    signal = p.k**2 * mean2 + p.k * (square - mean2)
    return 100 * both * math.sqrt(safe(p.k * square, signal))


def _sorted(x: Array) -> tuple[float, ...]:
    return tuple(round(float(v), 4) for v in np.sort(x))
