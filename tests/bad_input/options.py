"""Options that do not exist, and derivatives of what has none."""

import jax
import numpy as np
from jax.sharding import PartitionSpec

import jax_fp8 as fp8
from bad_input.common import LHS, NO_GRADIENT, ONE, RHS, Bad, W, X, gradient, scaled, with_options

OPTIONS = {
    "recipe's name": Bad(
        with_options(fp8.matmul, recipe="block"),
        (X, W),
        TypeError,
        ("matmul: recipe is 'block'", "BlockScaling(), MXScaling(), RowScaling()"),
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
        ValueError,
        (
            "scaled_matmul: accumulation is 'fp12'; there is no such accumulation model; there are "
            "native, hopper_wgmma",
        ),
    ),
    "negative promotion interval": Bad(
        with_options(scaled, promotion_interval=-1),
        (ONE,),
        ValueError,
        ("scaled_matmul: promotion_interval is -1; it must be None or an integer >= 1",),
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
}

GRADIENTS = {
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
