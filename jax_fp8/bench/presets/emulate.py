"""`emulate`: whole GEMMs with the accumulators of other machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from jax_fp8.bench.cases import Case, Contender, Options, Preset, Shape
from jax_fp8.bench.operands import Sample
from jax_fp8.bench.timing import Timed
from jax_fp8.emulation.speed import emulated_gemm

__all__ = ["EMULATE"]

_MACHINES: Final = (
    "hopper_wgmma",
    "hopper_mma",
    "ada_mma",
    "blackwell_tcgen05",
    "cdna3_mfma",
    "fp16",
    "fp32",
)
#: Relative error that a short accumulator may have on a sum of normal products.
_TOLERANCE: Final = 0.05


def _cases(shapes: Sequence[Shape], options: Options, cut: list[str]) -> Iterator[Case]:
    del cut
    for m, n, k in shapes:
        yield Case(
            name=f"{m} x {n} x {k}",
            shape=(m, n, k),
            contenders=[_contender(machine, (m, n, k), options) for machine in _MACHINES],
            rate="GMAC/s",
        )


def _contender(machine: str, shape: Shape, options: Options) -> Contender:
    m, n, k = shape
    gemm = emulated_gemm(machine, shape, kernel=options.kernel or None, seed=options.seed)
    lhs, rhs = (np.asarray(q.values) for q in (gemm.lhs, gemm.rhs))
    check = Sample(m, n).check(gemm.call, lhs, rhs.T, _TOLERANCE)
    if machine == "fp16":  # overflows on these operands
        check = lambda: ""
    return Contender(
        name=machine,
        group=machine,
        kind="ours",
        timed=Timed(gemm.call),
        check=check,
        kernel=gemm.kernel,
        flops=2.0 * m * n * k,
    )


EMULATE: Final = Preset(
    title="emulated accumulators",
    shapes=[(512, 512, 512)],
    cases=_cases,
    notes=("bit-exact emulation, packing included; a MAC is a product and its addition",),
)
