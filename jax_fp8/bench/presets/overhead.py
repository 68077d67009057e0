"""`overhead`: what a call costs before there is anything to compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from jax_fp8.bench.cases import Case, Options, Preset, Shape
from jax_fp8.bench.contenders import Gemm, ours, xla
from jax_fp8.bench.operands import Weights
from jax_fp8.bench.timing import Timed

__all__ = ["OVERHEAD"]

_CALLS: Final = 200  # in one sample: a single call is a few ticks of the clock


def _cases(shapes: Sequence[Shape], options: Options, cut: list[str]) -> Iterator[Case]:
    for m, n, k in shapes:
        gemm = Gemm(m, Weights(n, k, options.seed), options)
        contenders = ours(gemm, options.recipes or ("tensor", "block"), peak="", layouts=("(K,N)",))
        if "xla" in options.peers:
            contenders += [c for c in xla(gemm, ("f32",), cut) if "(K,N)" in c.name]
        yield Case(
            name=f"{m} x {n} x {k}",
            shape=(m, n, k),
            contenders=[
                dataclasses.replace(c, timed=Timed(c.timed.call, calls=_CALLS)) for c in contenders
            ],
            rate="µs",
        )


OVERHEAD: Final = Preset(
    title="a compiled call on tiny operands",
    shapes=[(8, 8, 8)],
    cases=_cases,
    notes=(f"end to end from Python, the mean of {_CALLS} calls in a sample",),
)
