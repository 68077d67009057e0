"""A diagnosis on a terminal: verdicts, the checklist, then tables of tensors and GEMMs."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jax_fp8.diagnosis.checklist import checklist, order_tensors
from jax_fp8.diagnosis.gemm_stats import PROMOTED_EVERY, GemmStats
from jax_fp8.diagnosis.stats import TensorStats
from jax_fp8.diagnosis.verdicts import several

if TYPE_CHECKING:
    from jax_fp8.diagnosis.diagnose import Diagnosis

__all__ = ["TENSOR_COLUMNS", "as_text", "gemm_cells", "number", "renderables"]

#: Rows of a table on a terminal; HTML and JSON have all.
MAX_ROWS: Final = 15
STYLES: Final = {"bad": "bold red", "warn": "yellow", "ok": "", "info": "cyan"}
#: Heading, and attribute of `TensorStats`.
TENSOR_COLUMNS: Final = (
    ("amax", "amax"),
    ("scale", "scale_max"),
    ("headroom, bits", "headroom_bits"),
    ("flushed %", "flushed_percent"),
    ("subnormal %", "subnormal_percent"),
    ("saturated %", "saturated_percent"),
    ("range, bits", "tile_range_bits"),
    ("SQNR, dB", "sqnr_db"),
    ("SQNR to expected, dB", "sqnr_gap_db"),
    ("worst row %", "worst_row_percent"),
    ("worst tile %", "worst_tile_percent"),
    ("outlier channels", "outlier_channels"),
    ("kurtosis", "kurtosis"),
    ("bias %", "bias_percent"),
    ("non-finite", "non_finite"),
    ("zero tiles", "zero_tiles"),
)
#: Those with room on a terminal.
ON_TERMINAL: Final = {
    "headroom_bits", "flushed_percent", "subnormal_percent", "saturated_percent", "sqnr_gap_db",
    "worst_row_percent", "worst_tile_percent", "outlier_channels", "non_finite",
}  # fmt: skip
GEMM_COLUMNS: Final = (
    "GEMM", "M×N×K", "error %", "average row %", "expected %", "finer scales save",
    "sums as run %", f"promoted {PROMOTED_EVERY} %", "never promoted %", "promote every",
    "cheapest good recipe",
)  # fmt: skip


def as_text(d: Diagnosis, width: int = 140) -> str:
    """The report as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False)
    console.print(*renderables(d), sep="\n")
    return out.getvalue()


def renderables(d: Diagnosis) -> Iterator[Any]:
    """Parts of the report for a rich console, the most important first."""
    yield Text("Where FP8 hurts", style="bold")
    yield _verdict_table(d)
    yield _checklist_table(d)
    yield _tensor_table(d)
    yield _gemm_table(d)
    worst = worst_gemm(d)
    if worst is not None and worst.what_if:
        yield what_if_table(worst)
    for notice in d.notices:
        yield Text(f"Note: {notice}")
    if not d.differentiated:
        yield Text("Note: the function is no scalar loss, so only its own GEMMs were seen.")


def worst_gemm(d: Diagnosis) -> GemmStats | None:
    """The GEMM whose average row is farthest off."""
    known = [g for g in d.gemms if not math.isnan(g.quantization.evened)]
    return max(known, key=lambda g: g.quantization.evened, default=None)


def _verdict_table(d: Diagnosis) -> Table:
    table = Table("", "where", "what", "remedy", title="Verdicts", show_lines=True)
    for v in d.verdicts:
        where = v.subject + (f"\nalso {several(v.also)}" if v.also else "")
        table.add_row(Text(v.severity.upper(), style=STYLES[v.severity]), where, v.cause, v.remedy)
    if not d.verdicts:
        table.add_row("OK", "all", "nothing is out of its limits", "")
    return table


def _checklist_table(d: Diagnosis) -> Table:
    table = Table("", "step", "", title="Checklist", show_lines=True)
    for index, step in enumerate(checklist(d), start=1):
        mark = Text(step.level.upper(), style=STYLES[step.level])
        table.add_row(mark, f"{index}. {step.title}", step.answer)
    return table


def _tensor_table(d: Diagnosis) -> Table:
    shown = order_tensors(d.tensors)[:MAX_ROWS]
    title = f"Tensors, the worst first ({len(shown)} of {len(d.tensors)})"
    table = Table(title=title)
    table.add_column("tensor", overflow="fold", min_width=30)
    table.add_column("format, scale per")
    keep = [c for c in TENSOR_COLUMNS if c[1] in ON_TERMINAL]
    for heading, _ in keep:
        table.add_column(heading, justify="right", overflow="fold")
    for t in shown:
        levels = t.levels()
        cells = [_cell(t, column, levels.get(column, "ok")) for _, column in keep]
        table.add_row(t.name, f"{t.format}, {t.scale_kind}", *cells)
    return table


def _cell(t: TensorStats, column: str, level: str) -> Text:
    marks = {"bad": " !!", "warn": " !", "ok": ""}
    return Text(number(getattr(t, column)) + marks[level], style=STYLES[level])


def _gemm_table(d: Diagnosis) -> Table:
    order = sorted(d.gemms, key=lambda g: -_or_zero(g.quantization.evened))[:MAX_ROWS]
    title = f"GEMMs, the worst first ({len(order)} of {len(d.gemms)}); sums on {d.machine}"
    table = Table(title=title)
    for heading in GEMM_COLUMNS:
        is_name = heading == "GEMM"
        table.add_column(
            heading,
            justify="left" if is_name else "right",
            overflow="fold",
            min_width=30 if is_name else None,
        )
    for g in order:
        table.add_row(*gemm_cells(g))
    return table


def gemm_cells(g: GemmStats) -> list[str]:
    """Cells under `GEMM_COLUMNS`."""
    batch = f"{g.batch}·" if g.batch > 1 else ""
    return [
        g.name,
        f"{batch}{g.m}×{g.n}×{g.k}",
        number(g.total.frobenius),
        number(g.quantization.evened),
        number(g.expected),
        number(g.granularity),
        number(g.in_use.error),
        number(g.run(PROMOTED_EVERY).error),
        number(g.run(None).error),
        "not needed" if g.promote_every is None else str(g.promote_every),
        g.cheapest,
    ]


def what_if_table(g: GemmStats) -> Table:
    """Recipes tried on one GEMM."""
    table = Table("recipe", title=f"What if: {g.name}")
    for heading in ("error %", "average row %", "median result %", "flushed %", "extra bytes"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in g.what_if:
        cells = map(number, (row.error, row.evened, row.median, row.flushed_percent))
        mark = "cheapest within 1.2 times the best" if row.recipe == g.cheapest else ""
        table.add_row(row.recipe, *cells, f"{row.extra_bytes:,}", mark)
    return table


def number(x: float) -> str:
    """Three digits, "?" for unknown.

    >>> number(3.14159), number(0.00001), number(1234567), number(float("nan"))
    ('3.14', '1e-05', '1.23e+06', '?')
    """
    if isinstance(x, float) and math.isnan(x):
        return "?"
    if x == 0 or abs(x) < 5e-7:
        return "0"
    return f"{x:.3g}" if abs(x) < 1e5 else f"{x:.2e}"


def _or_zero(x: float) -> float:
    return 0.0 if math.isnan(x) else x
