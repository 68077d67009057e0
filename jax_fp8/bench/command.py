"""`python -m jax_fp8 bench`: kernels beside XLA, torch and qwix, as shares of the machine's peaks.

The JSON, of which the tables are made:

* `schema`: 1; it changes when a key does.
* `machine`: `cpu` (model), `cpus` that the process could use, `threads` that it did, `l3_bytes`,
  `peak_rss` (bytes at the most).
* `versions`: of jax_fp8, jax, jaxlib, numpy, python, and of each peer that is installed.
* `options`: those of the command line that change figures.
* `peaks`: `multiply`, a list of {name, unit, instruction, why_not, rates, rate}, FLOP/s over all
  threads, measured at the start and as the median of each case; `read`, the same in byte/s with
  `size_bytes`, the footprint: "cold" memory on the pages that arrays of JAX get, "cold, 2 MB
  pages", and "repeated", from a cache.
* `presets`: {name, title, notes, cases}; a case is {name, shape, rate, notes, peaks, contenders,
  best, ratios, steps}:
    * `peaks`: FLOP/s of the instructions that its kernels rest on, the median of samples in turn
      with the contenders: shares are shares of these.
    * `contenders`: {name, group, kind ("ours", "peer", "machine"), kernel, seconds (every sample),
      median, min, q1, q3, gflops, gbs, gmacs_per_thread, flops, counted_bytes (what gbs counts),
      moved_bytes (operands and result), peak, share (of that peak), memory, error}; null where it
      does not apply. Times are seconds.
    * `best`: the contender with the smallest median of each group (contenders of a group differ in
      the layout of the weights).
    * `ratios`: for each group of ours and each peer, the peer's median divided by ours, both of
      `best`.
    * `steps`: of `decode --cliff`, "later / earlier": the quotient of their least times.
* `missing`: peers that are not installed, and what installs them.
* `cut`: sentences on what was left out; `warnings`: on a machine that was busy.
* `targets`: null, or with --check {machine, notes, outcomes}; an outcome is {preset, case, group,
  metric, value, aim, floor, at_most, verdict}.
* `failures`: sentences; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jaxlib.version
import numpy as np

import jax_fp8
from jax_fp8 import lowering, recipes
from jax_fp8.bench import memory, peers, report, roofline, targets, timing
from jax_fp8.bench.cases import (
    Options,
    Preset,
    Shape,
    WrongResult,
    case_as_json,
    check_results,
)
from jax_fp8.bench.peaks import Peak, Readers, multiply_peaks, timed_peaks
from jax_fp8.bench.presets import PRESETS
from jax_fp8.emulation.plot import check_path
from jax_fp8.progress import progress

__all__ = ["add_arguments", "bench", "show"]

_FAMILIES: Final = ("xla", "torch", "qwix")
#: Read again and again, by each thread: it stays in a second-level cache.
_REPEATED_BYTES: Final = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument(
        "preset",
        nargs="*",
        metavar="PRESET",
        help=f"some of {', '.join(PRESETS)}, or all (default: a short run of square and decode)",
    )
    parser.add_argument("--list", action="store_true", help="show the presets and their shapes")
    chosen = parser.add_argument_group("what to measure")
    chosen.add_argument(
        "--shape",
        type=_shape,
        action="append",
        metavar="M,N,K",
        help="instead of the preset's shapes; can be repeated (see --list for other meanings)",
    )
    chosen.add_argument(
        "--recipe", type=_names, metavar="NAMES", help="some of tensor,row,block,tile,mx"
    )
    chosen.add_argument("--kernel", metavar="ROW", help="force this row of `info`")
    chosen.add_argument(
        "--any-order",
        action="store_true",
        help="also run rows that add up in an order of their own: deterministic(False)",
    )
    chosen.add_argument(
        "--peers",
        type=_names,
        metavar="NAMES",
        help="some of xla,torch,qwix, or none (default: all)",
    )
    chosen.add_argument(
        "--cliff", action="store_true", help="decode: time(M + 1) / time(M) for M = 8 to 64, too"
    )
    how = parser.add_argument_group("how to measure")
    how.add_argument(
        "--threads", type=int, metavar="N", help="keep the process on its first N CPUs"
    )
    how.add_argument("--repeats", type=int, default=15, help="samples of each (default: 15)")
    how.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help="seconds of a case (default: 10, of the short run 3)",
    )
    how.add_argument(
        "--footprint",
        type=int,
        default=256,
        metavar="MIB",
        help="memory over which cold weights are spread; larger than the caches (default: 256)",
    )
    how.add_argument("--seed", type=int, default=0, help="of the random data (default: 0)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail if a floor is missed; without a preset: run all that have targets",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the JSON there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a roofline")


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """How fast the kernels are, beside peers and the machine's own peaks."""
    if arguments.list:
        return {"available": [_as_json(name, preset) for name, preset in PRESETS.items()]}
    try:
        chosen = _chosen(arguments)
        options = _options(arguments)
    except (ValueError, ImportError) as error:
        arguments.fail(str(error))
    result = _Run(options).result(chosen)
    if arguments.check and not result["failures"]:
        _check(result)
    if arguments.plot:
        roofline.plot_roofline(result, arguments.plot)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


