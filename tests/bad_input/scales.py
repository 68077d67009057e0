"""Scales and tiles that do not fit their operands."""

import ml_dtypes
import numpy as np

import jax_fp8 as fp8
from bad_input.common import (
    E4M3FN,
    GIVE_TILE,
    LHS,
    NOT_DIVIDING,
    ONE,
    Q_RHS,
    RHS,
    Bad,
    X,
    scaled,
    scaled_array,
    scaled_dot,
    with_options,
)
from jax_fp8 import formats

SCALES = {
    "too few scales": Bad(
        scaled,
        (np.ones((3, 1), np.float32),),
        ValueError,
        ("scaled_matmul: lhs_scale has shape (3, 1)", "dim 0 (size 4) of lhs", GIVE_TILE),
    ),
    "too many scales": Bad(
        scaled,
        (ONE, np.ones((1, 9), np.float32)),
        ValueError,
        ("rhs_scale has shape (1, 9)", "9 entries along dim 1 (size 8) of rhs", NOT_DIVIDING),
    ),
    "scale of rank 1": Bad(
        scaled,
        (np.ones(4, np.float32),),
        ValueError,
        ("scaled_matmul: lhs_scale has shape (4,)", "lhs of shape (4, 256)", "such as (4, 1)"),
    ),
    "scale of rank 3": Bad(
        scaled,
        (ONE, np.ones((1, 1, 8), np.float32)),
        ValueError,
        ("scaled_matmul: rhs_scale has shape (1, 1, 8)", "rhs of shape (256, 8)", "such as (1, 8)"),
    ),
    "scale against tile": Bad(
        with_options(scaled, lhs_tile=(1, 64)),
        (np.ones((4, 2), np.float32),),
        ValueError,
        ("scaled_matmul: lhs_scale has shape (4, 2)", "(4, 256)", "lhs_tile (1, 64) needs (4, 4)"),
    ),
    "bfloat16 scale": Bad(
        scaled,
        (np.ones((4, 1), ml_dtypes.bfloat16),),
        TypeError,
        ("scaled_matmul: lhs_scale has dtype bfloat16", "scale.astype(jnp.float32)"),
    ),
    "integer scale": Bad(
        scaled,
        (ONE, np.ones((1, 8), np.int32)),
        TypeError,
        ("scaled_matmul: rhs_scale has dtype int32", "scale.astype(jnp.float32)"),
    ),
    "E8M0 with float32 scale": Bad(
        scaled,
        (np.ones((4, 8), formats.E8M0),),
        ValueError,
        ("scaled_matmul: lhs has scales of kind 'mx'", "rhs of kind 'tensor'", "goes with 'mx'"),
    ),
    "scale of a ScaledArray": Bad(
        scaled_dot,
        (scaled_array((4, 1), (1, 128)), Q_RHS),
        ValueError,
        ("scaled_dot_general: lhs scale has shape (4, 1)", "shape (4, 256)", "need (4, 2)"),
    ),
    "dtype of a ScaledArray's scale": Bad(
        scaled_dot,
        (scaled_array((4, 2), (1, 128), ml_dtypes.bfloat16), Q_RHS),
        TypeError,
        ("scaled_dot_general: lhs scale has dtype bfloat16", "scale.astype(jnp.float32)"),
    ),
    "batched scale": Bad(
        lambda lhs, scale: fp8.scaled_matmul(lhs, RHS, scale, ONE),
        (np.stack([LHS] * 3), np.ones((2, 4, 1), np.float32)),
        ValueError,
        ("scaled_matmul: batch dim 0 has sizes 3 (lhs)", "2 (lhs scale)", "equal or 1"),
    ),
    "scale given to quantize": Bad(
        lambda x, scale: fp8.quantize(x, "e4m3", (1, 128), scale=scale),
        (X, np.ones((4, 1), np.float32)),
        ValueError,
        ("quantize: scale has shape (4, 1)", "need (4, 2)"),
    ),
    "dtype of a scale given to quantize": Bad(
        lambda x, scale: fp8.quantize(x, "e4m3", (1, 128), scale=scale),
        (X, np.ones((4, 2), ml_dtypes.bfloat16)),
        TypeError,
        ("quantize: scale has dtype bfloat16", "scale.astype(jnp.float32)"),
    ),
}

TILES = {
    "ambiguous tile": Bad(
        scaled,
        (np.ones((4, 3), np.float32), ONE, np.ones((4, 300), E4M3FN), np.ones((300, 8), E4M3FN)),
        ValueError,
        ("scaled_matmul: lhs_scale has shape (4, 3)", "(size 300)", "100 or of 128", GIVE_TILE),
    ),
    "uneven tile": Bad(
        scaled,
        (ONE, np.ones((3, 1), np.float32)),
        ValueError,
        ("rhs_scale has shape (3, 1)", "dim 0 (size 256) of rhs", NOT_DIVIDING, "rhs_tile="),
    ),
    "tile of too many dims": Bad(
        with_options(fp8.quantize, tile=(1, 1, 128)),
        (X,),
        ValueError,
        ("quantize: tile (1, 1, 128) has 3 sizes", "shape (4, 256)", "one size per trailing dim"),
    ),
    "tile of size 0": Bad(
        with_options(fp8.quantize, tile=(0, 128)),
        (X,),
        ValueError,
        ("quantize: tile (0, 128) has the size 0", "integers >= 1, or -1 for a whole dim"),
    ),
    "tile of floats": Bad(
        with_options(fp8.quantize, tile=(1, 128.0)),
        (X,),
        ValueError,
        ("quantize: tile (1, 128.0) has the size 128.0", "integers >= 1"),
    ),
    "tile that is a number": Bad(
        with_options(fp8.quantize, tile=128), (X,), TypeError, ("quantize: tile", "128")
    ),
    "tile 0 of a ScaledArray": Bad(
        fp8.dequantize, (scaled_array((4, 1), (1, 0)),), ValueError, ("dequantize: q", "(1, 0)")
    ),
    "tile -1 of a ScaledArray": Bad(
        scaled_dot,
        (scaled_array((4, 1), (1, -1)), Q_RHS),
        ValueError,
        ("scaled_dot_general: lhs", "tile (1, -1)", ">= 1"),
    ),
}
