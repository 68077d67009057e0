"""What `train_char_lm.py` reports: tables, a JSON file, a picture, and what --check objects to."""

import json
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.table import Table

import jax_fp8 as fp8
from char_lm_shares import ROLES

BASELINE, COARSE, CONTROL = "f32", "e5m2 everywhere", "unscaled"
# What --check holds held-out gaps to. E5M2 everywhere has a bit less and is exempt from the first.
MAX_GAP_PERCENT, MIN_CONTROL_GAP_PERCENT = 1.2, 20.0
LAST_STEPS = 100  # "train loss" is the mean over so many steps at the end
LINES: dict[str, dict[str, Any]] = {
    BASELINE: {"color": "0.7", "linewidth": 5},
    CONTROL: {"color": "red", "linestyle": ":"},
}

Params = Any  # a tree of arrays


@dataclass(frozen=True)
class Run:
    """What one recipe and seed ended with."""

    recipe: str
    seed: int
    losses: list[float]
    held_out: float
    step_ms: float
    params: Params
    shares: dict[str, tuple[float, float]]  # by role: per cent flushed to zero, saturated

    @property
    def train(self) -> float:
        return statistics.fmean(self.losses[-LAST_STEPS:])


@dataclass(frozen=True)
class Summary:
    """One recipe, averaged over seeds; gaps compare with f32 of the same seed, in per cent."""

    recipe: str
    trains: list[float]  # train loss of each seed
    held_out: float
    gaps: list[float]
    step_ms: float
    shares: dict[str, tuple[float, float]]

    @property
    def train(self) -> float:
        return statistics.fmean(self.trains)

    @property
    def gap(self) -> float:
        return statistics.fmean(self.gaps)


def summarize(runs: list[Run]) -> list[Summary]:
    baseline = {run.seed: run.held_out for run in runs if run.recipe == BASELINE}

    def summary(recipe: str) -> Summary:
        own = [run for run in runs if run.recipe == recipe]
        return Summary(
            recipe,
            trains=[run.train for run in own],
            held_out=statistics.fmean(run.held_out for run in own),
            gaps=[100 * (run.held_out / baseline[run.seed] - 1) for run in own],
            step_ms=statistics.median(run.step_ms for run in own),
            shares={
                role: (
                    statistics.fmean(run.shares[role][0] for run in own),
                    statistics.fmean(run.shares[role][1] for run in own),
                )
                for role in own[0].shares
            },
        )

    return [summary(recipe) for recipe in dict.fromkeys(run.recipe for run in runs)]


def table_of(summaries: list[Summary], seeds: list[int], steps: int) -> Table:
    table = Table(title=f"{steps} steps, seeds: {', '.join(map(str, seeds))}")
    table.add_column("recipe")
    train_loss = f"train loss\n(last {min(steps, LAST_STEPS)})"
    for heading in (train_loss, "held-out\nloss", "held-out gap\nto f32", "time of\na step"):
        table.add_column(heading, justify="right")
    for row in summaries:
        if row.recipe == CONTROL:
            table.add_section()
        table.add_row(
            f"{row.recipe} (control)" if row.recipe == CONTROL else row.recipe,
            f"{row.train:.4f}",
            f"{row.held_out:.4f}",
            "" if row.recipe == BASELINE else gap_text(row),
            f"{row.step_ms:.1f} ms",
        )
    return table


def gap_text(row: Summary) -> str:
    by_seed = " ".join(f"{gap:+.2f}" for gap in row.gaps)
    return f"{row.gap:+.2f} %" + (f"\n{by_seed}" if len(row.gaps) > 1 else "")


def share_table(summaries: list[Summary]) -> Table:
    """What became of the operands of the trained models' linears."""
    table = Table(title="values that FP8 flushes to zero / saturates, %")
    table.add_column("recipe")
    for role in ROLES:
        table.add_column(f"{role}s", justify="right")
    for row in summaries:
        if row.shares:
            shares = (row.shares[role] for role in ROLES)
            table.add_row(row.recipe, *(f"{zero:.2f} / {top:.2f}" for zero, top in shares))
    return table


def failures_of(summaries: list[Summary]) -> list[str]:
    """Sentences about the recipes whose gap breaks its bound; a scaled recipe breaks it by NaN."""
    failures = []
    for row in summaries:
        if row.recipe == CONTROL and row.gap < MIN_CONTROL_GAP_PERCENT:
            bound = f"at least {MIN_CONTROL_GAP_PERCENT} % to tell FP8 with scales from without"
            failures.append(f"{row.recipe}: gap {row.gap:+.2f} %; expected {bound}")
        if row.recipe not in (CONTROL, BASELINE, COARSE) and not row.gap < MAX_GAP_PERCENT:
            bound = f"below {MAX_GAP_PERCENT} %"
            failures.append(f"{row.recipe}: gap {row.gap:+.2f} %; expected {bound}")
    trains = {row.recipe: row.trains for row in summaries}
    if {COARSE, "tensor"} <= set(trains):  # the same scales with one mantissa bit less
        for coarse, fine in zip(trains[COARSE], trains["tensor"], strict=True):
            if not coarse > fine:
                failures.append(f"{COARSE}: train loss {coarse:.4f}; expected above {fine:.4f}")
    return failures


def write_json(path: Path, runs: list[Run], summaries: list[Summary], text_source: str) -> None:
    content = {
        "text": text_source,
        "steps": len(runs[0].losses),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "jax_fp8": fp8.__version__,
        },
        "platform": jax.default_backend(),
        "machine": platform.machine(),
        "summary": [vars(row) | {"train": row.train, "gap": row.gap} for row in summaries],
        "runs": [
            {key: value for key, value in vars(run).items() if key != "params"} for run in runs
        ],
    }
    path.write_text(json.dumps(content, indent=1))


def plot(path: Path, runs: list[Run]) -> None:
    """Draws the first seed's losses, and their distance to f32 for what stays near it."""
    seed, steps = runs[0].seed, len(runs[0].losses)
    span = max(1, steps // 20)
    smooth = {
        run.recipe: np.convolve(run.losses, np.full(span, 1 / span), "valid")
        for run in runs
        if run.seed == seed
    }
    x = np.arange(span, steps + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for recipe, curve in smooth.items():
        left.plot(x, curve, label=recipe, **LINES.get(recipe, {}))
        if recipe not in (BASELINE, CONTROL):
            right.plot(x, 100 * (curve / smooth[BASELINE] - 1), label=recipe)
    right.axhline(0, label=BASELINE, zorder=0, **LINES[BASELINE])
    left.set(title="Training loss", ylabel="nats per character")
    right.set(title="Training loss, distance to f32", ylabel="%")
    for axes in (left, right):
        axes.set_xlabel(f"step (mean of {span}), seed {seed}")
        axes.grid(alpha=0.3)
        axes.legend(ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
