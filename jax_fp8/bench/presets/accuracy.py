"""`accuracy`: the same product in FP32, BF16, FP16 and FP8: time, error and memory side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from jax_fp8.bench.cases import Case, Options, Preset, Shape
from jax_fp8.bench.contenders import Gemm, ours, xla
from jax_fp8.bench.memory import call_bytes
from jax_fp8.bench.operands import Sample, Weights, float64_of, relative_error

__all__ = ["ACCURACY"]

_SAMPLE: Final = (64, 256)  # rows and columns


def _cases(shapes: Sequence[Shape], options: Options, cut: list[str]) -> Iterator[Case]:
    for m, n, k in shapes:
        gemm = Gemm(m, Weights(n, k, options.seed), options)
        sample = Sample(m, n, *_SAMPLE)
        exact = (
            float64_of(gemm.inputs.array, sample.rows)
            @ float64_of(gemm.weights.array, sample.columns).T
        )
        contenders = ours(gemm, options.recipes or ("tensor", "row", "block"))
        if "xla" in options.peers:
            contenders += xla(gemm, ("f32", "bf16", "f16"), cut)
        yield Case(
            name=f"{m} x {n} x {k}",
            shape=(m, n, k),
            contenders=[
                dataclasses.replace(
                    c,
                    error=relative_error(sample.of(c.timed.call()), exact),
                    memory=dict(c.memory) | {"call": call_bytes(c.timed.call)},
                )
                for c in contenders
            ],
            notes=(
                f"error: ‖C − C64‖ / ‖C64‖ (Frobenius) over {exact.size} results, "
                f"{len(sample.rows)} rows x {len(sample.columns)} columns spread over C; C64 is "
                "NumPy's float64 product of the unrounded operands, which are standard normal",
                "operands: bytes of both, scales included; call: peak resident memory during a "
                "call beyond what there was before it, with the float32 result (a small one may go "
                "where an earlier one was, and count nothing)",
            ),
        )


ACCURACY: Final = Preset(
    title="FP32, BF16, FP16 and FP8 side by side",
    shapes=[(4096, 4096, 4096)],
    cases=_cases,
    notes=("operands are rounded or quantised beforehand; results are float32",),
)
