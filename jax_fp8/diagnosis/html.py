"""A diagnosis as one HTML file: no script, no network, readable on a phone, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from jax_fp8.diagnosis import svg
from jax_fp8.diagnosis.checklist import checklist, order_tensors
from jax_fp8.diagnosis.gemm_stats import PROMOTED_EVERY, GemmStats
from jax_fp8.diagnosis.history import FLUSH_LIMITS, amax_curves, flush_map, read_history
from jax_fp8.diagnosis.report import (
    GEMM_COLUMNS,
    TENSOR_COLUMNS,
    gemm_cells,
    number,
    worst_gemm,
)
from jax_fp8.diagnosis.stats import TensorStats
from jax_fp8.diagnosis.style import STYLE
from jax_fp8.diagnosis.verdicts import Verdict, several

if TYPE_CHECKING:
    from jax_fp8.diagnosis.diagnose import Diagnosis

__all__ = ["as_html"]

#: Tensors with pictures, and lines in the picture of row errors.
PICTURES: Final = 6
#: Columns of the flush map: role, direction, heading.
FLUSH_COLUMNS: Final = (
    ("input", "forward", "x forward"),
    ("weight", "forward", "w forward"),
    ("gradient", "dgrad", "g dgrad"),
    ("weight", "dgrad", "w dgrad"),
    ("input", "wgrad", "x wgrad"),
    ("gradient", "wgrad", "g wgrad"),
)
_WORDS: Final = {"bad": "Bad", "warn": "Warning", "info": "Good to know", "ok": "OK"}


def as_html(d: Diagnosis, records: Sequence[tuple[Any, Mapping[str, Any]]] = ()) -> str:
    """The whole page; `records` are (step, stats of `watch`)."""
    tensors = order_tensors(d.tensors)
    sections = [
        _head(d),
        _verdicts(d.verdicts),
        _checklist(d),
        _section("Flushed to zero, by layer and tensor", _flush_map(d.tensors), _FLUSH_HELP),
        _over_steps(records),
        _section("The worst tensors", _pictures(tensors[:PICTURES]), _PICTURE_HELP),
        _section("Rows", _row_curves(d, tensors), _ROWS_HELP),
        _section("Sums against their length", _curves(d), _curve_help(d)),
        _what_if(worst_gemm(d)),
        _section("All tensors", _tensor_table(tensors), _TENSOR_HELP),
        _section("All GEMMs", _gemm_table(d.gemms), _GEMM_HELP),
        _notices(d),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>Where FP8 hurts</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


_FLUSH_HELP: Final = (
    "Per cent of the nonzero values that FP8 rounds to zero. Empty: this product takes no such "
    "tensor, or the same codes as another."
)
_PICTURE_HELP: Final = (
    "Left: what the format has to hold; what lies in the red zone on the left becomes zero, on the "
    "right it saturates. Right: error of pieces of the tensor in per cent of the piece."
)
_ROWS_HELP: Final = (
    "A norm over a whole tensor hides rows that are far off; here each row counts the same. A good "
    "E4M3 tensor rises at 2.7 %, an E5M2 one at 5.3 %."
)
_TENSOR_HELP: Final = (
    "One mark (!) is worth a look, two are bad. SQNR is compared with normal data under a good "
    "scale: 31.5 dB in E4M3, 25.6 dB in E5M2."
)
_GEMM_HELP: Final = (
    "Error of the result against the exact product of the unquantised operands, as a whole and of "
    "an average row; what finer scales would save of it; and, against the exact product of the "
    "codes, what adding up costs as it was run and on the emulated machine."
)


def _curve_help(d: Diagnosis) -> str:
    return (
        f"What adding up costs on {d.machine}, emulated on the first K products of your own "
        f"operands, never promoted and promoted every {PROMOTED_EVERY}; a scale per row. Against "
        "the exact product of the codes."
    )


def _section(title: str, body: str, help_text: str = "") -> str:
    if not body:
        return ""
    note = f'<p class="help">{escape(help_text)}</p>' if help_text else ""
    return f"<section><h2>{escape(title)}</h2>{note}{body}</section>\n"


def _head(d: Diagnosis) -> str:
    bad, warnings = (sum(v.severity == name for v in d.verdicts) for name in ("bad", "warn"))
    counts = ((bad, "bad"), (warnings, "warning" if warnings == 1 else "warnings"))
    found = ", ".join(f"{count} {word}" for count, word in counts if count) or "all is well"
    kind = "forward and both gradients" if d.differentiated else "as the function ran them"
    return (
        f"<header><h1>Where FP8 hurts</h1><p>{len(d.gemms)} FP8 GEMMs, {kind}; "
        f"{len(d.tensors)} quantised tensors: <strong>{found}</strong>.</p></header>\n"
    )


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return '<section class="card ok"><p>Nothing is out of its limits.</p></section>\n'
    cards = []
    for v in verdicts:
        also = f'<p class="also">Also in {escape(several(v.also, 8))}.</p>' if v.also else ""
        cards.append(
            f'<article class="card {v.severity}"><p class="tag">{_WORDS[v.severity]}</p>'
            f"<h3>{_breakable(v.subject)}</h3><p>{escape(_sentence(v.cause))}</p>"
            f'<p class="remedy">→ {escape(_sentence(v.remedy))}</p>{also}</article>'
        )
    return f'<section class="verdicts">{"".join(cards)}</section>\n'


def _checklist(d: Diagnosis) -> str:
    items = "".join(
        f'<li class="{step.level}"><strong>{escape(step.title)}</strong> '
        f'<span class="tag">{_WORDS[step.level]}</span><br/>{escape(step.answer)}</li>'
        for step in checklist(d)
    )
    return _section("Checklist", f"<ol>{items}</ol>")


def _flush_map(tensors: Sequence[TensorStats]) -> str:
    layers = list(dict.fromkeys(t.layer for t in tensors))
    columns = [
        column
        for column in FLUSH_COLUMNS
        if any(t.role == column[0] and column[1] in t.directions for t in tensors)
    ]
    if not columns:
        return ""
    cells = {(t.layer, t.role, way): t.flushed_percent for t in tensors for way in t.directions}
    rows = []
    for layer in layers:
        shown = []
        for role, way, _ in columns:
            value = cells.get((layer, role, way), math.nan)
            known = not math.isnan(value)
            bucket = sum(value >= limit for limit in FLUSH_LIMITS) if known else 0
            name = f"heat h{bucket}" if known and bucket else ""
            shown.append(f'<td class="{name}">{_percent(value) if known else ""}</td>')
        rows.append(f"<tr><th>{_breakable(layer)}</th>{''.join(shown)}</tr>")
    return _table(["layer", *(heading for _, _, heading in columns)], rows, "map")


def _over_steps(records: Sequence[tuple[Any, Mapping[str, Any]]]) -> str:
    history = read_history(records)
    if not history[0]:
        return ""
    picture, names = amax_curves(history)
    figure = (
        f"<figure><figcaption><strong>amax of the tensors in which it moves most</strong>"
        f"</figcaption>{picture}{_line_legend(names)}</figure>"
    )
    note = "Per cent of the values that became zero, by tensor and step; ▲: some saturated."
    return _section("Over the steps of the run", flush_map(history) + figure, note)


def _pictures(tensors: Sequence[TensorStats]) -> str:
    figures = []
    for t in tensors:
        facts = f"{t.format}, a scale per {t.scale_kind}, amax {number(t.amax)}"
        figures.append(
            f"<figure><figcaption><strong>{_breakable(t.name)}</strong><br/>{escape(facts)}; "
            f"worst row {t.worst_row}: {number(t.worst_row_percent)} % off</figcaption>"
            f'<div class="pair">{svg.exponent_histogram(t)}{svg.heat_map(t)}</div></figure>'
        )
    return "".join(figures) + (_heat_legend() if figures else "")


def _heat_legend() -> str:
    edges = ["0", *(f"{limit:g}" for limit in svg.HEAT_LIMITS)]
    boxes = "".join(f'<span class="heat h{i}">{edge}</span>' for i, edge in enumerate(edges))
    return f'<p class="legend">Error of a piece, from … %: {boxes}</p>'


def _row_curves(d: Diagnosis, tensors: Sequence[TensorStats]) -> str:
    groups: list[tuple[str, list[tuple[str, Sequence[float]]]]] = [
        ("Tensors", [(t.name, t.plots.row_errors) for t in tensors[:PICTURES]]),
        ("Results of GEMMs", [(g.name, g.row_errors) for g in _worst_gemms(d)]),
    ]
    figures = [
        f"<figure><figcaption><strong>{title}</strong></figcaption>{svg.row_error_curves(curves)}"
        f"{_line_legend([name for name, _ in curves])}</figure>"
        for title, curves in groups
        if curves
    ]
    return f'<div class="pair">{"".join(figures)}</div>' if figures else ""


def _line_legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 24 8"><line class="line s{i}" x1="0" x2="24" y1="4" '
        f'y2="4"/></svg>{_breakable(name)}</li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="keys">{items}</ul>'


def _worst_gemms(d: Diagnosis) -> list[GemmStats]:
    known = [g for g in d.gemms if not math.isnan(g.quantization.evened)]
    return sorted(known, key=lambda g: -g.quantization.evened)[:PICTURES]


def _curves(d: Diagnosis) -> str:
    keys = (
        '<ul class="keys"><li><svg class="key" viewBox="0 0 24 8"><line class="never" x1="0" '
        'x2="24" y1="4" y2="4"/></svg>never promoted</li><li><svg class="key" viewBox="0 0 24 8">'
        f'<line class="promoted" x1="0" x2="24" y1="4" y2="4"/></svg>promoted every '
        f"{PROMOTED_EVERY}</li></ul>"
    )
    figures = [
        f"<figure><figcaption><strong>{_breakable(curve.name)}</strong>, K = "
        f"{curve.points[-1][0]:,}</figcaption>{svg.error_curve(curve.points, d.machine)}</figure>"
        for curve in d.curves
        if len(curve.points) > 1
    ]
    return f'<div class="pair">{"".join(figures)}</div>{keys}' if figures else ""


def _what_if(g: GemmStats | None) -> str:
    if g is None or not g.what_if:
        return ""
    rows = []
    for row in g.what_if:
        mark = " ← cheapest good one" if row.recipe == g.cheapest else ""
        cells = map(number, (row.evened, row.error, row.median, row.flushed_percent))
        shown = "".join(f"<td>{cell}</td>" for cell in (*cells, f"{row.extra_bytes:,}"))
        name = ' class="chosen"' if mark else ""
        rows.append(f"<tr{name}><th>{escape(row.recipe + mark)}</th>{shown}</tr>")
    headings = ["recipe", "average row %", "error %", "median %", "flushed %", "extra bytes"]
    note = (
        f"The worst GEMM, {g.name}, quantised anew by each recipe. The cheapest good one is within "
        "1.2 times the best; scales that are the same for all of k go first, then fewer bytes."
    )
    return _section("What if", _table(headings, rows), note)


def _tensor_table(tensors: Sequence[TensorStats]) -> str:
    rows = []
    for t in tensors:
        levels, cells = t.levels(), []
        for _, column in TENSOR_COLUMNS:
            level = levels.get(column, "ok")
            mark = {"bad": " !!", "warn": " !", "ok": ""}[level]
            cells.append(f'<td class="{level}">{number(getattr(t, column))}{mark}</td>')
        kind = escape(f"{t.format}, {t.scale_kind}")
        rows.append(f"<tr><th>{_breakable(t.name)}</th><td>{kind}</td>{''.join(cells)}</tr>")
    headings = ["tensor", "format, scale per", *(heading for heading, _ in TENSOR_COLUMNS)]
    return _table(headings, rows)


def _gemm_table(gemms: Iterable[GemmStats]) -> str:
    rows = []
    for g in gemms:
        name, *cells = gemm_cells(g)
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th>{_breakable(name)}</th>{shown}</tr>")
    return _table(GEMM_COLUMNS, rows)


def _table(headings: Sequence[str], rows: Sequence[str], name: str = "") -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    return (
        f'<div class="scroll"><table class="{name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _notices(d: Diagnosis) -> str:
    notices = list(d.notices)
    if not d.differentiated:
        notices.append("The function is no scalar loss: only the GEMMs that it ran were seen.")
    sampled = sum(t.rows_seen < t.rows for t in d.tensors)
    if sampled:
        notices.append(f"{sampled} large tensors were sampled by blocks of rows.")
    notices.append("Results of GEMMs are sampled: at most 96 rows and columns of each.")
    return _section("Notes", "<ul>" + "".join(f"<li>{escape(n)}</li>" for n in notices) + "</ul>")


def _percent(value: float) -> str:
    return "0" if value == 0 else "<0.01" if value < 0.01 else f"{value:.3g}"


def _breakable(name: str) -> str:
    """A name that may be broken after a slash or a point."""
    return escape(name).replace("/", "/<wbr/>").replace(".", ".<wbr/>")


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + ("" if words.endswith(".") else ".")
