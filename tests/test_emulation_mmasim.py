"""Instructions and whole GEMMs have the bits of mmasim, MMA-Sim's reference model.

At least 10^5 sums for each instruction and pair of formats. Needs torch; `test_emulation_golden.py`
holds every machine to recorded results of mmasim without it.
"""

import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from accumulators import gemm_by_pieces
from checks import assert_same_bits
from emulation_cases import (
    FINITE_KINDS,
    KINDS,
    Case,
    every_pair,
    operand_codes,
    random_accumulator,
)
from golden.make_emulation import PAIRS, path_of, record
from jax_fp8.emulation import MACHINES, instruction
from simulated import ROWS, Row, simulate

pytest.importorskip("torch")
pytest.importorskip("mmasim")
pytestmark = pytest.mark.filterwarnings("ignore::jax_fp8.emulation.OverflowWarning")

Array = np.ndarray[Any, Any]

SUMS_PER_KIND = 16384
CASES = [(row, formats) for row in ROWS for formats in row.formats]


def loses_nan(machine: str, formats: tuple[str, str]) -> bool:
    """Whether mmasim 2.1.1 loses a NaN or an infinity from one step to the next.

    Its CDNA3 step drops an accumulator whose exponent is below that of the products by more than
    25, and reads the exponent of a NaN or an infinity as -1. Products of two bf8 reach 2^30. The
    NaN stays here, as in every other format.
    """
    return machine == "cdna3_mfma" and formats == ("bf8", "bf8")


def name_of(case: tuple[Row, tuple[str, str]]) -> str:
    row, (a, b) = case
    return f"{row.name.format(a=a, b=b)}-{row.arch}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_instruction_has_the_bits_of_mmasim(case: tuple[Row, tuple[str, str]]) -> None:
    row, formats = case
    ours = instruction(row.name.format(a=formats[0], b=formats[1]), arch=row.arch)
    assert ours.machine.name == row.machine
    m, n, k = ours.shape
    batch = -(-SUMS_PER_KIND // (m * n))
    finite = loses_nan(row.machine, formats)
    run = jax.jit(jax.vmap(lambda *arrays: ours(*arrays)))
    for seed, kind in enumerate(KINDS):
        if finite and kind not in FINITE_KINDS:
            kind = "finite"
        rng = np.random.default_rng(seed)
        a, b = operand_codes(rng, kind, ours.a_dtype, ours.b_dtype, batch * m, batch * n, k)
        a, b = a.reshape(batch, m, k), b.reshape(batch, n, k).swapaxes(1, 2)
        c = mixed_accumulator(rng, ours.c_dtype, (batch, m, n), finite=finite)
        scales = ()
        if ours.machine.scales_inside:
            low, high = (0, 255) if kind == "special" else (110, 142)
            shapes = ((batch, m, k // 32), (batch, k // 32, n))
            bytes_ = [rng.integers(low, high, shape, np.uint8, endpoint=True) for shape in shapes]
            scales = tuple(x.view(ml_dtypes.float8_e8m0fnu) for x in bytes_)
        expected = simulate(row, formats, a, b, c, *scales)
        assert_same_bits(run(a, b, c, *scales), expected)


def mixed_accumulator(
    rng: np.random.Generator, dtype: Any, shape: tuple[int, ...], *, finite: bool
) -> Array:
    """A quarter each of zeros, moderate numbers, finite numbers and any bits."""
    kinds = ("zero", "moderate", "finite", "finite" if finite else "bits")
    return np.choose(
        rng.integers(0, 4, shape), [random_accumulator(rng, kind, dtype, shape) for kind in kinds]
    )


# --- Whole GEMMs ----------------------------------------------------------------------------------

TILES = ((1, 128), (128, 128))
GEMMS = {
    "one chain": {"m": 48, "n": 64, "k": 160},
    "ragged": {"m": 33, "n": 17, "k": 203},
    "promoted": {"m": 24, "n": 20, "k": 256, "interval": 64},
    "tiles": {"m": 24, "n": 20, "k": 300, "tiles": TILES},
    "odd tiles": {"m": 16, "n": 20, "k": 130, "tiles": ((5, 48), (7, 36)), "interval": 32},
    "split": {"m": 24, "n": 20, "k": 300, "split_k": 2},
}


@functools.cache  # the same for every row
def by_mmasim(case: Case, seed: int, kind: str) -> Array:
    operands = case.operands(seed, kind)
    row = min((row for row in ROWS if row.machine == case.machine), key=lambda row: row.size_k)
    dtype = np.float16 if case.facts.is_fp16 else np.float32

    def sums(begin: int, end: int) -> Array:
        size = -(-(end - begin) // row.size_k) * row.size_k
        a, b = (
            np.concatenate([x, np.zeros((len(x), size - (end - begin)), x.dtype)], axis=1)
            for x in (operands.lhs[:, begin:end], operands.rhs[:, begin:end])
        )
        scales = ()
        if case.facts.scales_inside:
            lhs, rhs = (
                np.repeat(scale, tile[0], axis=0)[:rows, begin // 32 :]
                for scale, tile, rows in (
                    (operands.lhs_scale, case.sizes[0], case.m),
                    (operands.rhs_scale, case.sizes[1], case.n),
                )
            )
            scales = (lhs, rhs.T)
        c = np.zeros((case.m, case.n), dtype)
        return simulate(row, case.names, a, b.T, c, *scales).astype(np.float32)

    return gemm_by_pieces(case, operands, sums)


@every_pair
@pytest.mark.parametrize("gemm", GEMMS)
def test_gemm_has_the_bits_of_mmasim(row: str, machine: str, gemm: str) -> None:
    simulated = next((r for r in ROWS if r.machine == machine), None)
    if simulated is None:
        assert "MMA-Sim" not in MACHINES[machine].source
        return
    for seed, formats in enumerate(simulated.formats):
        kinds = FINITE_KINDS if loses_nan(machine, formats) else KINDS[:-1]
        kind = kinds[(seed + list(GEMMS).index(gemm)) % len(kinds)]
        case = Case(machine, formats=formats, **GEMMS[gemm])
        assert not case.why_not(row)
        expected = by_mmasim(case, seed, kind)
        assert_same_bits(case.run(row, case.operands(seed, kind)), expected, any_nan=True)


@pytest.mark.parametrize("pair", [PAIRS[1], PAIRS[-1]], ids="-".join)
def test_recorded_results_are_those_of_mmasim(pair: tuple[str, str]) -> None:
    with np.load(path_of(pair)) as file:
        recorded = dict(file)
    fresh = record(pair)
    assert fresh.keys() == recorded.keys()
    for name, expected in fresh.items():
        np.testing.assert_array_equal(recorded[name], expected, err_msg=name)
