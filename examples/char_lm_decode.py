"""The transformer of `char_lm.py` for inference: one character at a time, with a cache.

The linears' weights may be of any kind, as long as `linear(x, w)` multiplies with them: arrays, or
`fp8.prepare`d ones. Layers stand in a list and not in a stack that a scan goes through, because XLA
would copy each layer's weights out of the stack in every step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from char_lm import CONTEXT, HEADS, WIDTH

HEAD_SIZE = WIDTH // HEADS
#: Characters that a window of CONTEXT starts with; the others are generated.
PROMPT = CONTEXT // 2
LINEARS = ("qkv", "o", "w1", "w3", "w2")

Linear = Callable[[jax.Array, Any], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """Two norms, and the five linears, each (inputs, outputs)."""

    norm1: jax.Array
    norm2: jax.Array
    qkv: Any
    o: Any
    w1: Any
    w3: Any
    w2: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """A model: everything but the layers' linears is float32."""

    embedding: jax.Array
    position: jax.Array
    layers: list[Layer]
    norm: jax.Array
    head: jax.Array

    def with_linears(self, convert: Callable[[Any], Any]) -> "Weights":
        """The same model with other weights in the linears."""
        layers = [
            dataclasses.replace(x, **{name: convert(getattr(x, name)) for name in LINEARS})
            for x in self.layers
        ]
        return dataclasses.replace(self, layers=layers)

    @property
    def linears_bytes(self) -> int:
        """Memory of the linears' weights, scales included."""
        linears = [getattr(layer, name) for layer in self.layers for name in LINEARS]
        return sum(leaf.nbytes for leaf in jax.tree.leaves(linears))


def weights_of(params: Any) -> Weights:
    """The weights of a trained `CharLM`."""
    tree = params["params"]
    layers = [
        Layer(
            tree[name]["RMSNorm_0"]["scale"],
            tree[name]["RMSNorm_1"]["scale"],
            **{linear: tree[name][linear]["kernel"] for linear in LINEARS},
        )
        for name in sorted(name for name in tree if name.startswith("Block_"))
    ]
    return Weights(
        tree["Embed_0"]["embedding"],
        tree["position"],
        layers,
        tree["RMSNorm_0"]["scale"],
        tree["Dense_0"]["kernel"],
    )


def random_weights(num_symbols: int, width: int, num_layers: int) -> Weights:
    """An untrained model of any width, to see what a step costs."""
    keys = iter(jax.random.split(jax.random.key(0), 3 + 5 * num_layers))

    def normal(rows: int, cols: int, gain: float = 1.0) -> jax.Array:
        return gain / math.sqrt(rows) * jax.random.normal(next(keys), (rows, cols))

    one = jnp.ones(width)
    return Weights(
        normal(num_symbols, width),
        normal(CONTEXT, width),
        [
            Layer(
                one,
                one,
                qkv=normal(width, 3 * width),
                o=normal(width, width, 0.5),
                w1=normal(width, 4 * width),
                w3=normal(width, 4 * width),
                w2=normal(4 * width, width, 0.5),
            )
            for _ in range(num_layers)
        ],
        one,
        normal(width, num_symbols),
    )


# One step


def empty_cache(weights: Weights, batch: int) -> jax.Array:
    """Keys and values, (layers, 2, batch, CONTEXT, heads, HEAD_SIZE)."""
    heads = weights.embedding.shape[1] // HEAD_SIZE
    return jnp.zeros((len(weights.layers), 2, batch, CONTEXT, heads, HEAD_SIZE))


def decode_step(
    linear: Linear, weights: Weights, cache: jax.Array, tokens: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Characters (batch,) at `position` to the logits (batch, num_symbols) of the next ones."""
    x = weights.embedding[tokens] + weights.position[position]
    for i, layer in enumerate(weights.layers):
        heads = linear(rms_norm(x, layer.norm1), layer.qkv)
        q, k, v = jnp.moveaxis(heads.reshape(len(tokens), 3, -1, HEAD_SIZE), 1, 0)
        cache = cache.at[i, :, :, position].set(jnp.stack([k, v]))
        x = x + linear(attention(q, cache[i, 0], cache[i, 1], position), layer.o)
        y = rms_norm(x, layer.norm2)
        x = x + linear(jax.nn.silu(linear(y, layer.w1)) * linear(y, layer.w3), layer.w2)
    return rms_norm(x, weights.norm) @ weights.head, cache


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attention(q: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array) -> jax.Array:
    """Queries (batch, heads, HEAD_SIZE) over the cached characters up to `position`."""
    scores = jnp.einsum("bhd,bshd->bhs", q, keys) / math.sqrt(HEAD_SIZE)
    shares = jax.nn.softmax(jnp.where(jnp.arange(CONTEXT) <= position, scores, -1e9))
    return jnp.einsum("bhs,bshd->bhd", shares, values).reshape(len(q), -1)


# Many steps


@functools.partial(jax.jit, static_argnums=0)
def logits_of(linear: Linear, weights: Weights, pieces: jax.Array) -> jax.Array:
    """Logits (batch, length, num_symbols) behind every character of given pieces of text."""

    def step(cache: jax.Array, column: Any) -> tuple[jax.Array, jax.Array]:
        logits, cache = decode_step(linear, weights, cache, *column)
        return cache, logits

    columns = pieces.T, jnp.arange(pieces.shape[1])
    _, logits = jax.lax.scan(step, empty_cache(weights, len(pieces)), columns)
    return logits.swapaxes(0, 1)


@functools.partial(jax.jit, static_argnums=0)
def fill_window(
    linear: Linear, weights: Weights, prompt: jax.Array, key: jax.Array, temperature: float
) -> jax.Array:
    """Reads (batch, PROMPT) characters and generates as many, in CONTEXT - 1 steps."""

    def step(carry: Any, position: jax.Array) -> Any:
        cache, tokens, key = carry
        logits, cache = decode_step(linear, weights, cache, tokens, position)
        key, noise = jax.random.split(key)
        drawn = jax.random.categorical(noise, logits / temperature)
        given = prompt[:, jnp.minimum(position + 1, PROMPT - 1)]
        tokens = jnp.where(position + 1 < PROMPT, given, drawn)
        return (cache, tokens, key), tokens

    start = empty_cache(weights, len(prompt)), prompt[:, 0], key
    _, written = jax.lax.scan(step, start, jnp.arange(CONTEXT - 1))
    return written[PROMPT - 1 :].T


def generate(
    linear: Linear, weights: Weights, prompt: jax.Array, windows: int, temperature: float
) -> np.ndarray:
    """What follows (batch, PROMPT) characters: (batch, windows * PROMPT).

    Positions are learnt and end at CONTEXT: a full window starts again with its last characters.
    """
    pieces = []
    for number in range(windows):
        key = jax.random.fold_in(jax.random.key(0), number)
        prompt = fill_window(linear, weights, prompt, key, temperature)
        pieces.append(np.asarray(prompt))
    return np.concatenate(pieces, axis=1)
