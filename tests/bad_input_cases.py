"""Calls that must raise, as a table: operands, error, and what its message must say."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec

import jax_fp8 as fp8
from jax_fp8 import formats


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


BAD = {
    # Scales.
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
    # Tiles.
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
    # Formats and dtypes.
    "FNUZ lhs": Bad(
        fp8.scaled_matmul,
        (FNUZ, RHS, ONE, ONE),
        TypeError,
        ("scaled_matmul: lhs: float8_e4m3fnuz", *FNUZ_PARTS),
    ),
    "FNUZ rhs": Bad(
        fp8.scaled_matmul,
        (LHS, W.astype(ml_dtypes.float8_e5m2fnuz), ONE, ONE),
        TypeError,
        ("scaled_matmul: rhs: float8_e5m2fnuz", *FNUZ_PARTS),
    ),
    "FNUZ ScaledArray": Bad(
        scaled_dot,
        (fp8.ScaledArray(FNUZ, np.ones((1, 1), np.float32), (4, 256)), Q_RHS),
        TypeError,
        ("scaled_dot_general: lhs: float8_e4m3fnuz", *FNUZ_PARTS),
    ),
    "FNUZ format": Bad(
        with_options(fp8.quantize, format="e5m2fnuz"),
        (X,),
        TypeError,
        ("quantize: e5m2fnuz", *FNUZ_PARTS),
    ),
    "unknown format": Bad(
        with_options(fp8.quantize, format="e3m4"),
        (X,),
        TypeError,
        ("quantize: 'e3m4' is not an FP8 format", "'e4m3fn', 'e5m2'"),
    ),
    "FP8 lhs of matmul": Bad(
        fp8.matmul,
        (LHS, W),
        TypeError,
        ("matmul: lhs has the FP8 dtype float8_e4m3fn", "use scaled_matmul or scaled_dot_general"),
    ),
    "FP8 rhs of dot_general": Bad(
        lambda x, w: fp8.dot_general(x, w, NUMBERS),
        (X, RHS),
        TypeError,
        ("dot_general: rhs has the FP8 dtype float8_e5m2", "use scaled_matmul or"),
    ),
    "high-precision lhs of scaled_matmul": Bad(
        fp8.scaled_matmul,
        (X, RHS, ONE, ONE),
        TypeError,
        ("scaled_matmul: lhs", "float32", "is not an FP8 format", "'e4m3fn', 'e5m2'"),
    ),
    "raw lhs of scaled_dot_general": Bad(
        scaled_dot, (LHS, Q_RHS), TypeError, ("scaled_dot_general: lhs is", "use quantize, or")
    ),
    "raw operand of dequantize": Bad(
        fp8.dequantize, (LHS,), TypeError, ("dequantize: q is", "must be a ScaledArray")
    ),
    "integers": Bad(
        fp8.matmul,
        (X, W.astype(np.int32)),
        TypeError,
        ("matmul: rhs has dtype int32; convert it with astype", OFFERED),
    ),
    "integers to quantize": Bad(
        fp8.quantize,
        (X.astype(np.int8),),
        TypeError,
        ("quantize: x has dtype int8; convert it with astype", OFFERED),
    ),
    "complex numbers": Bad(
        fp8.matmul,
        (X.astype(np.complex64), W),
        TypeError,
        ("matmul: lhs has dtype complex64; convert it with astype", OFFERED),
    ),
    "integer result": Bad(
        with_options(fp8.matmul, preferred_element_type=jnp.int32),
        (X, W),
        TypeError,
        ("matmul: preferred_element_type int32 is not offered", "float32, bfloat16 or float16"),
    ),
    "FP8 result": Bad(
        with_options(scaled, preferred_element_type=jnp.float8_e4m3fn),
        (ONE,),
        TypeError,
        ("scaled_matmul: preferred_element_type float8_e4m3fn is not offered", "use float32"),
    ),
    "integer result of dequantize": Bad(
        with_options(fp8.dequantize, dtype=np.int8),
        (Q_LHS,),
        TypeError,
        ("dequantize: dtype int8 is not offered", OFFERED),
    ),
    # Sizes.
    "contracting sizes of matmul": Bad(
        fp8.matmul,
        (X, W[:200]),
        ValueError,
        ("matmul: lhs contracting dim 1 has size 256, rhs contracting dim 0 has size 200", "equal"),
    ),
    "contracting sizes of dot_general": Bad(
        lambda x, w: fp8.dot_general(x, w, (((1,), (1,)), ((), ()))),
        (X, np.ones((8, 200), np.float32)),
        ValueError,
        ("dot_general: lhs contracting dim 1 has size 256, rhs contracting dim 1 has size 200",),
    ),
    "contracting sizes of scaled_matmul": Bad(
        fp8.scaled_matmul,
        (LHS, RHS[:200], ONE, ONE),
        ValueError,
        ("scaled_matmul: lhs contracting dim 1 has size 256, rhs contracting dim 0 has size 200",),
    ),
    "contracting sizes of einsum": Bad(
        lambda x, w: fp8.einsum("mk,kn->mn", x, w),
        (X, W[:200]),
        ValueError,
        ("einsum: 'mk,kn->mn' does not fit shapes (4, 256), (200, 8)", "'k'"),
    ),
    "batch sizes of matmul": Bad(
        fp8.matmul,
        (np.ones((2, 3, 4), np.float32), np.ones((5, 4, 6), np.float32)),
        ValueError,
        ("matmul: batch dims", "lhs", "(2,)", "rhs", "(5,)", "do not broadcast"),
    ),
    "vector to scaled_matmul": Bad(
        fp8.scaled_matmul,
        (LHS[0], RHS, ONE, ONE),
        ValueError,
        ("scaled_matmul: lhs has shape (256,)", "must be a matrix"),
    ),
    "dim out of range": Bad(
        lambda x, w: fp8.dot_general(x, w, (((2,), (0,)), ((), ()))),
        (X, W),
        ValueError,
        ("dot_general: lhs", "shape (4, 256)", "no dim 2"),
    ),
    # Options.
    "recipe's name": Bad(
        with_options(fp8.matmul, recipe="block"),
        (X, W),
        TypeError,
        ("matmul: recipe is 'block'", "TensorScaling(), RowScaling(), BlockScaling()"),
    ),
    "recipe's class": Bad(
        with_options(fp8.matmul, recipe=fp8.RowScaling),
        (X, W),
        TypeError,
        ("matmul: recipe is <class 'jax_fp8.recipes.RowScaling'>", "an instance, not the class"),
    ),
    "unknown role": Bad(
        with_options(fp8.matmul, roles=("input", "gradient")),
        (X, W),
        ValueError,
        ("matmul: roles is ('input', 'gradient')", "give one of input, weight"),
    ),
    "unknown accumulation": Bad(
        with_options(scaled, accumulation="fp12"),
        (ONE,),
        NotImplementedError,
        ("scaled_matmul: there is no accumulation model 'fp12'; available: native, fp32",),
    ),
    "negative promotion interval": Bad(
        with_options(scaled, promotion_interval=-1),
        (ONE,),
        ValueError,
        ("scaled_matmul: promotion_interval is -1; it must be None or positive",),
    ),
    "fractional promotion interval": Bad(
        with_options(scaled, promotion_interval=1.5),
        (ONE,),
        (TypeError, ValueError),
        ("scaled_matmul: promotion_interval is 1.5",),
    ),
    "precision that names an algorithm": Bad(
        with_options(fp8.matmul, precision="TF32_TF32_F32"),
        (X, W),
        ValueError,
        ("matmul: precision 'TF32_TF32_F32'", "leave it None"),
    ),
    "sharding of the result": Bad(
        with_options(fp8.matmul, out_sharding=PartitionSpec("d")),
        (X, W),
        NotImplementedError,
        ("matmul: out_sharding is", "jax.shard_map"),
    ),
    # Gradients of what has none.
    "gradient of lhs": Bad(
        gradient(fp8.scaled_matmul),
        (LHS, RHS, ONE, ONE),
        TypeError,
        ("gemm: a gradient was asked of lhs, which has none", NO_GRADIENT),
    ),
    "gradient of rhs": Bad(
        gradient(lambda rhs: fp8.scaled_matmul(LHS, rhs, ONE, ONE)),
        (RHS,),
        TypeError,
        ("gemm: a gradient was asked of rhs, which has none", NO_GRADIENT),
    ),
    "gradient of lhs_scale": Bad(
        gradient(scaled),
        (ONE,),
        TypeError,
        ("gemm: a gradient was asked of lhs_scale, which has none", NO_GRADIENT),
    ),
    "tangent of rhs_scale": Bad(
        lambda scale: jax.jvp(lambda s: scaled(ONE, s), (scale,), (scale,)),
        (ONE,),
        TypeError,
        ("gemm: a gradient was asked of rhs_scale, which has none", NO_GRADIENT),
    ),
    "gradient of quantize": Bad(
        gradient(lambda x: fp8.quantize(x).scale),
        (X,),
        TypeError,
        ("quantize: a gradient was asked of x", NO_GRADIENT, "jax.lax.stop_gradient(x)"),
    ),
    "gradient of a scale given to quantize": Bad(
        gradient(lambda scale: fp8.dequantize(fp8.quantize(X, scale=scale))),
        (ONE,),
        TypeError,
        ("quantize: a gradient was asked of scale", NO_GRADIENT),
    ),
    "gradient of a scale given to dequantize": Bad(
        gradient(lambda scale: fp8.dequantize(fp8.ScaledArray(LHS, scale, (4, 256)))),
        (np.ones((1, 1), np.float32),),
        TypeError,
        ("dequantize: a gradient was asked of scale", "stop_gradient"),
    ),
}

#: The same where float64 exists.
DOUBLE = {
    "scale": Bad(
        scaled,
        (np.ones((4, 1), np.float64),),
        TypeError,
        ("scaled_matmul: lhs_scale has dtype float64", "scale.astype(jnp.float32)"),
    ),
    "scale of a ScaledArray": Bad(
        scaled_dot,
        (scaled_array((4, 2), (1, 128), np.float64), Q_RHS),
        TypeError,
        ("scaled_dot_general: lhs scale has dtype float64", "scale.astype(jnp.float32)"),
    ),
    "scale given to quantize": Bad(
        lambda x, scale: fp8.quantize(x, scale=scale),
        (X, np.float64(1)),
        TypeError,
        ("quantize: scale has dtype float64", "scale.astype(jnp.float32)"),
    ),
    "operand of matmul": Bad(
        fp8.matmul,
        (X.astype(np.float64), W),
        TypeError,
        ("matmul: lhs has dtype float64; convert it with astype", OFFERED),
    ),
    "operand of quantize": Bad(
        fp8.quantize,
        (X.astype(np.float64),),
        TypeError,
        ("quantize: x has dtype float64; convert it with astype", OFFERED),
    ),
    "result": Bad(
        with_options(scaled, preferred_element_type=np.float64),
        (ONE,),
        TypeError,
        ("scaled_matmul: preferred_element_type float64 is not offered", "use float32"),
    ),
}
