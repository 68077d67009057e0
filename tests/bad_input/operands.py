"""Formats, dtypes and sizes that are not offered or do not fit each other."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_fp8 as fp8
from bad_input.common import (
    FNUZ,
    FNUZ_PARTS,
    LHS,
    NUMBERS,
    OFFERED,
    ONE,
    Q_LHS,
    Q_RHS,
    RHS,
    Bad,
    W,
    X,
    scaled,
    scaled_array,
    scaled_dot,
    with_options,
)

DTYPES = {
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
}

#: Calls that raise under x64, where float64 exists.
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


SIZES = {
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
}
