"""The pictures of the report as inline SVG, coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from jax_fp8 import formats
from jax_fp8.diagnosis.stats import TensorStats

__all__ = [
    "HEAT_LIMITS",
    "error_curve",
    "exponent_histogram",
    "heat_map",
    "row_error_curves",
    "step_curves",
]

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 14, 44
#: Per cent of error from which on a cell has the next colour.
HEAT_LIMITS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class _Axes:
    """A frame with a mapping from data to the picture."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x_range, self.y_range = x, y
        self.parts: list[str] = []

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / max(high - low, 1e-12) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / max(high - low, 1e-12) * (HEIGHT - TOP - BOTTOM)

    def zone(self, low: float, high: float, name: str, label: str = "") -> None:
        start, end = (self.x(min(max(v, self.x_range[0]), self.x_range[1])) for v in (low, high))
        if end - start < 0.5:
            return
        height = HEIGHT - TOP - BOTTOM
        self.parts.append(
            f'<rect class="{name}" x="{start:.1f}" y="{TOP}" width="{end - start:.1f}" '
            f'height="{height}"/>'
        )
        if label and end - start > 6.4 * len(label):
            self.text((start + end) / 2, TOP + 13, label, "middle")

    def text(self, x: float, y: float, words: str, anchor: str = "start", name: str = "") -> None:
        own = f' class="{name}"' if name else ""
        self.parts.append(
            f'<text{own} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], name: str) -> None:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline class="{name}" points="{path}"/>')

    def ticks_x(self, ticks: Sequence[tuple[float, str]], title: str) -> None:
        for value, label in ticks:
            self.text(self.x(value), HEIGHT - BOTTOM + 16, label, "middle")
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, title, "middle")

    def ticks_y(self, ticks: Sequence[tuple[float, str]]) -> None:
        for value, label in ticks:
            y = self.y(value)
            self.parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            self.text(LEFT - 5, y + 4, label, "end")

    def svg(self, label: str) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
            f"{''.join(self.parts)}</svg>"
        )


def exponent_histogram(t: TensorStats) -> str:
    """How many values have which exponent after scaling, over what the format can hold."""
    fmt = formats.lookup(t.format)
    counts = t.plots.scaled_exponents
    total = max(sum(counts.values()), 1)
    lowest, top = math.log2(fmt.smallest_subnormal), math.log2(fmt.max)
    normal = math.log2(fmt.smallest_normal)
    low = max(min([*counts, lowest - 3]), -60)
    high = min(max([*counts, math.floor(top)]) + 1, 60)
    axes = _Axes((low, high), (0.0, math.sqrt(max(counts.values(), default=1) / total) * 1.15))
    # Half of the smallest subnormal is where rounding to zero begins.
    axes.zone(low, lowest - 1, "flush", "to zero")
    axes.zone(lowest - 1, normal, "subnormal", "subnorm.")
    axes.zone(normal, top, "window", f"{t.format.upper()} normal")
    axes.zone(top, high, "saturated", "saturates")
    peak = axes.y_range[1] ** 2 / 1.3
    axes.ticks_y([(math.sqrt(v), f"{100 * v:.2g} %") for v in (peak, peak / 4, peak / 25)])
    for exponent, count in counts.items():
        if low <= exponent < high:
            left, right = axes.x(exponent), axes.x(exponent + 1)
            up = axes.y(math.sqrt(count / total))
            axes.parts.append(
                f'<rect class="bar" x="{left + 0.5:.1f}" y="{up:.1f}" '
                f'width="{max(right - left - 1, 0.8):.1f}" height="{HEIGHT - BOTTOM - up:.1f}">'
                f"<title>2^{exponent}: {100 * count / total:.3g} %</title></rect>"
            )
    step = max(1, round((high - low) / 6))
    ticks = [(float(e), f"{e}") for e in range(math.ceil(low), math.floor(high) + 1, step)]
    axes.ticks_x(ticks, "log2 |x / scale|; shares on a square-root scale")
    return axes.svg(f"Exponents of {t.name} and the window of {t.format}")