show = report.show


class _Run:
    """Measures presets under the same options."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.cut: list[str] = []

    def result(self, chosen: Mapping[str, Sequence[Shape]]) -> dict[str, Any]:
        """Everything but targets, as JSON."""
        options = self.options
        self.multiply = multiply_peaks(options.threads)
        read = {
            "cold, 2 MB pages": _read(options.footprint_bytes, options.threads, huge_pages=True),
            "cold": _read(options.footprint_bytes, options.threads),
            "repeated": _read(_REPEATED_BYTES * options.threads, options.threads),
        }
        with jax.default_device(jax.devices("cpu")[0]):  # where there is a GPU, too
            presets, failures = self._presets(chosen)
        families = [name for name in _FAMILIES if name in options.peers]
        return {
            "schema": 1,
            "machine": {
                "cpu": _cpu_model(),
                "cpus": len(timing.cpus()),
                "threads": options.threads,
                "l3_bytes": memory.last_level_cache_bytes(),
                "peak_rss": memory.peak_rss_bytes(),
            },
            "versions": _versions() | peers.versions(families),
            "options": dataclasses.asdict(options),
            "peaks": {"multiply": [peak.as_json() for peak in self.multiply], "read": read},
            "presets": presets,
            "missing": peers.missing(families),
            "cut": self.cut,
            "warnings": [_disturbed(peak) for peak in self.multiply if _disturbed(peak)],
            "targets": None,
            "failures": failures,
        }

    def _presets(
        self, chosen: Mapping[str, Sequence[Shape]]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        presets: list[dict[str, Any]] = []
        with progress() as bars:
            for name, shapes in chosen.items():
                preset = PRESETS[name]
                cases: list[dict[str, Any]] = []
                presets.append(_as_json(name, preset, cases=cases, notes=preset.notes))
                bar = bars.add_task(name, total=len(shapes) * preset.cases_per_shape)
                try:
                    for case in self._cases(preset, shapes):
                        cases.append(case)
                        bars.advance(bar)
                except WrongResult as error:
                    return presets, [f"{name}, {error}"]
                except KeyboardInterrupt:  # minutes of figures are not thrown away
                    return presets, [f"{name}: interrupted; what was measured before is shown"]
        return presets, []

    def _cases(self, preset: Preset, shapes: Sequence[Shape]) -> Iterator[dict[str, Any]]:
        options = self.options
        for case in preset.cases(shapes, options, self.cut):
            check_results(case)
            instructions = {contender.peak for contender in case.contenders}
            instructions &= {peak.name for peak in self.multiply if peak.rates}
            in_turn = timed_peaks(sorted(instructions), options.threads)
            times = timing.round_robin(
                {contender.name: contender.timed for contender in case.contenders}
                | {_turn_of(name): timed for name, timed in in_turn.items()},
                repeats=options.repeats,
                budget_seconds=options.budget_seconds,
            )
            rates = {name: 1e9 / times[_turn_of(name)].median for name in in_turn}
            self.multiply = [
                dataclasses.replace(peak, rates=(*peak.rates, rates[peak.name]))
                if peak.name in rates
                else peak
                for peak in self.multiply
            ]
            figures = case_as_json(case, times, rates, options.threads)
            del case  # with its operands, before those of the next are made
            yield figures


def _turn_of(instruction: str) -> str:
    """Name of a peak among the contenders."""
    return f"the machine's {instruction}"


def _disturbed(peak: Peak) -> str:
    """A sentence if half of the samples of an instruction were far below the best, or ""."""
    if not peak.rates or statistics.median(peak.rates) >= 0.8 * peak.rate:
        return ""
    low, high = min(peak.rates) / 1e9, peak.rate / 1e9
    return (
        f"the machine was busy: {peak.instruction} ran at {low:.4g} to {high:.4g} GFLOP/s; do not "
        "quote these figures, measure again on a quiet one"
    )


def _read(size_bytes: int, threads: int, *, huge_pages: bool = False) -> dict[str, Any]:
    """Bandwidth over a footprint: cold if that is larger than the caches."""
    readers = Readers(min(size_bytes, 16 << 20), size_bytes, threads, huge_pages=huge_pages)
    measured: Peak = readers.bandwidth(repeats=15)
    readers.close()
    return measured.as_json() | {"size_bytes": readers.num_pieces * readers.piece_bytes}


def _check(result: dict[str, Any]) -> None:
    """Adds targets and failures."""
    outcomes = targets.evaluate(result["presets"], result["machine"]["threads"])
    notes = []
    if any(peak["name"].startswith("amx") and peak["rate"] for peak in result["peaks"]["multiply"]):
        notes.append(
            "This CPU has AMX, which XLA's and torch's bf16 dots use: ratios to them say how far "
            "our row is from AMX, not what the targets were set for."
        )
    notes += [
        f"not installed, so not compared with: {entry['peer']} ({entry['install']})"
        for entry in result["missing"]
    ]
    result["targets"] = {
        "machine": targets.MACHINE,
        "notes": notes,
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    result["failures"] = targets.failures(outcomes)


def _chosen(arguments: argparse.Namespace) -> dict[str, Sequence[Shape]]:
    """Shapes by preset."""
    names = list(PRESETS) if "all" in arguments.preset else list(dict.fromkeys(arguments.preset))
    for name in names:
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)} and all")
    if arguments.check and not names:
        names = list(dict.fromkeys(target.preset for target in targets.TARGETS))
        arguments.cliff = True
    if names:
        chosen = {name: arguments.shape or PRESETS[name].shapes for name in names}
    elif arguments.shape:
        chosen = {"square": arguments.shape}
    else:
        chosen = {name: preset.quick for name, preset in PRESETS.items() if preset.quick}
    if arguments.cliff and "decode" not in chosen:
        raise ValueError("--cliff belongs to the preset decode")
    return chosen


def _options(arguments: argparse.Namespace) -> Options:
    """Checks what argparse does not, and pins the process."""
    for name in arguments.recipe or ():
        if name not in recipes.BY_NAME or name == "static":
            known = ", ".join(own for own in recipes.BY_NAME if own != "static")
            raise ValueError(f"--recipe: there is no {name!r}; there are {known}")
    if arguments.kernel:
        rows = {row.name: row.why_not for row in lowering.kernel_table() if row.operation == "gemm"}
        if arguments.kernel not in rows:
            raise ValueError(f"--kernel: no row {arguments.kernel!r}; there are {', '.join(rows)}")
        if rows[arguments.kernel]:
            raise ValueError(f"--kernel {arguments.kernel}: {rows[arguments.kernel]}")
    families = _FAMILIES if arguments.peers is None else arguments.peers
    families = () if tuple(families) == ("none",) else families
    for name in families:
        if name not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise ValueError(f"--peers: there is no {name!r}; there are {known}, and none")
    short = not (arguments.preset or arguments.shape or arguments.check)
    if arguments.budget is None:
        arguments.budget = 3.0 if short else 10.0
    for option in ("repeats", "budget", "footprint"):
        if getattr(arguments, option) <= 0:
            raise ValueError(f"--{option} is {getattr(arguments, option)}; it must be more than 0")
    if arguments.plot:
        check_path(arguments.plot)
    if arguments.out and not arguments.out.parent.is_dir():
        raise ValueError(f"--out {arguments.out}: there is no folder {arguments.out.parent}")
    if arguments.threads is not None:
        timing.use_cpus(arguments.threads)
    return Options(
        recipes=arguments.recipe or (("tensor", "block") if short else ()),
        kernel=arguments.kernel or "",
        any_order=arguments.any_order,
        peers=tuple(families),
        repeats=arguments.repeats,
        budget_seconds=arguments.budget,
        footprint_bytes=arguments.footprint << 20,
        threads=arguments.threads or len(timing.cpus()),
        seed=arguments.seed,
        cliff=arguments.cliff,
    )


def _as_json(name: str, preset: Preset, **more: Any) -> dict[str, Any]:
    if not more:
        shapes = [list(shape) for shape in preset.shapes]
        more = {"shape_means": preset.shape_means, "shapes": shapes}
    return {"name": name, "title": preset.title, **more}


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    return {
        "jax_fp8": jax_fp8.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _shape(text: str) -> Shape:
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not three sizes M,N,K such as 64,512,128")
    return sizes[0], sizes[1], sizes[2]
