"""What `watch` saw over the steps of a run, as sections of the HTML report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from jax_fp8.diagnosis import svg

__all__ = ["History", "amax_curves", "flush_map", "read_history"]

#: Columns of the map, and curves: more steps or tensors are thinned out, the worst are kept.
MAX_STEPS, MAX_TENSORS = 24, 6
#: Per cent of flushed values from which on a cell of the map has the next colour.
FLUSH_LIMITS: Final = (0.01, 0.1, 1.0, 5.0, 20.0, 50.0, 90.0)

#: Steps that were sampled, and per tensor and statistic a value for each.
History = tuple[list[int], dict[str, dict[str, list[float]]]]


def read_history(records: Sequence[tuple[Any, Mapping[str, Any]]]) -> History:
    """Sorts (step, stats of `watch`) by tensor; steps that were not sampled are left out.

    >>> read_history([(0, {"sampled": 1.0, "up/forward/x/amax": 2.0}), (1, {"sampled": 0.0})])
    ([0], {'up/forward/x': {'amax': [2.0]}})
    """
    sampled = [(int(step), stats) for step, stats in records if float(stats["sampled"])]
    if len(sampled) > MAX_STEPS:
        chosen = [round(i * (len(sampled) - 1) / (MAX_STEPS - 1)) for i in range(MAX_STEPS)]
        sampled = [sampled[i] for i in chosen]
    found: dict[str, dict[str, list[float]]] = {}
    for _, stats in sampled:
        for name, value in stats.items():
            tensor, _, statistic = name.rpartition("/")
            if tensor:
                found.setdefault(tensor, {}).setdefault(statistic, []).append(float(value))
    return [step for step, _ in sampled], found


def flush_map(history: History) -> str:
    """A table of tensors × steps: per cent of the values that became zero, worst tensors first."""
    steps, tensors = history
    order = sorted(tensors, key=lambda name: -max(tensors[name].get("flushed_percent", [0.0])))
    rows = []
    for name in order:
        cells = []
        saturated = tensors[name].get("saturated_percent", [0.0] * len(steps))
        for value, above in zip(tensors[name]["flushed_percent"], saturated, strict=True):
            bucket = sum(value >= limit for limit in FLUSH_LIMITS)
            mark = " ▲" if above > 0 else ""
            shown = "0" if value == 0 else "<.01" if value < 0.01 else f"{value:.2g}"
            cells.append(f'<td class="{f"heat h{bucket}" if bucket else ""}">{shown}{mark}</td>')
        label = escape(name).replace("/", "/<wbr/>")
        rows.append(f"<tr><th>{label}</th>{''.join(cells)}</tr>")
    head = "".join(f"<th>{step}</th>" for step in steps)
    return (
        '<div class="scroll"><table class="map steps"><thead><tr><th>tensor, step</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def amax_curves(history: History) -> tuple[str, list[str]]:
    """log2 of amax over the steps, for the tensors in which it moves most; and their names."""
    steps, tensors = history

    def movement(name: str) -> float:
        values = [v for v in tensors[name].get("amax", []) if v > 0 and math.isfinite(v)]
        return math.log2(max(values) / min(values)) if values else 0.0

    names = sorted(tensors, key=lambda name: -movement(name))[:MAX_TENSORS]
    curves = [
        [
            (float(step), math.log2(v))
            for step, v in zip(steps, tensors[name].get("amax", []), strict=True)
            if v > 0 and math.isfinite(v)
        ]
        for name in names
    ]
    return svg.step_curves(steps, curves), names
