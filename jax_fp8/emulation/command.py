"""`python -m jax_fp8 emulate`: the error of accumulators against K, as a table, JSON or a plot."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table as RichTable

from jax_fp8.bench import timing
from jax_fp8.emulation import plot, speed, tables
from jax_fp8.emulation.machines import MACHINES
from jax_fp8.emulation.study import DATA, METRICS, ErrorRow, Study
from jax_fp8.progress import progress

__all__ = ["add_arguments", "emulate", "show"]

#: Options that say what to measure, and what they are where neither they nor --table are given.
_SELECTION: Final[dict[str, Any]] = {
    "machine": ("hopper_wgmma",),
    "data": ("normal",),
    "intervals": (None, 128),
    "k": Study.ks,
    "shape": Study.shape,
    "formats": Study.formats,
    "fp16_scales": Study.fp16_scales,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    selection = parser.add_argument_group("what to measure")
    selection.add_argument(
        "--machine",
        type=lambda text: tuple(MACHINES) if text == "all" else _names(text),
        metavar="NAMES",
        help=f"all, or some of {', '.join(MACHINES)} (default: hopper_wgmma)",
    )
    selection.add_argument(
        "--data",
        type=_names,
        metavar="NAMES",
        help=f"some of {', '.join(DATA)}, and pairs such as relu:normal (default: normal)",
    )
    selection.add_argument(
        "--intervals",
        type=_intervals,
        metavar="K,…",
        help="promotion intervals such as none,512,128 (default: none,128)",
    )
    selection.add_argument(
        "--k", type=_integers, metavar="K,…", help="lengths of the sums (default: 32 to 16384)"
    )
    selection.add_argument(
        "--shape", type=_pair, metavar="M,N", help="results that are measured (default: 64,64)"
    )
    selection.add_argument(
        "--formats", type=_name_pair, metavar="LHS,RHS", help="(default: e4m3,e4m3)"
    )
    selection.add_argument(
        "--fp16-scales",
        choices=("narrow", "amax"),
        help="operands of FP16 accumulators: small enough not to overflow (default), or amax / 448",
    )
    parser.add_argument(
        "--table",
        choices=(*tables.TABLES, "all"),
        help="instead of a selection: "
        + "; ".join(f"{name}: {table.title}" for name, table in tables.TABLES.items()),
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail if a cell of the tables is out of its bounds; without --table: of all of them",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random data (default: 0)")
    parser.add_argument(
        "--metric", choices=tuple(METRICS), help="what cells and plots show (default: frobenius)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw error against K")
    parser.add_argument(
        "--speed",
        type=_triple,
        metavar="M,N,K",
        help="instead of errors: how fast a GEMM of this size is emulated, beside mmasim",
    )
    parser.add_argument("--one-cpu", action="store_true", help="measure --speed on one CPU only")


def emulate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Error of an accumulator against K, on a CPU, in per cent of the exact result."""
    if arguments.speed:
        return _measure_speed(arguments)
    try:
        chosen = _chosen(arguments)
        if arguments.plot:
            plot.check_path(arguments.plot)
            _check_lines(chosen)
    except (ValueError, ImportError) as error:
        arguments.fail(str(error))
    measured = _measure(chosen)
    if arguments.plot:
        plot.plot_errors(
            [row for rows in measured.values() for row in rows],
            arguments.plot,
            arguments.metric or "frobenius",
        )
    result: dict[str, Any] = {
        "seed": arguments.seed,
        "tables": [
            {
                "name": name,
                "title": table.title,
                "metric": arguments.metric or table.metric,
                "rows": [row.as_json() for row in measured[name]],
            }
            for name, table in chosen.items()
        ],
    }
    if arguments.check:
        result["checks"], result["failures"] = tables.check(measured)
    return result


def show(console: Console, result: dict[str, Any]) -> None:
    """Prints the result as tables: columns are K, or all measures of error where K is one."""
    if "speeds" in result:
        _show_speed(console, result)
        return
    for table in result["tables"]:
        rows = [_row(fields) for fields in table["rows"]]
        ks = sorted({row.k for row in rows})
        build = _by_k if len(ks) > 1 else _by_metric
        console.print(build(table["title"], rows, table["metric"]))
    if "failures" in result:
        console.print(f"{result['checks']} bounds checked, {len(result['failures'])} broken")


