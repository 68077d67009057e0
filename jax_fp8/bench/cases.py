"""What is compared with what: contenders of one case, and what their times mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from jax_fp8.bench.timing import Timed, Times

__all__ = [
    "READ",
    "Case",
    "Contender",
    "Options",
    "Preset",
    "Shape",
    "WrongResult",
    "case_as_json",
    "check_results",
]

Shape = tuple[int, int, int]
Kind = Literal["ours", "peer", "machine"]

#: Name of the contender that only reads memory, and of the peak that it is.
READ: Final = "read"


class WrongResult(Exception):
    """A contender computes something else than the others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the work of a case.

    Attributes:
      name: unique in its case.
      group: contenders of one group are the same but for the layout of the weights: the fastest
        stands for its group in ratios.
      kind: "ours"; "peer", whose time is divided by ours; or "machine", a limit.
      timed: what is timed.
      check: what is wrong with its result, against float64, or "".
      kernel: row that ran.
      flops: of one call.
      counted_bytes: that GB/s counts, such as those of the weights.
      moved_bytes: operands and result, for the arithmetic intensity.
      peak: that its rate is a share of: a name of `peaks.table()`, `READ`, or "" for none.
      memory: sizes in bytes by what they are of.
      error: relative error of the result by the metric that the case names.
    """

    name: str
    group: str
    kind: Kind
    timed: Timed
    check: Callable[[], str] = lambda: ""
    kernel: str = ""
    flops: float = 0
    counted_bytes: float = 0
    moved_bytes: float = 0
    peak: str = ""
    memory: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    error: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Contenders that do the same work, timed in turn.

    Attributes:
      name: such as "512 x 512 x 512".
      shape: (m, n, k), or what the preset takes for them.
      contenders: in the order in which they run.
      rate: what speed is quoted in.
      steps: pairs of names: the least time of the first is divided by that of the second (a
        disturbed median would look like a step).
      notes: what a reader of the figures must know about this case.
    """

    name: str
    shape: Shape
    contenders: Sequence[Contender]
    rate: Literal["GFLOP/s", "GB/s", "GMAC/s", "µs"] = "GFLOP/s"
    steps: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says about all presets.

    Attributes:
      recipes: names of recipes; empty leaves the preset's own.
      kernel: row to force, or "".
      any_order: whether rows run that add up in an order of their own.
      peers: families of peers, some of "xla", "torch" and "qwix".
      repeats: samples of each contender.
      budget_seconds: of one case.
      footprint_bytes: over which cold operands are spread.
      threads: that this process may use.
      seed: of the random data.
      cliff: whether `decode` looks for steps in time between M and M + 1.
    """

    recipes: Sequence[str] = ()
    kernel: str = ""
    any_order: bool = False
    peers: Sequence[str] = ("xla", "torch", "qwix")
    repeats: int = 15
    budget_seconds: float = 5.0
    footprint_bytes: int = 256 << 20
    threads: int = 1
    seed: int = 0
    cliff: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A set of cases by a name.

    Attributes:
      title: one line for tables and `--list`.
      shapes: that it measures by default.
      cases: makes the cases of some shapes one after another, each when it is asked for, so that
        the operands of one are gone before those of the next. Sentences about what is left out
        go into the list.
      quick: the shapes of the short run without a preset; empty is not in it.
      cases_per_shape: for the progress bar.
      shape_means: what the three numbers of a shape are.
      notes: how it measures.
    """

    title: str
    shapes: Sequence[Shape]
    cases: Callable[[Sequence[Shape], Options, list[str]], Iterator[Case]]
    quick: Sequence[Shape] = ()
    cases_per_shape: int = 1
    shape_means: str = "M,N,K"
    notes: Sequence[str] = ()


def check_results(case: Case) -> None:
    """Warms every contender up, and lets it check its result against float64, before any is timed.

    Raises:
      WrongResult: with what is wrong.
    """
    for contender in case.contenders:
        contender.timed.call()
        wrong = contender.check()
        if wrong:
            raise WrongResult(
                f"{case.name}: {contender.name} computes something else: {wrong}. Its time would "
                "mean nothing, so nothing was measured"
            )


def case_as_json(
    case: Case, times: Mapping[str, Times], peak_rates: Mapping[str, float], threads: int
) -> dict[str, Any]:
    """Figures of a case from its times.

    Args:
      case: what was timed.
      times: by name of the contender; seconds of one call.
      peak_rates: FLOP/s of instructions, over all threads, measured in turn with the contenders.
      threads: that all contenders used.

    Returns:
      The case as the JSON of the command has it, see `jax_fp8.bench.command`.
    """
    rates = dict(peak_rates)
    for contender in case.contenders:
        if contender.kind == "machine":
            rates[READ] = contender.counted_bytes / times[contender.name].median
    rows = [_row(contender, times[contender.name], rates, threads) for contender in case.contenders]
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        group = row["group"]
        if group not in best or row["median"] < best[group]["median"]:
            best[group] = row
    ours, peers = (
        {group: row for group, row in best.items() if row["kind"] == kind}
        for kind in ("ours", "peer")
    )
    return {
        "name": case.name,
        "shape": list(case.shape),
        "rate": case.rate,
        "peaks": dict(peak_rates),
        "notes": list(case.notes),
        "contenders": rows,
        "best": {group: row["name"] for group, row in best.items()},
        "ratios": {
            group: {peer: other["median"] / row["median"] for peer, other in peers.items()}
            for group, row in ours.items()
        },
        "steps": {
            f"{later} / {earlier}": times[later].best / times[earlier].best
            for later, earlier in case.steps
        },
    }


def _row(
    contender: Contender, times: Times, rates: Mapping[str, float], threads: int
) -> dict[str, Any]:
    median = times.median
    lower, upper = times.quartiles
    gflops, gbs = contender.flops / median / 1e9, contender.counted_bytes / median / 1e9
    share = None
    if contender.peak in rates:
        share = 1e9 * (gbs if contender.peak == READ else gflops) / rates[contender.peak]
    return {
        "name": contender.name,
        "group": contender.group,
        "kind": contender.kind,
        "kernel": contender.kernel or None,
        "seconds": list(times.seconds),
        "median": median,
        "min": times.best,
        "q1": lower,
        "q3": upper,
        "gflops": gflops or None,
        "gbs": gbs or None,
        "gmacs_per_thread": gflops / 2 / threads or None,
        "flops": contender.flops,
        "counted_bytes": contender.counted_bytes,
        "moved_bytes": contender.moved_bytes,
        "peak": contender.peak or None,
        "share": share,
        "memory": dict(contender.memory),
        "error": contender.error,
    }
