"""The four steps to walk through when accuracy is bad, answered from the figures of a diagnosis.

1 scale factors, 2 type of the accumulator, 3 depth of K, 4 comparison with the exact result and
where the error sits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from jax_fp8.diagnosis.gemm_stats import PROMOTED_EVERY, GemmStats
from jax_fp8.diagnosis.stats import Level, TensorStats

if TYPE_CHECKING:
    from jax_fp8.diagnosis.diagnose import Diagnosis

__all__ = ["Step", "checklist", "order_tensors"]

#: An average row of a result is so many times farther off than that of well scaled data.
RESULT_WARN, RESULT_BAD = 1.5, 3.0
_LEVELS: dict[str, Level] = {"bad": "bad", "warn": "warn", "info": "ok"}


@dataclasses.dataclass(frozen=True)
class Step:
    """One question of the checklist, and its answer.

    Attributes:
      title: the question.
      level: of the worst verdict that belongs to it.
      answer: figures in a sentence or two.
    """

    title: str
    level: Level
    answer: str


def checklist(d: Diagnosis) -> tuple[Step, ...]:
    """The four steps."""
    return tuple(
        Step(title, _level(d, number), answer(d))
        for number, (title, answer) in enumerate(_STEPS, start=1)
    )


def order_tensors(tensors: Iterable[TensorStats]) -> list[TensorStats]:
    """The worst first: by levels, then by the error of an average row."""

    def rank(t: TensorStats) -> tuple[int, int, float]:
        levels = list(t.levels().values())
        return -levels.count("bad"), -levels.count("warn"), -_or_zero(t.row_rms_percent)

    return sorted(tensors, key=rank)


def _level(d: Diagnosis, step: int) -> Level:
    own = [_LEVELS[v.severity] for v in d.verdicts if v.step == step]
    if step == len(_STEPS):
        own += [_result_level(g) for g in d.gemms]
    return next((level for level in ("bad", "warn") if level in own), "ok")


def _result_level(g: GemmStats) -> Level:
    """By how far an average row of the result is off, beside well scaled data."""
    off = _or_zero(g.quantization.evened) / max(g.expected, 1.0)
    return "bad" if off > RESULT_BAD else "warn" if off > RESULT_WARN else "ok"


def _scales(d: Diagnosis) -> str:
    def count(*columns: str) -> int:
        return sum(any(t.levels().get(c, "ok") != "ok" for c in columns) for t in d.tensors)

    given = sum(t.given_scale for t in d.tensors)
    text = (
        f"{len(d.tensors)} quantised tensors: {count('saturated_percent')} saturate, "
        f"{count('flushed_percent')} flush too much to zero, "
        f"{count('worst_row_percent', 'worst_tile_percent')} have a row or tile that is far off."
    )
    return text + (f" {given} have scales that were given, not computed." if given else "")


def _accumulator(d: Diagnosis) -> str:
    used = dict.fromkeys(g.in_use.machine for g in d.gemms)
    worst = max(d.gemms, key=lambda g: _or_zero(g.in_use.error), default=None)
    if worst is None:
        return "No GEMM was seen."
    return (
        f"Ran with {', '.join(used)}: at most {worst.in_use.error:.2g} % error from adding up "
        f"({worst.name}). Tried with {d.machine}: {_worst_run(d, PROMOTED_EVERY)} promoted every "
        f"{PROMOTED_EVERY}, {_worst_run(d, None)} never promoted."
    )


def _worst_run(d: Diagnosis, interval: int | None) -> str:
    return f"{max((_or_zero(g.run(interval).error) for g in d.gemms), default=0.0):.2g} %"


def _depth(d: Diagnosis) -> str:
    if not d.gemms:
        return "No GEMM was seen."
    deepest = max(d.gemms, key=lambda g: g.k)
    never = deepest.run(None)
    return (
        f"The longest sums have K = {deepest.k:,} ({deepest.name}). On {d.machine}, never "
        f"promoted, they are {never.error:.2g} % off, with a bias of {never.bias:+.2g} %."
    )


def _comparison(d: Diagnosis) -> str:
    known = [g for g in d.gemms if not math.isnan(g.quantization.evened)]
    if not known:
        return "Operands were FP8 already, so there is nothing to compare with."
    g = max(known, key=lambda g: g.quantization.evened)
    parts = (
        f"The worst GEMM is {g.name}: an average row is {g.quantization.evened:.3g} % off, where "
        f"well scaled data have {g.expected:.3g} %; finer scales would save {g.granularity:.2g} "
        f"points, adding up costs {g.in_use.error:.2g} %."
    )
    return parts + _where(d, g)


def _where(d: Diagnosis, g: GemmStats) -> str:
    own = [t for t in d.tensors if t.layer == g.layer and g.direction in t.directions]
    known = [t for t in own if not math.isnan(t.worst_row_percent)]
    if not known:
        return ""
    t = max(known, key=lambda t: t.row_rms_percent)
    return (
        f" It sits in {t.name}: row {t.worst_row} is {t.worst_row_percent:.3g} % off, the tile at "
        f"row {t.worst_tile[0]}, k {t.worst_tile[1]} is {t.worst_tile_percent:.3g} % off."
    )


def _or_zero(x: float) -> float:
    return 0.0 if math.isnan(x) else x


_STEPS: tuple[tuple[str, Callable[[Diagnosis], str]], ...] = (
    ("Scale factors: does every tensor fit its format?", _scales),
    ("Accumulator: how are products added up?", _accumulator),
    ("Depth: how long are the sums?", _depth),
    ("Comparison: how far off is the result, and where?", _comparison),
)
