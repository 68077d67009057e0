"""Data that hurts FP8 in known ways, and what is expected of each."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8

M, N, K = 256, 256, 1024


def normal(rows: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


def spike(size: float = 1e6) -> np.ndarray:
    x = normal(M, K)
    x[3, 5] = size
    return x


def row_spread() -> np.ndarray:
    exponents = np.random.default_rng(1).uniform(-20, 0, (M, 1))
    return (normal(M, K) * 2.0**exponents).astype(np.float32)


def outlier_channels() -> np.ndarray:
    x = normal(M, K)
    x[:, np.random.default_rng(2).choice(K, K // 200, replace=False)] *= 100
    return x


WEIGHTS = normal(K, N, seed=3)


def product(recipe: fp8.Recipe) -> Any:
    """A function named as a layer would be."""

    def layer(x, w):
        return fp8.matmul(x, w, recipe=recipe)

    return layer


def mx_floor(x: Any) -> fp8.ScaledArray:
    """Quantised by the rule of the MX specification, which saturates."""
    amax = jnp.max(jnp.abs(x.reshape(x.shape[0], -1, 32)), axis=-1)
    return fp8.quantize(x, "e4m3", (1, 32), scale=jnp.exp2(jnp.floor(jnp.log2(amax)) - 8))


def mx_floor_product(x: Any, w: Any) -> Any:
    dims = (((1,), (1,)), ((), ()))
    return fp8.scaled_dot_general(mx_floor(x), mx_floor(w), dims)


tensor_product = functools.partial(product, fp8.TensorScaling())
