"""A training run that FP8 breaks, and how its diagnosis finds the place.

    python examples/diagnose_broken_run.py --out report

Three layers learn to copy a teacher. The recipe is a careless port: one static scale for all
inputs and weights, and another for all gradients; and every eighth output channel of the last layer
is 500 times as large as the others. The loss stalls. The diagnosis of a single step names layer,
tensor and remedy in its first lines; with the remedy the same run learns.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jax_fp8 as fp8
from jax_fp8.diagnosis.diagnose import Diagnosis

WIDTH, BATCH, LAYERS, RATE = 128, 256, ("up", "gate", "down"), 10.0
#: One number for every input and every weight: what fits most of them.
STATIC = fp8.StaticScaling(input=0.02, weight=0.02, gradient=1e-7)
RECIPES = {
    "float32": None,
    "one static scale": STATIC,
    "the remedy: scales from amax": fp8.TensorScaling(),
}
GAIN = jnp.ones(WIDTH).at[::8].set(500.0)

Params = dict[str, jax.Array]


def matmul(x: jax.Array, w: jax.Array, recipe: fp8.Recipe | None) -> jax.Array:
    return x @ w if recipe is None else fp8.matmul(x, w, recipe=recipe)


def model(params: Params, x: jax.Array, recipe: fp8.Recipe | None) -> jax.Array:
    for name in ("up", "gate"):
        with jax.named_scope(name):
            x = jnp.tanh(matmul(x, params[name], recipe))
    with jax.named_scope("down"):
        return matmul(x, params["down"] * GAIN, recipe)


def loss(params: Params, x: jax.Array, y: jax.Array, recipe: fp8.Recipe | None) -> jax.Array:
    """Mean square error, every channel in units of its own size."""
    return jnp.mean(((model(params, x, recipe) - y) / GAIN) ** 2)


def problem(seed: int) -> tuple[Params, jax.Array, jax.Array]:
    """Weights to start from, inputs, and what a teacher of the same kind makes of them."""
    rng = np.random.default_rng(seed)

    def weights() -> Params:
        size = np.sqrt(WIDTH)
        drawn = {name: rng.standard_normal((WIDTH, WIDTH)) / size for name in LAYERS}
        return {name: jnp.asarray(w, jnp.float32) for name, w in drawn.items()}

    x = jnp.asarray(rng.standard_normal((BATCH, WIDTH)), jnp.float32)
    return weights(), x, model(weights(), x, None)


def train(recipe: fp8.Recipe | None, steps: int, seed: int) -> list[float]:
    params, x, y = problem(seed)

    @jax.jit
    def step(params: Params) -> tuple[Params, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, x, y, recipe)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), value

    losses = []
    for _ in range(steps):
        params, value = step(params)
        losses.append(float(value))
    return losses


def diagnosis(seed: int) -> Diagnosis:
    params, x, y = problem(seed)

    def broken(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return loss(params, x, y, STATIC)

    return fp8.diagnose(broken, params, x, y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of gradient descent (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for report.html")
    arguments = parser.parse_args()
    console = Console()

    table = Table("arithmetic", "loss at first", "loss at last", title="Learning to copy a teacher")
    for name, recipe in RECIPES.items():
        losses = train(recipe, arguments.steps, arguments.seed)
        table.add_row(name, f"{losses[0]:.4f}", f"{losses[-1]:.4f}")
    console.print(table)

    found = diagnosis(arguments.seed)
    console.print("What the diagnosis of one step of the static run says first:")
    for verdict in found.verdicts[:3]:
        console.print(f"  {verdict}", soft_wrap=True)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        console.print(f"report: {found.to_html(arguments.out / 'report.html')}")


if __name__ == "__main__":
    main()