def _measure_speed(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.one_cpu:
        timing.use_cpus(1)
    machines = arguments.machine or _SELECTION["machine"]
    for name in machines:
        if name not in MACHINES:
            arguments.fail(f"--machine: there is no {name!r}; there are {', '.join(MACHINES)}")
    rows = list(speed.speeds(machines, arguments.speed, seed=arguments.seed))
    mmasim = speed.mmasim_seconds()
    result: dict[str, Any] = {
        "cpus": len(timing.cpus()),
        "speeds": [dataclasses.asdict(row) | {"gmacs": row.gmacs} for row in rows],
        "mmasim": None,
    }
    if mmasim is not None:
        ours = next(speed.speeds(["hopper_wgmma"], speed.MMASIM_TILE, repeats=100)).seconds
        result["mmasim"] = {
            "shape": speed.MMASIM_TILE,
            "seconds": mmasim,
            "hopper_wgmma": ours,
            "ratio": mmasim / ours,
        }
    return result


def _show_speed(console: Console, result: dict[str, Any]) -> None:
    table = RichTable(
        "machine", "kernel", "M,N,K", title=f"Whole GEMMs on {result['cpus']} CPU(s), median time"
    )
    for heading in ("seconds", "10⁹ products a second"):
        table.add_column(heading, justify="right")
    for row in result["speeds"]:
        shape = ",".join(map(str, row["shape"]))
        times = f"{row['seconds']:.4g}", f"{row['gmacs']:.1f}"
        table.add_row(row["machine"], row["kernel"], shape, *times)
    console.print(table)
    mmasim = result["mmasim"]
    if mmasim is None:
        console.print("mmasim is not installed, so nothing was compared with it")
        return
    console.print(
        f"mmasim on one instruction tile, {','.join(map(str, mmasim['shape']))}: "
        f"{1e3 * mmasim['seconds']:.1f} ms; hopper_wgmma here {1e6 * mmasim['hopper_wgmma']:.0f} "
        f"µs: {mmasim['ratio']:.0f} times as fast"
    )


def _chosen(arguments: argparse.Namespace) -> dict[str, tables.Table]:
    """Tables by name; a selection is a table of one study."""
    given = {name: getattr(arguments, name) for name in _SELECTION}
    given = {name: value for name, value in given.items() if value is not None}
    name = arguments.table or ("all" if arguments.check else None)
    if name is None:
        options = _SELECTION | given
        study = Study(
            machines=options["machine"],
            ks=options["k"],
            seed=arguments.seed,
            **{
                name: options[name]
                for name in ("data", "intervals", "shape", "formats", "fp16_scales")
            },
        )
        return {"selection": tables.Table("Accumulation error", (study,))}
    if given:
        raise ValueError(
            f"--{next(iter(given)).replace('_', '-')} chooses what to measure, and so does "
            f"{'--table' if arguments.table else '--check'}: give one of them"
        )
    return {
        own: dataclasses.replace(
            table,
            studies=tuple(
                dataclasses.replace(study, seed=arguments.seed) for study in table.studies
            ),
        )
        for own, table in tables.TABLES.items()
        if name in (own, "all")
    }


def _check_lines(chosen: dict[str, tables.Table]) -> None:
    if all(len(study.ks) < 2 for table in chosen.values() for study in table.studies):
        raise ValueError("--plot draws error against K: give two K or more")


def _measure(chosen: dict[str, tables.Table]) -> dict[str, list[ErrorRow]]:
    with progress() as bars:
        measured: dict[str, list[ErrorRow]] = {}
        for name, table in chosen.items():
            bar = bars.add_task(name, total=sum(map(len, table.studies)))
            measured[name] = []
            for study in table.studies:
                for row in study.rows():
                    measured[name].append(row)
                    bars.advance(bar)
    return measured


def _by_k(title: str, rows: Sequence[ErrorRow], metric: str) -> RichTable:
    heading = METRICS.get(metric, "infinite or NaN")
    ks = sorted({row.k for row in rows})
    table = RichTable("data", "accumulator", title=f"{title}\n{heading}, %")
    for k in ks:
        table.add_column(f"K = {k}", justify="right")
    for data in dict.fromkeys(_data(row) for row in rows):
        table.add_section()
        own = [row for row in rows if _data(row) == data]
        for accumulator in dict.fromkeys(row.accumulator for row in own):
            cells = {row.k: _cell(row, metric) for row in own if row.accumulator == accumulator}
            table.add_row(data, accumulator, *(cells.get(k, "") for k in ks))
    return table


def _by_metric(title: str, rows: Sequence[ErrorRow], _: str) -> RichTable:
    k = rows[0].k
    table = RichTable("data", "accumulator", title=f"{title}\nK = {k}, %")
    for heading in METRICS.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(_data(row), row.accumulator, *(_cell(row, metric) for metric in METRICS))
    return table


def _data(row: ErrorRow) -> str:
    return row.data if row.formats == "e4m3fn·e4m3fn" else f"{row.data}, {row.formats}"


def _cell(row: ErrorRow, metric: str) -> str:
    value: float = getattr(row, metric)
    if math.isnan(value):
        return f"{row.non_finite_percent:.1f} % inf"
    return f"{value:.3f}" if abs(value) >= 0.0005 or value == 0 else f"{value:.0e}"


def _row(fields: dict[str, Any]) -> ErrorRow:
    """The row that these fields of JSON describe."""
    own = {field.name: fields[field.name] for field in dataclasses.fields(ErrorRow)}
    missing = {name: math.nan for name in METRICS if own[name] is None}
    return ErrorRow(**own | missing)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _intervals(text: str) -> tuple[int | None, ...]:
    return tuple(None if word.lower() == "none" else int(word) for word in text.split(","))


def _pair(text: str) -> tuple[int, int]:
    m, n = _integers(text)
    return m, n


def _triple(text: str) -> tuple[int, int, int]:
    m, n, k = _integers(text)
    if min(m, n, k) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes must be at least 1")
    return m, n, k


def _name_pair(text: str) -> tuple[str, str]:
    lhs, rhs = _names(text)
    return lhs, rhs
