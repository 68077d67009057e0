"""Records results of mmasim 2.1.1 in emulation_<a>_<b>.npz, one file for each pair of formats.

Run it where torch and mmasim 2.1.1 are installed: `cd tests && python -m golden.make_emulation`.

A file holds bytes. `a`, `b`, `c_f32`, `c_f16`, `a_scale` and `b_scale` are the operands of the
largest instruction, of which the others take the first rows and columns; `lhs`, `rhs`, `lhs_scale`
and `rhs_scale` those of a GEMM. `d <instruction> <arch>` and `out <machine>` are results: d has the
bits of c's dtype, out is a chain over the whole of k from +0.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from emulation_cases import FNUZ, OCP, operand_codes, random_accumulator
from simulated import ROWS, Row, simulate

__all__ = ["GEMM_SIZES", "INSTRUCTIONS", "PAIRS", "Instruction", "path_of", "record"]

Array = npt.NDArray[Any]
PAIRS = [*itertools.product(OCP, repeat=2), *itertools.product(FNUZ, repeat=2)]
GEMM_SIZES = (12, 10, 160)  # m, n, k
#: Rows of `ROWS`, with the smallest shape where mmasim's largest would fill the file.
_SMALL = {"m64n256k32": "m64n8k32", "m128n256k32": "m128n8k32"}


class Instruction(NamedTuple):
    """One of `simulated.ROWS` with the shape that is recorded."""

    row: Row
    name: str  # with {a} and {b}
    sizes: tuple[int, int, int]


def _instruction(row: Row) -> Instruction:
    name = row.name
    for large, small in _SMALL.items():
        name = name.replace(large, small)
    shape = {
        "wgmma": (64, 8, 32), "tcgen05": (128, 8, 32), "mma": (16, 8, 32),
        "v_mfma_f32_16x16x32_{a}_{b}": (16, 16, 32), "v_mfma_f32_32x32x16_{a}_{b}": (32, 16, 16),
    }[name.split(".")[0]]  # fmt: skip
    return Instruction(row, name, shape)


# The 32x32 instruction of CDNA3 is left to the tests that have mmasim: it is wider than b.
INSTRUCTIONS = [_instruction(row) for row in ROWS if "32x32x16" not in row.name]


def path_of(pair: tuple[str, str]) -> Path:
    return Path(__file__).parent / f"emulation_{pair[0]}_{pair[1]}.npz"


def record(pair: tuple[str, str]) -> dict[str, Array]:
    """What belongs into the file of a pair of formats."""
    rng = np.random.default_rng(PAIRS.index(pair))
    dtypes = [(OCP | FNUZ)[name] for name in pair]
    sizes = [sizes for row, _, sizes in INSTRUCTIONS if pair in row.formats]
    m, n, k = (max(size) for size in zip(*sizes, strict=True))
    # mmasim loses a NaN on its way to the second step of bf8·bf8: test_emulation_mmasim.py.
    special = "finite" if pair == ("bf8", "bf8") else "special"
    kinds = ("finite", "subnormal", "wide", "sparse", "finite", "wide", "sparse", special)
    parts = [operand_codes(rng, kind, *dtypes, m // 8, n // 8, k) for kind in kinds]
    a, b = (np.concatenate(side) for side in zip(*parts, strict=True))
    a, b = a[rng.permutation(m)], b[rng.permutation(n)].T
    c = {
        name: np.where(
            rng.random((m, n)) < 0.5,
            random_accumulator(rng, "moderate", dtype, (m, n)),
            random_accumulator(rng, "finite", dtype, (m, n)),
        )
        for name, dtype in (("c_f32", np.float32), ("c_f16", np.float16))
    }
    scales = _e8m0(rng, (m, 1)), _e8m0(rng, (1, n))
    out = {"a": a, "b": b, **c, "a_scale": scales[0], "b_scale": scales[1]}
    for row, name, (rows, columns, depth) in INSTRUCTIONS:
        if pair not in row.formats:
            continue
        accumulator = c["c_f16" if ".f16." in name else "c_f32"][:rows, :columns]
        mx = (scales[0][:rows], scales[1][:, :columns]) if "mxf8f6f4" in name else ()
        d = simulate(row, pair, a[:rows, :depth], b[:depth, :columns], accumulator, *mx)
        out[f"d {name.format(a=pair[0], b=pair[1])} {row.arch or ''}".strip()] = d

    m, n, k = GEMM_SIZES
    kinds = ("finite", "wide", "sparse", special)
    parts = [operand_codes(rng, kind, *dtypes, m // 4, -(-n // 4), k) for kind in kinds]
    lhs, rhs = (np.concatenate(side) for side in zip(*parts, strict=True))
    lhs, rhs = lhs[:m], rhs[:n]
    scales = _e8m0(rng, (m, k // 32)), _e8m0(rng, (n, k // 32))
    out |= {"lhs": lhs, "rhs": rhs, "lhs_scale": scales[0], "rhs_scale": scales[1]}
    for row in ROWS:
        if pair in row.formats and f"out {row.machine}" not in out:
            zero = np.zeros((m, n), np.float16 if row.machine.endswith("_f16") else np.float32)
            mx = (scales[0], scales[1].T) if row.machine.endswith("_blockscale") else ()
            out[f"out {row.machine}"] = simulate(row, pair, lhs, rhs.T, zero, *mx)
    return {name: np.ascontiguousarray(x).view(np.uint8) for name, x in out.items()}


def _e8m0(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return rng.integers(115, 139, shape, np.uint8).view(ml_dtypes.float8_e8m0fnu)


def main() -> None:
    for pair in PAIRS:
        np.savez_compressed(path_of(pair), **record(pair))
        print(path_of(pair).name, path_of(pair).stat().st_size)


if __name__ == "__main__":
    main()
