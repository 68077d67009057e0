"""The tables of `python -m jax_fp8 bench`, made from its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["show"]

Row = Mapping[str, Any]


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints peaks, a table for each case, targets, and what is missing."""
    if "available" in result:
        console.print(_list(result["available"]))
        return
    machine, versions = result["machine"], result["versions"]
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    console.print(f"{machine['cpu']}, {machine['threads']} thread(s); {known}", highlight=False)
    console.print(_peaks(result["peaks"], machine["threads"]))
    for preset in result["presets"]:
        for case in preset["cases"]:
            title = f"{preset['name']}: {case['name']}"
            table = _steps(title, case) if case["steps"] else _case(title, case)
            console.print(table)
        notes = list(preset["notes"])
        for case in preset["cases"]:
            notes += [note for note in case["notes"] if note not in notes]
        for note in notes:
            console.print(f"  · {note}", highlight=False)
    if result["presets"]:
        console.print(
            "median of the samples; spread: quartiles; with x: the peer's time divided by ours, "
            "each with its faster layout (above 1 ours is faster)",
            highlight=False,
        )
        rss = machine["peak_rss"]
        if rss is not None:
            console.print(f"peak resident memory of the process: {rss / 1e6:.0f} MB")
    for entry in result["missing"]:
        console.print(f"not installed: {entry['peer']} ({entry['install']})", highlight=False)
    for sentence in result["cut"]:
        console.print(f"left out: {sentence}", highlight=False)
    for sentence in result["warnings"]:
        console.print(sentence, style="bold", highlight=False)
    if result["targets"] is not None:
        console.print(_targets(result["targets"]))


def _list(available: Sequence[Row]) -> Table:
    table = Table("preset", "what", "--shape means", "default shapes", title="presets")
    for preset in available:
        shapes = " ".join(",".join(map(str, shape)) for shape in preset["shapes"])
        table.add_row(preset["name"], preset["title"], preset["shape_means"], shapes)
    return table


def _peaks(peaks: Row, threads: int) -> Table:
    table = Table("peak", "instruction", title=f"The machine's peaks, {threads} thread(s)")
    table.add_column("best", justify="right")
    table.add_column("all samples", justify="right")
    table.add_column("not", overflow="fold")
    for peak in peaks["multiply"]:
        table.add_row(peak["name"], peak["instruction"], *_rates(peak, "GFLOP/s"), peak["why_not"])
    for name, peak in peaks["read"].items():
        what = f"{name} reads of {peak['size_bytes'] / 2**20:.3g} MiB"
        table.add_row(what, peak["instruction"], *_rates(peak, "GB/s"), "")
    return table


def _rates(peak: Row, unit: str) -> tuple[str, str]:
    if not peak["rate"]:
        return "", ""
    low, high = min(peak["rates"]) / 1e9, max(peak["rates"]) / 1e9
    return f"{peak['rate'] / 1e9:.4g} {unit}", f"{low:.4g} … {high:.4g}"


def _case(title: str, case: Row) -> Table:
    shown = [
        row
        for row in case["contenders"]
        if row["kind"] != "peer" or row["name"] == case["best"][row["group"]]
    ]
    ours = list(case["ratios"])
    peers = [row["group"] for row in shown if row["kind"] == "peer"]
    # Ratios stand in the rows of peers, or in ours where that takes fewer columns.
    by_peer = len(peers) < len(ours)
    versus = (peers if by_peer else ours) if peers else []
    with_errors = any(row["error"] is not None for row in shown)
    in_us = case["rate"] == "µs"
    table = Table("contender", "kernel", title=title)
    table.add_column("µs" if in_us else "ms", justify="right")
    table.add_column("spread", justify="right")
    if not in_us:
        table.add_column(case["rate"], justify="right")
    if any(row["share"] for row in shown):
        table.add_column("share of peak", justify="right")
    if with_errors:
        for heading in ("rel. error", "operands MB", "call MB"):
            table.add_column(heading, justify="right")
    for group in versus:
        heading = f"{group} / ours" if by_peer else f"vs {group}"
        table.add_column(heading, justify="right")
    for row in shown:
        cells = [row["name"], row["kernel"] or "", *_times(row, 1e6 if in_us else 1e3)]
        if not in_us:
            cells.append(_speed(row, case["rate"]))
        if any(other["share"] for other in shown):
            cells.append(f"{row['share']:.0%} {row['peak']}" if row["share"] else "")
        if with_errors:
            cells.append("" if row["error"] is None else f"{row['error']:.2g}")
            cells += [_megabytes(row["memory"].get(what)) for what in ("operands", "call")]
        for group in versus:
            own, peer = (row["group"], group) if by_peer else (group, row["group"])
            ratio = case["ratios"].get(own, {}).get(peer)
            cells.append("" if ratio is None else f"{ratio:.3g}x")
        table.add_row(*cells, end_section=row["kind"] == "machine")
    return table


def _times(row: Row, factor: float) -> tuple[str, str]:
    spread = f"{factor * row['q1']:.3g} … {factor * row['q3']:.3g}"
    return f"{factor * row['median']:.4g}", spread


def _speed(row: Row, rate: str) -> str:
    values = {"GB/s": row["gbs"], "GFLOP/s": row["gflops"]}
    if rate == "GMAC/s":
        values[rate] = row["gflops"] / 2
    return f"{values[rate]:.4g}" if values[rate] else ""


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.4g}"


def _steps(title: str, case: Row) -> Table:
    table = Table("contender", title=title)
    for heading in ("ms", "spread", "GFLOP/s", "time of the next / this"):
        table.add_column(heading, justify="right")
    by_earlier = {name.split(" / ")[1]: step for name, step in case["steps"].items()}
    for row in case["contenders"]:
        step = by_earlier.get(row["name"])
        cells = (*_times(row, 1e3), _speed(row, "GFLOP/s"), f"{step:.2f}" if step else "")
        table.add_row(row["name"], *cells)
    return table


def _targets(targets: Row) -> Table:
    table = Table(
        "preset", "case", "ours", "figure", title=f"Targets, set for {targets['machine']}"
    )
    for heading in ("reached", "aim", "floor"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for one in targets["outcomes"]:
        sign = "≤ " if one["at_most"] else ""
        style = {"aim met": "green", "missed": "bold red"}.get(one["verdict"])
        table.add_row(
            one["preset"], one["case"], one["group"], one["metric"],
            f"{one['value']:.3g}", f"{sign}{one['aim']:g}", f"{sign}{one['floor']:g}",
            one["verdict"], style=style,
        )  # fmt: skip
    if targets["notes"]:
        table.caption = "\n".join(targets["notes"])
    return table
