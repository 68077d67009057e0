"""Handwritten digits learnt by a Flax Linen MLP, in float32 and in FP8: what changes?

    python examples/flax_dense.py

Every run starts from the same weights and sees the same batches; only the `dot_general_cls` of the
three `nn.Dense` layers differs. Digits this small are easy, so all scaled recipes should reach what
float32 reaches. "unscaled" is the negative control, with every scale fixed at 1 and gradients in
E4M3: gradients below 2^-10 become zero in it, and its test loss stays behind.
"""

import functools
import statistics
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from rich.console import Console

import digits
import jax_fp8 as fp8

WIDTH, LEARNING_RATE, EPOCHS = 256, 1e-3, 40
RECIPES = {
    "f32": None,
    "block": fp8.BlockScaling(),
    "row": fp8.RowScaling(),
    "tensor": fp8.TensorScaling(),
    "mx": fp8.MXScaling(),
    "unscaled": fp8.StaticScaling(gradient_format=fp8.E4M3FN),
}

Params = Any  # a tree of arrays


class MLP(nn.Module):
    """Three dense layers; `recipe` None is float32."""

    recipe: fp8.Recipe | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dot = self.recipe and functools.partial(fp8.flax.linen.DotGeneral, recipe=self.recipe)
        for features in (WIDTH, WIDTH):
            x = nn.relu(nn.Dense(features, dot_general_cls=dot)(x))
        return nn.Dense(digits.CLASSES, dot_general_cls=dot)(x)


def loss_of(logits: jax.Array, labels: digits.Labels) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def step(
    state: TrainState, images: digits.Images, labels: digits.Labels
) -> tuple[TrainState, jax.Array]:
    def loss(params: Params) -> jax.Array:
        return loss_of(state.apply_fn({"params": params}, images), labels)

    value, gradient = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradient), value


def train(name: str, data: digits.Digits, epochs: int, seed: int) -> digits.Result:
    model = MLP(RECIPES[name])
    state = TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(seed), data.images[:1])["params"],
        tx=optax.adamw(LEARNING_RATE),
    )
    seconds = []
    for images, labels in data.batches(epochs, seed):
        start = time.perf_counter()
        state, value = step(state, images, labels)
        value.block_until_ready()
        seconds.append(time.perf_counter() - start)
    logits = state.apply_fn({"params": state.params}, data.test_images)
    return digits.Result(
        name,
        loss=float(loss_of(logits, data.test_labels)),
        accuracy=float(jnp.mean(jnp.argmax(logits, -1) == data.test_labels)),
        step_ms=1e3 * statistics.median(seconds),
    )


def main() -> None:
    arguments, console = digits.arguments_of(__doc__, EPOCHS), Console()
    data = digits.load()
    results = []
    with console.status("training") as status:
        for name in RECIPES:
            status.update(f"training: {name}")
            results.append(train(name, data, arguments.epochs, arguments.seed))
    title = f"{arguments.epochs} epochs, seed {arguments.seed}"
    console.print(digits.table_of(results, title))


if __name__ == "__main__":
    main()
