"""`train`: loss and both gradients of a dense layer, quantisation included."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8 import dispatch
from jax_fp8.bench.cases import Case, Contender, Options, Preset, Shape
from jax_fp8.bench.contenders import forced
from jax_fp8.bench.operands import DTYPES, relative_error
from jax_fp8.bench.peaks import PEAK_OF_ROW
from jax_fp8.bench.timing import Timed, compiled
from jax_fp8.dot import matmul
from jax_fp8.recipes import BY_NAME

__all__ = ["TRAIN"]

#: Relative errors of gradients against float64: E4M3 times E5M2 on normal data is 6 % off.
_TOLERANCES: Final = {"fp8": 0.12, "bf16": 0.02, "f32": 1e-4}

Matrix = np.ndarray[Any, Any]
Step = Callable[[jax.Array, jax.Array, jax.Array], Any]


def _step(layer: Callable[[jax.Array, jax.Array], jax.Array]) -> Step:
    """(x, w, ct) -> loss and its gradients for x and w; the layer's output has the gradient ct."""

    def loss(x: jax.Array, w: jax.Array, ct: jax.Array) -> jax.Array:
        return jnp.vdot(layer(x, w), ct, preferred_element_type=jnp.float32)

    return jax.value_and_grad(loss, (0, 1))


def _cases(shapes: Sequence[Shape], options: Options, cut: list[str]) -> Iterator[Case]:
    del cut
    for tokens, out, features in shapes:
        rng = np.random.default_rng(options.seed)
        data = [
            rng.standard_normal(shape, np.float32)
            for shape in ((tokens, features), (features, out), (tokens, out))
        ]
        contender = functools.partial(_contender, data)
        contenders = []
        for recipe in options.recipes or ("tensor", "row", "block"):
            layer = functools.partial(matmul, recipe=BY_NAME[recipe])
            for dtype in ("f32", "bf16"):
                with forced(options):
                    operands = [jax.ShapeDtypeStruct(a.shape, DTYPES[dtype]) for a in data[:2]]
                    choices = dispatch.explain(
                        operands[0], operands[1], recipe=BY_NAME[recipe], platform="cpu"
                    ).gemms
                    kernel = "/".join(dict.fromkeys(choice.kernel for choice in choices))
                    contenders.append(
                        contender(
                            f"{recipe} {dtype}", layer, dtype, tolerance=_TOLERANCES["fp8"],
                            kind="ours", kernel=kernel, peak=PEAK_OF_ROW.get(kernel, ""),
                        )
                    )  # fmt: skip
        if "xla" in options.peers:
            contenders += [
                contender(f"XLA {dtype}", jnp.matmul, dtype, tolerance=tolerance, kind="peer")
                for dtype, tolerance in _TOLERANCES.items()
                if dtype in DTYPES
            ]
        yield Case(
            name=f"{tokens} tokens, {features} -> {out}",
            shape=(tokens, out, features),
            contenders=contenders,
        )


def _contender(
    data: Sequence[Matrix],
    name: str,
    layer: Callable[[jax.Array, jax.Array], jax.Array],
    dtype: str,
    *,
    tolerance: float,
    **more: Any,
) -> Contender:
    operands = [jnp.asarray(a.astype(DTYPES[dtype])) for a in data]
    call = functools.partial(compiled(_step(layer), *operands), *operands)
    x, w, ct = data
    num_elements = x.size + w.size + ct.size
    return Contender(
        name=name,
        group=name,
        timed=Timed(call),
        check=lambda: _check(call(), data, tolerance),
        flops=6.0 * x.shape[0] * w.size,
        moved_bytes=2 * num_elements * operands[0].dtype.itemsize,
        **more,
    )


def _check(found: Any, data: Sequence[Matrix], tolerance: float) -> str:
    """Some rows of both gradients against float64 of the unquantised operands."""
    x, w, ct = (a.astype(np.float64) for a in data)
    dx, dw = (np.asarray(gradient).astype(np.float64) for gradient in found[1])
    rows = slice(0, 8)
    for name, own, exact in (
        ("dx", dx[rows], ct[rows] @ w.T),
        ("dw", dw[rows], x.T[rows] @ ct),
    ):
        error = relative_error(own, exact)
        if not error <= tolerance:
            return f"{name} is {error:.2%} off float64, expected at most {tolerance:.2%}"
    return ""


TRAIN: Final = Preset(
    title="forward and backward of a dense layer",
    shapes=[(512, 4096, 4096)],
    shape_means="TOKENS,OUTPUTS,INPUTS",
    cases=_cases,
    notes=(
        "loss and gradients for inputs and weights: three GEMMs, all quantisation included; "
        "a layer has its inputs, weights and results in float32 or in bfloat16",
    ),
)
