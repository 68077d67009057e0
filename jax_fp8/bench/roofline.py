"""The roofline: speed against arithmetic intensity, below the roofs that this run measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from jax_fp8.emulation.plot import check_path

__all__ = ["plot_roofline"]

_MARKERS: Final = "osD^vP*Xhp<>d"


def plot_roofline(result: Mapping[str, Any], path: Path) -> None:
    """Draws GFLOP/s of every contender with the faster layout against FLOPs per byte moved.

    Args:
      result: JSON of the command.
      path: file to write; its suffix says the format.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no case has an arithmetic intensity, or a path that cannot be written.
    """
    check_path(path)
    from matplotlib.figure import Figure

    points = list(_points(result))
    if not points:
        raise ValueError("a roofline needs GEMMs: of square, decode, llm, train or accuracy")
    figure = Figure((9, 6), layout="constrained")
    ax = figure.subplots()
    intensities = [x for _, _, x, _ in points]
    reach = np.geomspace(min(intensities) / 2, max(intensities) * 2, 200)
    bandwidth = result["peaks"]["read"]["cold"]
    roofs = [peak for peak in result["peaks"]["multiply"] if peak["rate"]]
    # The scalar one, far below all others, would take half of the picture.
    roofs = sorted((p for p in roofs if p["name"] != "scalar"), key=lambda p: -p["rate"])
    for number, peak in enumerate(roofs):
        roof = np.minimum(peak["rate"], bandwidth["rate"] * reach) / 1e9
        ax.plot(reach, roof, color="0.6", linewidth=1)
        ax.annotate(
            f"{peak['instruction']} {peak['rate'] / 1e9:.0f} GFLOP/s", (reach[-1], roof[-1]),
            ha="right", va="top" if number % 2 else "bottom", fontsize="x-small", color="0.4",
        )  # fmt: skip
    groups = list(dict.fromkeys(group for group, _, _, _ in points))
    for number, group in enumerate(groups):
        own = [(x, y) for name, _, x, y in points if name == group]
        kind = next(kind for name, kind, _, _ in points if name == group)
        ax.plot(
            *zip(*own, strict=True), label=group, linestyle="", color=f"C{number % 10}",
            marker=_MARKERS[number % len(_MARKERS)], markersize=7 if kind == "ours" else 4,
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    machine = result["machine"]
    gigabytes = f"{bandwidth['rate'] / 1e9:.1f} GB/s"
    ax.set(
        xlabel="FLOP per byte of operands and result",
        ylabel="GFLOP/s",
        title=f"{machine['cpu']}, {machine['threads']} thread(s)\n"
        f"roofs measured in the same run; slope {gigabytes}, cold reads",
    )
    ax.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def _points(result: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """(group, kind, FLOP per byte, GFLOP/s)."""
    for preset in result["presets"]:
        for case in preset["cases"]:
            if case["steps"] or case["rate"] == "µs":
                continue
            for row in case["contenders"]:
                counted = row["name"] == case["best"][row["group"]]
                if counted and row["gflops"] and row["moved_bytes"]:
                    intensity = row["flops"] / row["moved_bytes"]
                    yield row["group"], row["kind"], intensity, row["gflops"]
