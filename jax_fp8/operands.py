"""Checks of what users pass in: dtypes of operands, scaled arrays, keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8 import formats
from jax_fp8.array import ScaledArray
from jax_fp8.prepared import PreparedArray
from jax_fp8.primitive import refuse_explicit

__all__ = [
    "FLOAT_DTYPES",
    "NOT_LHS",
    "OFFERED",
    "as_float_array",
    "check_float_dtype",
    "check_prepared",
    "check_rounding",
    "check_scaled_array",
]

Array = jax.Array

#: dtypes of real numbers that kernels read and write.
FLOAT_DTYPES = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))
NOT_LHS = (
    "a PreparedArray, which only the rhs of a product can be; swap the operands, or take its "
    "unprepare() or dequantize()"
)
OFFERED = "float32, bfloat16 and float16 are offered"


def check_scaled_array(q: Any, call: str, side: str) -> None:
    """Raises unless `q` is a sound ScaledArray that no Explicit mesh axis shards."""
    if isinstance(q, PreparedArray):
        raise TypeError(f"{call}: {side} is {NOT_LHS}")
    if not isinstance(q, ScaledArray):
        raise TypeError(
            f"{call}: {side} is {type(q).__name__}; it must be a ScaledArray: use quantize, or "
            "scaled_matmul for raw arrays"
        )
    q.check(call, side)
    refuse_explicit(q.values, call, side)
    refuse_explicit(q.scale, call, f"{side} scale")


def check_prepared(w: PreparedArray, call: str, side: str = "rhs") -> None:
    """Raises unless `w` is sound and no Explicit mesh axis shards it."""
    w.check(call, side)
    refuse_explicit(w.values, call, side)
    refuse_explicit(w.scale, call, f"{side} scale")


def check_rounding(rounding: str, key: Any, call: str) -> bool:
    """Whether `rounding` is stochastic; raises if it is unknown or does not go with `key`."""
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"{call}: rounding is {rounding!r}; it must be 'nearest' or 'stochastic'")
    if rounding == "stochastic" and key is None:
        raise ValueError(
            f"{call}: stochastic rounding needs randomness; give key=jax.random.key(seed), a new "
            "one for each call"
        )
    if rounding == "nearest" and key is not None:
        raise ValueError(f"{call}: key is given, but nothing here rounds stochastically; drop it")
    return rounding == "stochastic"


def as_float_array(x: Any, call: str, side: str) -> Array:
    """Returns `x` as a JAX array of one of `FLOAT_DTYPES`, or raises."""
    if isinstance(x, PreparedArray):
        raise TypeError(f"{call}: {side} is {NOT_LHS}")
    if isinstance(x, ScaledArray):
        raise TypeError(
            f"{call}: {side} is a ScaledArray; this call quantises real numbers itself. Use "
            "scaled_dot_general for two ScaledArrays, prepare to multiply real numbers with it, or "
            "its dequantize()"
        )
    x = jnp.asarray(x)
    check_float_dtype(x.dtype, call, side)
    return x


def check_float_dtype(dtype: npt.DTypeLike, call: str, side: str) -> None:
    """Raises unless `dtype` is one of real numbers that the kernels read."""
    dtype = np.dtype(dtype)
    if dtype in FLOAT_DTYPES:
        return
    if dtype.name.startswith("float8"):
        formats.lookup(dtype, call=f"{call}: {side}")
        raise TypeError(
            f"{call}: {side} has the FP8 dtype {dtype.name}; this call quantises real numbers "
            "itself. For FP8 operands with their scales use scaled_matmul or scaled_dot_general"
        )
    raise TypeError(f"{call}: {side} has dtype {dtype.name}; convert it with astype: {OFFERED}")
