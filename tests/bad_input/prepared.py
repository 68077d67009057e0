"""Prepared weights: where they cannot stand, and parts that do not belong together."""

import dataclasses

import ml_dtypes
import numpy as np

import jax_fp8 as fp8
from bad_input.common import (
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
    gradient,
    with_options,
)

ONLY_RHS = ("is a PreparedArray, which only the rhs of a product can be", "dequantize()")
CUT = ("only dims before those can be sliced or mapped away", "prepare them again")
#: (256, 8) in one panel of 64 columns.
WEIGHTS = fp8.prepare(W)
STACK = fp8.prepare(np.ones((3, 4, 256, 8), np.float32))


def changed(**parts):
    return dataclasses.replace(WEIGHTS, **parts)


def dot(numbers):
    return lambda x, w: fp8.dot_general(x, w, numbers)


def einsum(subscripts):
    return lambda *operands: fp8.einsum(subscripts, *operands)


POSITIONS = {
    "prepared lhs of matmul": Bad(
        fp8.matmul, (WEIGHTS, W), TypeError, ("matmul: lhs is a PreparedArray", *ONLY_RHS)
    ),
    "prepared lhs of dot_general": Bad(
        dot(NUMBERS), (WEIGHTS, W), TypeError, ("dot_general: lhs is", *ONLY_RHS)
    ),
    "prepared lhs of scaled_dot_general": Bad(
        lambda q, w: fp8.scaled_dot_general(q, w, NUMBERS),
        (WEIGHTS, Q_RHS),
        TypeError,
        ("scaled_dot_general: lhs is", *ONLY_RHS),
    ),
    "prepared lhs of scaled_matmul": Bad(
        fp8.scaled_matmul, (WEIGHTS, RHS, ONE, ONE), TypeError, ("scaled_matmul: lhs is", *ONLY_RHS)
    ),
    "prepared lhs of einsum": Bad(
        einsum("mk,kn->mn"), (WEIGHTS, W), TypeError, ("einsum: operand 0 is", *ONLY_RHS)
    ),
    "prepared operand of three": Bad(
        einsum("mk,kn,nl->ml"), (X, WEIGHTS, W.T), TypeError, ("einsum: operand 1 is", *ONLY_RHS)
    ),
    "prepared lhs of explain": Bad(
        fp8.explain, (WEIGHTS, W), TypeError, ("explain: lhs is", *ONLY_RHS)
    ),
    "prepared array dequantised": Bad(
        fp8.dequantize, (WEIGHTS,), TypeError, ("dequantize: q is", *ONLY_RHS)
    ),
    "scaled array in matmul": Bad(
        fp8.matmul, (X, Q_RHS), TypeError, ("matmul: rhs is a ScaledArray", "prepare to multiply")
    ),
    "prepared rhs with a scale": Bad(
        fp8.scaled_matmul,
        (LHS, WEIGHTS, ONE, ONE),
        ValueError,
        ("scaled_matmul: rhs is a PreparedArray", "leave rhs_scale and rhs_tile None"),
    ),
    "raw rhs without a scale": Bad(
        fp8.scaled_matmul, (LHS, RHS, ONE), ValueError, ("scaled_matmul: rhs_scale is None",)
    ),
    "FP8 lhs with prepared rhs": Bad(
        fp8.matmul, (LHS, WEIGHTS), TypeError, ("matmul: lhs has the FP8 dtype", "scaled_matmul")
    ),
}
DIMS = {
    "k of prepared rhs": Bad(
        fp8.matmul,
        (X[:, :255], WEIGHTS),
        ValueError,
        ("matmul: lhs contracting dim 1 has size 255, rhs contracting dim 0 has size 256",),
    ),
    "k of prepared rhs of scaled_matmul": Bad(
        fp8.scaled_matmul,
        (LHS[:, :255], WEIGHTS, ONE),
        ValueError,
        ("scaled_matmul: lhs contracting dim 1 has size 255", "has size 256"),
    ),
    "k of a prepared stack": Bad(
        fp8.matmul,
        (X[:, :255], STACK),
        ValueError,
        ("matmul: lhs contracting dim 1 has size 255", "rhs contracting dim 2 has size 256"),
    ),
    "batch of a prepared stack": Bad(
        fp8.matmul,
        (np.ones((5, 2, 256), np.float32), STACK),
        ValueError,
        ("matmul: batch dims of lhs (5,) and rhs (3, 4) do not broadcast",),
    ),
    "n of prepared rhs contracted": Bad(
        dot((((1,), (1,)), ((), ()))),
        (X[:, :8], WEIGHTS),
        ValueError,
        ("contract dims (1,) of rhs", "shape (256, 8) contracts dim 0", "k_axis=", "dequantize()"),
    ),
    "batch dims of prepared rhs in another order": Bad(
        dot((((3,), (2,)), ((1, 0), (1, 0)))),
        (np.ones((3, 4, 2, 256), np.float32), STACK),
        ValueError,
        ("take (1, 0) as batch dims", "has the batch dims (0, 1) in this order"),
    ),
    "batch dims of prepared rhs as free dims": Bad(
        dot((((1,), (2,)), ((), ()))), (X, STACK), ValueError, ("take () as batch dims",)
    ),
    "index of prepared rhs summed over": Bad(
        einsum("mk,abkn->mn"),
        (X, STACK),
        ValueError,
        ("einsum: index 'a' of operand 1, a PreparedArray of shape (3, 4, 256, 8)", "summed"),
    ),
}
PARTS = {
    "columns of the panels cut": Bad(
        fp8.matmul,
        (X, changed(values=WEIGHTS.values[..., :8])),
        ValueError,
        ("matmul: rhs has values of shape (1, 256, 8)", "n=8", "(*batch, 1, k, 64)", *CUT),
    ),
    "panels cut": Bad(
        fp8.matmul, (X, changed(values=WEIGHTS.values[:0])), ValueError, ("(0, 256, 64)", *CUT)
    ),
    "k of the panels cut": Bad(
        fp8.matmul,
        (X[:, :100], changed(values=WEIGHTS.values[:, :100])),
        ValueError,
        ("matmul: rhs scale has shape (2, 1)", "(100, 8) with tile (128, 8) need (1, 1)"),
    ),
    "a panel taken out": Bad(
        lambda w: fp8.scaled_matmul(LHS, w, ONE),
        (changed(values=WEIGHTS.values[0]),),
        ValueError,
        ("scaled_matmul: rhs has values of shape (256, 64)", *CUT),
    ),
    "another n": Bad(fp8.matmul, (X, changed(n=65)), ValueError, ("n=65", "2, k, 64", *CUT)),
    "negative n": Bad(fp8.matmul, (X, changed(n=-1)), ValueError, ("rhs has n=-1", ">= 0")),
    "scale of prepared rhs": Bad(
        dot(NUMBERS),
        (X, changed(scale=WEIGHTS.scale[:1])),
        ValueError,
        ("dot_general: rhs scale has shape (1, 1)", "with tile (128, 8) need (2, 1)"),
    ),
    "dtype of the scale of prepared rhs": Bad(
        fp8.matmul,
        (X, changed(scale=np.ones((2, 1), np.float16))),
        TypeError,
        ("matmul: rhs scale has dtype float16", "astype(jnp.float32)"),
    ),
    "tile of prepared rhs": Bad(
        fp8.matmul, (X, changed(tile=(128,))), ValueError, ("tile (128,)", "along k and n")
    ),
    "FNUZ prepared": Bad(
        fp8.matmul,
        (X, changed(values=np.ones((1, 256, 64), ml_dtypes.float8_e4m3fnuz))),
        TypeError,
        ("matmul: rhs: float8_e4m3fnuz", *FNUZ_PARTS),
    ),
    "integers prepared": Bad(
        fp8.matmul,
        (X, changed(values=np.ones((1, 256, 64), np.int8))),
        TypeError,
        ("matmul: rhs", "int8", "is not an FP8 format"),
    ),
}
PREPARE = {
    "vector to prepare": Bad(
        fp8.prepare, (X[0],), ValueError, ("prepare: w has shape (256,)", "a stack of them")
    ),
    "integers to prepare": Bad(
        fp8.prepare, (W.astype(np.int8),), TypeError, ("prepare: w has dtype int8", OFFERED)
    ),
    "FP8 to prepare": Bad(
        fp8.prepare, (RHS,), TypeError, ("prepare: w has the FP8 dtype float8_e5m2", "ScaledArray(")
    ),
    "FNUZ to prepare": Bad(
        fp8.prepare, (W.astype(ml_dtypes.float8_e5m2fnuz),), TypeError, FNUZ_PARTS
    ),
    "k_axis": Bad(
        with_options(fp8.prepare, k_axis=0),
        (np.ones((3, 4, 5), np.float32),),
        ValueError,
        ("prepare: k_axis is 0 for w of shape (3, 4, 5)", "-2 for (k, n) or -1 for (n, k)"),
    ),
    "recipe for a ScaledArray": Bad(
        with_options(fp8.prepare, recipe=fp8.RowScaling()),
        (Q_LHS,),
        ValueError,
        ("prepare: w is a ScaledArray", "leave recipe None", "w.dequantize()"),
    ),
    "recipe class to prepare": Bad(
        with_options(fp8.prepare, recipe=fp8.RowScaling),
        (W,),
        TypeError,
        ("prepare: recipe is", "an instance, not the class"),
    ),
    "prepared to prepare": Bad(
        fp8.prepare, (WEIGHTS,), TypeError, ("prepare: w is a PreparedArray already",)
    ),
    "gradient of prepared weights": Bad(
        lambda x, w: gradient(lambda w, x: fp8.matmul(x, w))(w, x),
        (X, WEIGHTS),
        TypeError,
        ("a gradient was asked of the", "of rhs, a PreparedArray", "differentiate with respect to"),
    ),
}
PREPARED = POSITIONS | DIMS | PARTS | PREPARE
