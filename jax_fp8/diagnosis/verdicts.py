"""From figures to sentences: what is wrong, why, and what to change, the worst first.

Each rule is tied to a cause that it recognises in a tensor or a GEMM, and to the remedy that the
what-if of that GEMM measured. Verdicts of the same rule and role are one: its worst tensor speaks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

from jax_fp8 import formats
from jax_fp8.diagnosis.capture import LETTERS
from jax_fp8.diagnosis.gemm_stats import PROMOTED_EVERY, GemmStats
from jax_fp8.diagnosis.stats import TensorStats
from jax_fp8.diagnosis.what_if import BFLOAT16_GRADIENT, CALLS, GOOD_ENOUGH, WhatIf, cheapest
from jax_fp8.emulation.machines import MACHINES

__all__ = ["Study", "Verdict", "judge", "several"]

Severity = Literal["bad", "warn", "info"]
_Maker = Callable[..., "Verdict"]

_ORDER: Final = ("bad", "warn", "info")
#: A spike stands so far above the median, in at most so many rows, or per cent of the rows.
SPIKE_RATIO, SPIKE_ROWS, SPIKE_ROWS_PERCENT = 1e3, 2, 2.0
#: Rows whose amax differ by so many bits leave a shared E4M3 scale (18 binades) too few for some.
ROW_SPREAD_BITS: Final = 9.0
#: Outlier channels are few; beyond this share of them they are the data.
MAX_OUTLIER_SHARE: Final = 0.25
#: Accumulation errors, or biases, in per cent: worth a word, and bad.
ACCUMULATION_WARN, ACCUMULATION_BAD = 0.25, 1.0
#: E4M3 holds 18 binades; data within 16 of them does not need E5M2's range.
E4M3_RANGE_BITS: Final = 16.0


@dataclasses.dataclass(frozen=True)
class Study:
    """A GEMM with its two operands."""

    gemm: GemmStats
    lhs: TensorStats
    rhs: TensorStats


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is wrong with a tensor or a GEMM, and what to do.

    Attributes:
      severity: "bad", "warn" or "info".
      rule: name of the rule.
      step: step of the checklist: 1 scales, 2 accumulator, 3 depth of K, 4 comparison.
      layer: the worst layer.
      tensor: "x", "w" or "g", or "" where it is about a GEMM.
      direction: "forward", "dgrad", "wgrad", or several.
      cause: a sentence with the figures that show it.
      remedy: what to change.
      score: larger is worse, among verdicts of one severity.
      also: other layers with the same verdict.
    """

    severity: Severity
    rule: str
    step: int
    layer: str
    tensor: str
    direction: str
    cause: str
    remedy: str
    score: float
    also: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """Layer, tensor and direction."""
        return " ".join(p for p in (self.layer, self.tensor, f"({self.direction})") if p)

    def __str__(self) -> str:
        also = f" Also in {several(self.also)}." if self.also else ""
        return f"{self.severity.upper()} {self.subject}: {self.cause} → {self.remedy}{also}"


def judge(studies: Sequence[Study], loose: Sequence[TensorStats] = ()) -> tuple[Verdict, ...]:
    """Verdicts on all GEMMs and tensors, ranked, one for each rule and role."""
    found: list[Verdict] = []
    for study in studies:
        for tensor in (study.lhs, study.rhs):
            found += _judge_tensor(tensor, study.gemm)
        found += _judge_gemm(study.gemm)
    for tensor in loose:
        found += _judge_tensor(tensor, None)
    found += _judge_granularity([study.gemm for study in studies])
    return _merge(found)


def _merge(found: Sequence[Verdict]) -> tuple[Verdict, ...]:
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in found:
        groups.setdefault((verdict.rule, verdict.tensor), []).append(verdict)
    merged = []
    for group in groups.values():
        worst = min(group, key=_rank)
        others = dict.fromkeys(v.layer for v in group if v.layer != worst.layer)
        merged.append(dataclasses.replace(worst, also=tuple(others)))
    return tuple(sorted(merged, key=_rank))


def _rank(verdict: Verdict) -> tuple[int, float]:
    return _ORDER.index(verdict.severity), -verdict.score


# --- Tensors --------------------------------------------------------------------------------------


