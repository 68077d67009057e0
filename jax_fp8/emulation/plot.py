"""Error against K as a picture: a panel for each data, a line for each machine and interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jax_fp8.emulation.study import METRICS, ErrorRow

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

__all__ = ["check_path", "plot_errors"]

_STYLES: Final = ("-", "--", ":")  # of the first ten lines, the next ten, and so on


def check_path(path: Path) -> None:
    """Checks, before anything is measured, that a picture can be written there.

    Raises:
      ImportError: matplotlib is not installed; the message names the extra that brings it.
      ValueError: there is no such folder, or the suffix is no picture's.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "matplotlib draws the plot and is not installed: pip install 'jax_fp8[plot]'"
        ) from error
    suffixes = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in suffixes:
        raise ValueError(f"plot {path}: the suffix must be one of {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ValueError(f"plot {path}: there is no folder {path.parent}")


def plot_errors(rows: Sequence[ErrorRow], path: Path, metric: str = "frobenius") -> None:
    """Draws the error of each accumulator against K, both on logarithmic axes.

    Args:
      rows: of studies with more than one K; rows without an error (infinite results) are left out.
      path: file to write; its suffix says the format.
      metric: a name of `METRICS`; a bias is drawn without its sign.

    Raises:
      ImportError: matplotlib is not installed; the message names the extra that brings it.
      ValueError: nothing to draw a line through, or a path that `check_path` refuses.
    """
    check_path(path)
    from matplotlib.figure import Figure

    drawn = [row for row in rows if not math.isnan(getattr(row, metric))]
    panels = {title: own for title, own in _group(drawn, _panel).items() if _num_ks(own) > 1}
    if not panels:
        raise ValueError("a plot of error against K needs rows of two K or more")
    num_columns = min(3, len(panels))
    num_lines = math.ceil(len(panels) / num_columns)
    figure = Figure((4 + 4.2 * num_columns, 4.2 * num_lines), layout="constrained")
    axes = figure.subplots(num_lines, num_columns, sharey=True, squeeze=False).flatten()
    names = list(dict.fromkeys(row.accumulator for own in panels.values() for row in own))
    lines: dict[str, Line2D] = {}
    for (title, own), ax in zip(panels.items(), axes, strict=False):
        for name, line in _group(own, lambda row: row.accumulator).items():
            ks = [row.k for row in line]
            errors = [abs(getattr(row, metric)) or math.nan for row in line]
            number = names.index(name)
            style = {"color": f"C{number % 10}", "linestyle": _STYLES[number // 10 % len(_STYLES)]}
            (lines[name],) = ax.plot(ks, errors, marker=".", **style)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set(title=title, xlabel="K", ylabel=f"{METRICS[metric]}, %")
        ax.grid(alpha=0.3)
    for ax in axes[len(panels) :]:
        ax.remove()
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def _panel(row: ErrorRow) -> str:
    return f"{row.data} ({row.formats}), {row.shape[0]} × {row.shape[1]}"


def _num_ks(rows: Sequence[ErrorRow]) -> int:
    return len({row.k for row in rows})


def _group(rows: Iterable[ErrorRow], key: Callable[[ErrorRow], str]) -> dict[str, list[ErrorRow]]:
    groups: dict[str, list[ErrorRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
