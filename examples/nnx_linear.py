"""Handwritten digits learnt by a Flax NNX MLP, in float32 and in FP8: one argument of `nnx.Linear`.

python examples/nnx_linear.py
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console

import digits
import jax_fp8 as fp8

WIDTH, LEARNING_RATE, EPOCHS = 256, 1e-3, 40
DOTS: dict[str, Callable[..., jax.Array]] = {
    "f32": jax.lax.dot_general,
    "FP8": fp8.flax.nnx.DotGeneral(),
    "FP8, a scale per row": fp8.flax.nnx.DotGeneral(recipe=fp8.RowScaling()),
}


def build_model(dot_general: Callable[..., jax.Array], seed: int) -> nnx.Sequential:
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(
        nnx.Linear(64, WIDTH, dot_general=dot_general, rngs=rngs),
        nnx.relu,
        nnx.Linear(WIDTH, WIDTH, dot_general=dot_general, rngs=rngs),
        nnx.relu,
        nnx.Linear(WIDTH, digits.CLASSES, dot_general=dot_general, rngs=rngs),
    )


def loss_of(model: nnx.Sequential, images: digits.Images, labels: digits.Labels) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@nnx.jit
def step(
    model: nnx.Sequential,
    optimizer: nnx.Optimizer[nnx.Sequential],
    images: digits.Images,
    labels: digits.Labels,
) -> jax.Array:
    value, gradient = nnx.value_and_grad(loss_of)(model, images, labels)
    optimizer.update(model, gradient)
    return value


def train(name: str, data: digits.Digits, epochs: int, seed: int) -> digits.Result:
    model = build_model(DOTS[name], seed)
    optimizer = nnx.Optimizer(model, optax.adamw(LEARNING_RATE), wrt=nnx.Param)
    seconds = []
    for images, labels in data.batches(epochs, seed):
        start = time.perf_counter()
        step(model, optimizer, images, labels).block_until_ready()
        seconds.append(time.perf_counter() - start)
    predicted = jnp.argmax(model(data.test_images), -1)
    return digits.Result(
        name,
        loss=float(loss_of(model, data.test_images, data.test_labels)),
        accuracy=float(jnp.mean(predicted == data.test_labels)),
        step_ms=1e3 * statistics.median(seconds),
    )


def main() -> None:
    arguments, data = digits.arguments_of(__doc__, EPOCHS), digits.load()
    results = [train(name, data, arguments.epochs, arguments.seed) for name in DOTS]
    title = f"{arguments.epochs} epochs, seed {arguments.seed}"
    Console().print(digits.table_of(results, title))


if __name__ == "__main__":
    main()