def _judge_tensor(t: TensorStats, gemm: GemmStats | None) -> Iterator[Verdict]:
    levels = t.levels()
    damaged = [
        column
        for column in ("saturated_percent", "flushed_percent", "subnormal_percent",
                       "worst_row_percent", "worst_tile_percent", "sqnr_gap_db")
        if levels.get(column, "ok") != "ok"
    ]  # fmt: skip
    severity: Severity = "bad" if any(levels[column] == "bad" for column in damaged) else "warn"

    def verdict(rule: str, cause: str, remedy: str, severity: Severity = severity) -> Verdict:
        score = max(x for x in (t.row_rms_percent, t.saturated_percent, 0.0) if not math.isnan(x))
        if t.non_finite:
            score = 1e6
        directions = ", ".join(t.directions)
        return Verdict(
            severity, rule, 1, t.layer, LETTERS[t.role], directions, cause, remedy, score
        )

    if t.non_finite:
        cause = f"{t.non_finite} values are NaN or infinite before they are quantised"
        remedy = "find where they arise (jax.config.update('jax_debug_nans', True)); FP8 hides none"
        yield verdict("non_finite", cause, remedy, "bad")
    if t.given_scale:
        yield from _judge_given_scale(t, gemm, bool(damaged), verdict)
    elif gemm is not None:
        yield from _judge_computed_scale(t, gemm, bool(damaged), verdict)
    if t.role != "gradient" and t.format == "e5m2" and t.core_range_bits < E4M3_RANGE_BITS:
        yield verdict(
            "coarse_format",
            f"E5M2 holds {_size(t.core_range_bits)} bits of range that E4M3 would hold, too, with "
            "one more bit of precision",
            f"{t.role}_format=E4M3FN halves the rounding error",
            "warn",
        )
    if levels.get("bias_percent") == "bad" and not damaged:
        yield verdict(
            "bias",
            f"rounding moves magnitudes by {t.bias_percent:.2g} % on average",
            'rounding="stochastic" is unbiased for gradients; else a finer scale',
            "warn",
        )


def _judge_given_scale(
    t: TensorStats, gemm: GemmStats | None, damaged: bool, verdict: _Maker
) -> Iterator[Verdict]:
    fmt = formats.lookup(t.format)
    if not damaged:
        return
    call = _call(gemm.cheapest) if gemm is not None and gemm.cheapest else "TensorScaling()"
    better = f" ({_row(gemm, gemm.cheapest).evened:.2g} % error)" if gemm and gemm.cheapest else ""
    computed = f"amax / {fmt.max:g} = {t.amax / fmt.max:.3g}"
    if t.saturated_percent > 0 and t.floor_rule:
        yield verdict(
            "mx_floor",
            f"{_size(t.saturated_percent)} % saturate: scales follow the MX specification's floor "
            f"rule, 2^(floor(log2 amax) - {int(math.log2(fmt.max))})",
            f"round scales up, 2^ceil(log2(amax / {fmt.max:g})), as MXScaling() does",
        )
    elif t.saturated_percent > 0:
        yield verdict(
            "static_saturates",
            f"{_size(t.saturated_percent)} % saturate under the given scale {_range(t)}: amax is "
            f"{t.amax:.3g}, the largest code stands for {fmt.max * t.scale_max:.3g}; row "
            f"{t.worst_row} is {t.worst_row_percent:.0f} % off",
            f"compute the scale from amax ({computed}): use {call}{better}",
        )
    else:
        shares = _lost(t)
        yield verdict(
            "static_flushes",
            f"{shares} under the given scale {_range(t)}, which leaves {t.headroom_bits:.0f} bits "
            "unused above amax",
            f"compute the scale from amax ({computed}): use {call}{better}",
        )


def _judge_computed_scale(
    t: TensorStats, gemm: GemmStats, damaged: bool, verdict: _Maker
) -> Iterator[Verdict]:
    if not gemm.what_if:
        return
    best = _best(gemm)
    gains = gemm.quantization.evened > GOOD_ENOUGH * best
    shared_rows, whole_k = t.tile[0] > 1, t.tile[1] >= t.k
    few = 0 < t.steady_channels <= MAX_OUTLIER_SHARE * t.k
    if few and whole_k and gains:
        recipe = cheapest(gemm.what_if, along_k=True)
        if recipe and _row(gemm, recipe).evened * GOOD_ENOUGH < gemm.quantization.evened:
            yield verdict(
                "outlier_channels",
                f"{t.steady_channels} of {t.k} channels are 20 times the median one in most rows "
                f"and set the scale of all; {_lost(t)}",
                _use(gemm, recipe, "scales for every 128 along k keep them apart"),
                "bad" if t.flushed_percent > 1 and t.role != "gradient" else "warn",
            )
            return
    if not (damaged and gains):
        return
    recipe = gemm.cheapest
    if shared_rows and _has_spike(t):
        yield verdict(
            "spike",
            f"{_lost(t)}: a spike of {t.amax:.3g} is {t.spike_ratio:.2g} times the median and sets "
            "the scale of all",
            _use(gemm, recipe, "a spike then spoils its own row only"),
        )
    elif shared_rows and t.row_spread_bits > ROW_SPREAD_BITS:
        yield verdict(
            "row_spread",
            f"{_lost(t)}: rows differ by {t.row_spread_bits:.0f} bits and share a scale; the worst "
            f"row, {t.worst_row}, is {t.worst_row_percent:.0f} % off",
            _use(gemm, recipe, "small rows keep their bits"),
        )
    elif recipe:
        expected = 100 * 10 ** ((t.sqnr_gap_db - t.sqnr_db) / 20)
        yield verdict(
            "range",
            f"{_lost(t)}: {t.tile_range_bits:.0f} bits of range under one scale",
            _use(gemm, recipe, "smaller tiles have less range"),
            *(() if t.row_rms_percent > 2 * expected else ("warn",)),
        )


