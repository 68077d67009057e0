"""A diagnosis as a PNG: flush map, error map of the worst tensor, and error against K."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jax_fp8.diagnosis.checklist import order_tensors
from jax_fp8.emulation.plot import check_path

if TYPE_CHECKING:
    from jax_fp8.diagnosis.diagnose import Diagnosis

__all__ = ["draw"]


def draw(d: Diagnosis, path: Path) -> Path:
    """Draws and writes the picture.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there is no such folder, or the suffix is no picture's.
    """
    check_path(Path(path))
    from matplotlib.figure import Figure

    tensors = order_tensors(d.tensors)
    figure = Figure(figsize=(15, 5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    layers = list(dict.fromkeys(t.layer for t in d.tensors))
    names = list(dict.fromkeys(f"{t.role} {w}" for t in d.tensors for w in t.directions))
    cells = np.full((len(layers), len(names)), np.nan)
    for t in d.tensors:
        for way in t.directions:
            place = layers.index(t.layer), names.index(f"{t.role} {way}")
            cells[place] = t.flushed_percent
    image = left.imshow(np.maximum(cells, 1e-3), norm="log", vmax=100, vmin=1e-3, aspect="auto")
    left.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize="small")
    left.set_yticks(range(len(layers)), layers, fontsize="small")
    left.set_title("flushed to zero, %")
    figure.colorbar(image, ax=left)
    if tensors:
        worst = tensors[0]
        errors = np.maximum(np.array(worst.plots.error_map), 1e-3)
        extent = (0.0, float(worst.k), float(worst.rows_seen), 0.0)
        image = middle.imshow(errors, norm="log", aspect="auto", extent=extent)
        middle.set(title=f"error of pieces, %\n{worst.name}", xlabel="k", ylabel="row")
        figure.colorbar(image, ax=middle)
    for curve in d.curves:
        lengths, never, promoted = zip(*curve.points, strict=True)
        (line,) = right.plot(lengths, _drawn(never), "o-", label=f"{curve.name}, never")
        right.plot(lengths, _drawn(promoted), "s--", color=line.get_color(), label="at 128")
    right.set(title=f"sums on {d.machine}, %", xlabel="K", xscale="log", yscale="log")
    ks = sorted({point[0] for curve in d.curves for point in curve.points})
    right.set_xticks(ks, [f"{k}" for k in ks], rotation=60)
    right.minorticks_off()
    right.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    return path


def _drawn(values: Sequence[float]) -> list[float]:
    return [math.nan if math.isnan(v) else max(v, 1e-4) for v in values]