def heat_map(t: TensorStats) -> str:
    """Error of the pieces of a tensor, a colour per factor of two."""
    cells = t.plots.error_map
    rows, columns = len(cells), len(cells[0]) if cells else 0
    if not rows or not columns:
        return ""
    wide, high = (WIDTH - LEFT - RIGHT) / columns, (HEIGHT - TOP - BOTTOM) / rows
    paths: dict[int, list[str]] = {}
    for i, row in enumerate(cells):
        for j, error in enumerate(row):
            bucket = sum(error >= limit for limit in HEAT_LIMITS)
            paths.setdefault(bucket, []).append(f"M{LEFT + j * wide:.1f},{TOP + i * high:.1f}")
    box = f"h{wide + 0.15:.2f}v{high + 0.15:.2f}h-{wide + 0.15:.2f}z"
    axes = _Axes((0, t.k), (t.rows_seen, 0))
    for bucket, starts in sorted(paths.items()):
        axes.parts.append(f'<path class="h{bucket}" d="{"".join(s + box for s in starts)}"/>')
    middle = t.k // 2
    axes.ticks_x([(0.0, "0"), (float(middle), f"{middle}"), (float(t.k), f"{t.k}")], "k")
    for value in (0, t.rows_seen):
        axes.text(LEFT - 5, axes.y(value) + (9 if value == 0 else 0), f"{value}", "end")
    axes.text(LEFT - 5, (TOP + HEIGHT - BOTTOM) / 2, "row", "end")
    return axes.svg(f"Error of the pieces of {t.name}")


def error_curve(points: Sequence[tuple[int, float, float]], machine: str) -> str:
    """Error of sums against their length, never promoted and promoted, the user's K marked."""
    floor = 1e-4
    xs = [math.log2(k) for k, _, _ in points]
    values = [max(v, floor) for _, a, b in points for v in (a, b) if not math.isnan(v)]
    if not values:
        return ""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    axes = _Axes((min(xs) - 0.3, max(xs) + 0.5), (low, max(high, low + 1)))
    axes.ticks_y([(float(e), f"{10.0**e:g} %") for e in range(low, max(high, low + 1) + 1)])
    step = -(-len(points) // 6)
    shown = [*range(0, len(points) - step, step), len(points) - 1]
    axes.ticks_x([(xs[i], f"{points[i][0]}") for i in shown], f"K; sums on {machine}")
    here = axes.x(xs[-1])
    axes.parts.append(
        f'<line class="mark" x1="{here:.1f}" x2="{here:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    )
    axes.text(here - 4, TOP + 10, "your K", "end")
    for index, name in ((1, "never"), (2, "promoted")):
        curve = [
            (x, math.log10(max(p[index], floor)))
            for x, p in zip(xs, points, strict=True)
            if not math.isnan(p[index])
        ]
        axes.line(curve, name)
        axes.parts += [
            f'<circle class="{name}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3"/>'
            for x, y in curve
        ]
    return axes.svg("Error of the sums against K")


def row_error_curves(curves: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Share of rows that are off by at most so much, a line for each tensor or GEMM."""
    floor = 0.1
    curves = [(name, [v for v in values if math.isfinite(v)]) for name, values in curves]
    largest = max((max(values) for _, values in curves if values), default=1.0)
    high = math.log10(max(largest, 10.0)) + 0.05
    axes = _Axes((math.log10(floor), high), (0.0, 100.0))
    axes.ticks_y([(float(v), f"{v} %") for v in (0, 25, 50, 75, 100)])
    ticks = [v for v in (0.1, 0.3, 1, 3, 10, 30, 100, 300) if math.log10(v) <= high]
    axes.ticks_x([(math.log10(v), f"{v:g}") for v in ticks], "error of a row in %; share of rows")
    for number, (_, values) in enumerate(curves):
        count = max(len(values), 1)
        points = [
            (math.log10(max(v, floor)), 100 * (i + 1) / count) for i, v in enumerate(sorted(values))
        ]
        axes.line(
            [(points[0][0], 0.0), *points, (high, 100.0)] if points else [], f"line s{number}"
        )
    return axes.svg("Distribution of row errors")


def step_curves(steps: Sequence[int], curves: Sequence[Sequence[tuple[float, float]]]) -> str:
    """log2 of amax over steps, a line for each tensor."""
    values = [y for curve in curves for _, y in curve]
    if not values:
        return ""
    low, high = math.floor(min(values)), math.floor(max(values)) + 1
    axes = _Axes((float(steps[0]), float(max(steps[-1], steps[0] + 1))), (low, high))
    every = max(1, round((high - low) / 5))
    axes.ticks_y([(float(e), f"2^{e}") for e in range(low, high + 1, every)])
    shown = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    axes.ticks_x([(float(step), f"{step}") for step in shown], "step; amax")
    for number, curve in enumerate(curves):
        axes.line(curve, f"line s{number}")
    return axes.svg("amax over steps")
