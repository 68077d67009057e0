"""How the character language model is trained and evaluated, whatever arithmetic it has."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from char_lm import CONTEXT, CharLM, Text, windows

BATCH, LEARNING_RATE = 12, 2e-3
WARMUP_STEPS = 100
HELD_OUT_BATCHES, HELD_OUT_BATCH = 20, 32

Params = Any  # a tree of arrays


@dataclass(frozen=True)
class Trained:
    """What training ended with."""

    losses: list[float]  # of each step
    held_out: float
    step_ms: float
    params: Params


def train(
    model: CharLM,
    seed: int,
    steps: int,
    text: Text,
    report: Callable[[float], None],
    *,
    batch: int = BATCH,
    held_out_batches: int = HELD_OUT_BATCHES,
    held_out_batch: int = HELD_OUT_BATCH,
) -> Trained:
    """Trains a model from scratch.

    Args:
      model: what to train.
      seed: of weights, batches and stochastic rounding.
      steps: of AdamW.
      text: what to learn, and what to evaluate on.
      report: gets the loss of each step.
      batch: pieces of text in a step.
      held_out_batches: batches of held-out text that the held-out loss is a mean of.
      held_out_batch: pieces of text in such a batch.
    """
    optimizer = build_optimizer(steps)
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
        pieces = windows(text.train, batch, rng)
        start = time.perf_counter()
        params, state, value = step(params, state, pieces, number)
        losses.append(float(value))
        seconds.append(time.perf_counter() - start)
        report(losses[-1])
    held_out = evaluate(jax.jit(loss), params, text, held_out_batches, held_out_batch)
    step_ms = 1e3 * statistics.median(seconds[1:] or seconds)  # the first step compiles
    return Trained(losses, held_out, step_ms, params)


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


def evaluate(
    loss: Callable[..., jax.Array], params: Params, text: Text, batches: int, batch: int
) -> float:
    rng = np.random.default_rng(99)
    key = jax.random.key(0)  # read by nothing: only gradients are rounded stochastically
    pieces = (windows(text.held_out, batch, rng) for _ in range(batches))
    return statistics.fmean(float(loss(params, held_out, key)) for held_out in pieces)


def progress_bars(width: int = 17) -> Progress:
    """Bars for training runs, each with a description of `width` characters, and its loss."""
    return Progress(
        TextColumn(f"{{task.description:<{width}}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
