"""A first look at jax_fp8: quantize, multiply, differentiate, and ask which kernel did it."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8


def relative_error(got: jax.Array, expected: np.ndarray) -> str:
    difference = np.linalg.norm(np.asarray(got, np.float64) - expected)
    return f"{100 * difference / np.linalg.norm(expected):.2f} %"


def main() -> None:
    x_key, w_key = jax.random.split(jax.random.key(0))
    x = jax.random.normal(x_key, (64, 512))
    w = jax.random.normal(w_key, (512, 256))
    x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)

    # FP8 values with one scale for every 1×128 piece of a row; real value = value × scale.
    q = fp8.quantize(x, "e4m3", tile=(1, 128))
    print(f"quantize: values {q.values.dtype.name} {q.values.shape}, scale {q.scale.shape}")
    print(f"  error of dequantize(quantize(x)):  {relative_error(fp8.dequantize(q), x64)}")

    # Operands that are FP8 already, with scales of your own.
    x_row, w_column = fp8.quantize(x, "e4m3", tile=(1, -1)), fp8.quantize(w, "e4m3", tile=(-1, 1))
    y = fp8.scaled_matmul(x_row.values, w_column.values, x_row.scale, w_column.scale)
    print(f"scaled_matmul: scales {x_row.scale.shape} and {w_column.scale.shape}")
    print(f"  error against float64:             {relative_error(y, x64 @ w64)}")

    # Ordinary arrays in and out: quantized on the way, E4M3 forward and E5M2 for gradients.
    for recipe in (fp8.BlockScaling(), fp8.RowScaling(), fp8.TensorScaling()):
        y = jax.jit(lambda x, w, recipe=recipe: fp8.matmul(x, w, recipe=recipe))(x, w)
        error = relative_error(y, x64 @ w64)
        print(f"matmul, {type(recipe).__name__:<14} error:      {error}")

    # Both gradients of ½‖x·w‖² are FP8 GEMMs too.
    dx, dw = jax.grad(lambda x, w: jnp.sum(fp8.matmul(x, w) ** 2) / 2, argnums=(0, 1))(x, w)
    print(f"gradient of x, error:                {relative_error(dx, x64 @ w64 @ w64.T)}")
    print(f"gradient of w, error:                {relative_error(dw, x64.T @ x64 @ w64)}")

    print("\nWhich kernel takes such a call, and why the others don't:")
    print(fp8.explain(x, w))


if __name__ == "__main__":
    main()
