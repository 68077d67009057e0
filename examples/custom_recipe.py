"""A recipe of one's own: what does one scale cover? Compared on data with outlier channels.

    python examples/custom_recipe.py

A recipe is a frozen dataclass that says, for each role ("input", "weight" or "gradient"), which
tile of the matrix (rows, k) shares one scale; k is the axis that the GEMM contracts, and -1 is a
whole dim. Everything else follows: quantizing, the kernel, both gradients, `vmap` and Flax.

A few channels of x are far larger than the rest, as in the activations of large language models.
Where such a channel shares its scale with ordinary ones, these lose accuracy: that is their cost.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import jax_fp8 as fp8
from jax_fp8.recipes import Role


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallBlocks(fp8.Recipe):
    """1×size tiles for inputs, size×size for weights, one scale for a whole gradient."""

    size: int = 64

    def tile(self, role: Role) -> tuple[int, int]:
        if role == "gradient":
            return (-1, -1)
        return (1, self.size) if role == "input" else (self.size, self.size)


RECIPES = {
    "TensorScaling": fp8.TensorScaling(),
    "RowScaling": fp8.RowScaling(),
    "BlockScaling": fp8.BlockScaling(),
    "MXScaling": fp8.MXScaling(),
    "SmallBlocks": SmallBlocks(),
    "SmallBlocks, 16": SmallBlocks(size=16),
}


@dataclasses.dataclass(frozen=True)
class Data:
    """x (m, k), w (k, n) and a cotangent g (m, n); `ordinary` marks channels without outliers."""

    x: jax.Array
    w: jax.Array
    g: jax.Array
    ordinary: npt.NDArray[np.bool_]


def build_data(size: int, outlier: float) -> Data:
    """Normal data, in which one channel of x in 200 is `outlier` times as large."""
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal((size, size)).astype(np.float32) for _ in range(3))
    ordinary = np.ones(size, np.bool_)
    ordinary[rng.choice(size, max(size // 200, 1), replace=False)] = False
    x[:, ~ordinary] *= outlier
    return Data(jnp.asarray(x), jnp.asarray(w), jnp.asarray(1e-4 * g), ordinary)


def percent(actual: jax.Array, exact: npt.NDArray[np.float64]) -> str:
    error = np.linalg.norm(np.asarray(actual, np.float64) - exact) / np.linalg.norm(exact)
    return f"{100 * error:.2f} %"


def row_of(recipe: fp8.Recipe, data: Data) -> list[str]:
    """The tile of x, what quantizing x does to ordinary channels, and errors of the GEMMs."""
    tile, power_of_two = recipe.tile("input"), recipe.power_of_two
    q = fp8.quantize(data.x, recipe.format("input"), tile, power_of_two=power_of_two)
    flushed = np.asarray(q.values)[:, data.ordinary] == 0
    out, pullback = jax.vjp(lambda x, w: fp8.matmul(x, w, recipe=recipe), data.x, data.w)
    dx, dw = pullback(data.g)
    x, w, g = (np.asarray(a, np.float64) for a in (data.x, data.w, data.g))
    return [
        " × ".join("all" if size == -1 else str(size) for size in tile),
        f"{100 * flushed.mean():.2f} %",
        percent(fp8.dequantize(q)[:, data.ordinary], x[:, data.ordinary]),
        percent(out, x @ w),
        percent(dx, g @ w.T),
        percent(dw[data.ordinary], x[:, data.ordinary].T @ g),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=1024, help="m, k and n (default: 1024)")
    parser.add_argument(
        "--outlier", type=float, default=2e4, help="factor of outlier channels (default: 20000)"
    )
    arguments = parser.parse_args()
    if arguments.size < 1:
        parser.error(f"--size {arguments.size}: at least 1")
    data = build_data(arguments.size, arguments.outlier)
    number = int((~data.ordinary).sum())
    title = f"{number} of {arguments.size} channels of x are {arguments.outlier:g} times as large"
    table = Table(title=title, caption="* in ordinary channels")
    table.add_column("recipe", no_wrap=True)
    for heading in ("tile of x", "x* made\nzero"):
        table.add_column(heading, justify="right")
    for operand in ("x*", "x·w", "dx", "dw*"):
        table.add_column(f"error\nof {operand}", justify="right")
    for name, recipe in RECIPES.items():
        table.add_row(name, *row_of(recipe, data))
    Console().print(table)


if __name__ == "__main__":
    main()
