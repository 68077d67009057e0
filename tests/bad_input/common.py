"""What a bad call is, and the operands that most of them share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_fp8 as fp8


class Bad(NamedTuple):
    """A call, its operands, the error it must raise, and parts that the message must have."""

    call: Callable[..., Any]
    operands: tuple[Any, ...]
    error: type[Exception]
    parts: tuple[str, ...]


ONE = np.float32(1)
E4M3FN = ml_dtypes.float8_e4m3fn
X, W = np.ones((4, 256), np.float32), np.ones((256, 8), np.float32)
LHS, RHS = X.astype(E4M3FN), W.astype(ml_dtypes.float8_e5m2)
FNUZ = X.astype(ml_dtypes.float8_e4m3fnuz)
Q_LHS = fp8.ScaledArray(LHS, np.ones((1, 1), np.float32), (4, 256))
Q_RHS = fp8.ScaledArray(RHS, np.ones((1, 1), np.float32), (256, 8))
NUMBERS = (((1,), (0,)), ((), ()))
FNUZ_PARTS = ("is an FNUZ format", "convert the values to float8_e4m3fn or float8_e5m2")
NOT_DIVIDING = "do not divide it evenly"
GIVE_TILE = "say what one covers with lhs_tile=(rows, columns)"
OFFERED = "float32, bfloat16 and float16 are offered"
NO_GRADIENT = "differentiate matmul, dot_general"


def scaled(lhs_scale, rhs_scale=ONE, lhs=LHS, rhs=RHS, **options):
    """scaled_matmul with the scales first."""
    return fp8.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, **options)


def with_options(call, **options):
    return lambda *operands: call(*operands, **options)


def gradient(call):
    return jax.grad(lambda *operands: jnp.sum(call(*operands)))


def scaled_dot(lhs, rhs):
    return fp8.scaled_dot_general(lhs, rhs, NUMBERS)


def scaled_array(scale_shape, tile, dtype=np.float32):
    return fp8.ScaledArray(LHS, np.ones(scale_shape, dtype), tile)