def _has_spike(t: TensorStats) -> bool:
    """Whether a few values in a few rows stand far above all others."""
    few = t.spike_rows_percent <= max(SPIKE_ROWS_PERCENT, 100 * SPIKE_ROWS / max(t.rows_seen, 1))
    return few and t.spike_ratio > SPIKE_RATIO


def _lost(t: TensorStats) -> str:
    parts = [
        f"{_size(value)} % {word}"
        for value, word in (
            (t.flushed_percent, "flush to zero"),
            (t.subnormal_percent, "are subnormal"),
        )
        if value >= 0.01
    ]
    return " and ".join(parts) or f"rows are {t.row_rms_percent:.1f} % off"


def _use(gemm: GemmStats, recipe: str, why: str) -> str:
    row = _row(gemm, recipe)
    return (
        f"use {_call(recipe)}: {why} ({gemm.quantization.evened:.2g} → {row.evened:.2g} % error of "
        "an average row of the result)"
    )


# --- GEMMs ----------------------------------------------------------------------------------------


def _judge_gemm(g: GemmStats) -> Iterator[Verdict]:
    def verdict(severity: Severity, rule: str, step: int, cause: str, remedy: str) -> Verdict:
        score = max(g.in_use.error, abs(g.in_use.bias), 0.0)
        return Verdict(severity, rule, step, g.layer, "", g.direction, cause, remedy, score)

    used, never, promoted = g.in_use, g.run(None), g.run(PROMOTED_EVERY)
    machine = MACHINES[used.machine]
    size = max(used.error, abs(used.bias))
    if math.isnan(used.error) and not math.isnan(g.runs[0].error):
        remedy = "use an FP32 accumulator, or smaller codes (scale amax / 3.5)"
        yield verdict("bad", "overflow", 2, f"sums overflow in {used.machine}", remedy)
    elif size > ACCUMULATION_WARN and machine.is_short:
        is_deep = used.interval is None
        yield verdict(
            "bad" if size > ACCUMULATION_BAD else "warn",
            "not_promoted" if is_deep else "short_accumulator",
            3 if is_deep else 2,
            f"K = {g.k:,} added up by {used.machine} {_interval(used.interval)}: "
            f"{used.error:.2g} % error, {used.bias:+.2g} % bias",
            f"promotion_interval={PROMOTED_EVERY} has {promoted.error:.2g} %",
        )
    elif max(never.error, abs(never.bias)) > ACCUMULATION_WARN and never.interval is None:
        yield verdict(
            "info",
            "promote",
            3,
            f"K = {g.k:,}: on {never.machine}, never promoted, expect {never.error:.2g} % error "
            f"and {never.bias:+.2g} % bias",
            f"promote every {PROMOTED_EVERY} there ({promoted.error:.2g} %)",
        )
    own = math.hypot(g.quantization.frobenius, used.error)
    if not math.isnan(own) and g.total.frobenius > 1.5 * own + 0.5:
        yield verdict(
            "bad",
            "not_its_codes",
            4,
            f"the result is {g.total.frobenius:.2g} % off, its codes and sums explain {own:.2g} %",
            "compare the kernel: fp8.force_kernel('scalar'); please report it",
        )


def _judge_granularity(gemms: Sequence[GemmStats]) -> Iterator[Verdict]:
    known = [g for g in gemms if g.what_if]
    flat = [g for g in known if g.cheapest == "tensor"]
    if not flat:
        return
    worst = max(flat, key=lambda g: _row(g, "tensor").evened)
    best = _best(worst)
    share = "all GEMMs" if len(flat) == len(known) else f"{len(flat)} of {len(known)} GEMMs"
    yield Verdict(
        "info",
        "granularity_buys_nothing",
        1,
        worst.layer,
        "",
        worst.direction,
        f"granularity buys nothing in {share}: at worst {_row(worst, 'tensor').evened:.3g} % with "
        f"one scale per tensor, {best:.3g} % with the finest",
        "TensorScaling() is good enough there, and cheapest",
        0.0,
        tuple(dict.fromkeys(g.layer for g in flat if g.layer != worst.layer)),
    )


# --- Words ----------------------------------------------------------------------------------------


def _row(gemm: GemmStats, recipe: str) -> WhatIf:
    return next(row for row in gemm.what_if if row.recipe == recipe)


def _best(gemm: GemmStats) -> float:
    return min(row.evened for row in gemm.what_if if row.recipe != BFLOAT16_GRADIENT)


def _call(recipe: str) -> str:
    return CALLS[recipe]


def _interval(interval: int | None) -> str:
    return "never promoted" if interval is None else f"promoted every {interval}"


def _range(t: TensorStats) -> str:
    if t.scale_min == t.scale_max:
        return f"{t.scale_max:.3g}"
    return f"{t.scale_min:.3g} to {t.scale_max:.3g}"


def _size(percent: float) -> str:
    return f"{percent:.0f}" if percent >= 9.95 else f"{percent:.2g}"


def several(layers: Sequence[str], most: int = 4) -> str:
    """A list of names, cut after some."""
    shown = ", ".join(layers[:most])
    return f"{shown} and {len(layers) - most} more" if len(layers) > most else shown
