"""Every accumulation model on every row has the bits of the model in fractions.

A NaN that arithmetic on partial sums returns may be any NaN; `test_emulation_mmasim.py` and
`test_emulation_golden.py` hold the NaN of instructions to the bit.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest

from accumulators import gemm_by_fractions, instruction_by_fractions
from checks import assert_same_bits
from emulation_cases import (
    KINDS,
    OCP,
    Case,
    every_pair,
    formats_of,
    operand_codes,
    random_accumulator,
)
from jax_fp8.emulation import MACHINES, instruction

pytestmark = pytest.mark.filterwarnings("ignore::jax_fp8.emulation.OverflowWarning")

#: Of every parity, and on both sides of a step.
SIZES_OF_K = (1, 7, 31, 32, 33, 100, 257)


def assert_agrees(case: Case, row: str, seed: int, kind: str) -> None:
    assert not case.why_not(row)
    operands = case.operands(seed, kind)
    assert_same_bits(case.run(row, operands), model(case, seed, kind), any_nan=True)


@functools.cache  # the same for every row
def model(case: Case, seed: int, kind: str) -> np.ndarray[Any, Any]:
    return gemm_by_fractions(case, case.operands(seed, kind))


@every_pair
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_every_length_have_the_bits_of_fractions(row: str, machine: str, kind: str) -> None:
    formats = list(itertools.product(formats_of(machine), repeat=2))
    split = 2 if machine == "fp32" else 1  # unsplit, it is the native kernels' own
    for seed, k in enumerate(SIZES_OF_K):
        case = Case(machine, 2, 2, k, formats[seed % 4], split_k=split)
        assert_agrees(case, row, seed, kind)


TILES: dict[str, Any] = {
    "tensor": ((None, None), (None, None)),
    "row": ((1, None), (1, None)),
    "1x128 and 128x128": ((1, 128), (128, 128)),
    "1x32": ((1, 32), (1, 32)),
    "48 and 36": ((2, 48), (2, 36)),
    "100 and tensor": ((1, 100), (None, None)),
    "7 and 5": ((2, 7), (1, 5)),
}


@every_pair
@pytest.mark.parametrize("tiles", TILES)
def test_cuts_at_tiles_intervals_and_parts_have_the_bits_of_fractions(
    row: str, machine: str, tiles: str
) -> None:
    step = MACHINES[machine].step
    options = [(step, 1), (4 * step, 1), (8 * step, 2), (None, 3), (2 * step, 7)]
    for seed, (interval, split) in enumerate(options):
        if machine == "fp32" and split == 1:
            continue
        case = Case(machine, 2, 2, 300, (), TILES[tiles], interval, split)
        kind = ("finite", "wide")[seed % 2]
        if not case.why_not(row):
            assert_agrees(case, row, seed, kind)


def test_the_readable_row_takes_every_tile_interval_and_split() -> None:
    for machine in MACHINES:
        for tiles in TILES.values():
            case = Case(machine, 3, 2, 300, (), tiles, 4 * MACHINES[machine].step, 2)
            assert not case.why_not("scalar")


@every_pair
def test_negative_and_huge_and_tiny_scales_have_the_bits_of_fractions(
    row: str, machine: str
) -> None:
    if MACHINES[machine].scales_inside:
        case = Case(machine, 8, 8, 96)
        operands = case.operands(0, "finite")
        rng = np.random.default_rng(1)
        scales = {
            name: rng.integers(0, 256, scale.shape, np.uint8).view(scale.dtype)
            for name, scale in (
                ("lhs_scale", operands.lhs_scale),
                ("rhs_scale", operands.rhs_scale),
            )
        }
    else:
        case = Case(machine, 8, 8, 96, (), ((1, 48), (1, None)), split_k=2)
        operands = case.operands(0, "finite")
        rng = np.random.default_rng(1)
        bits = rng.integers(0, 2**32, operands.lhs_scale.shape, np.uint64).astype(np.uint32)
        scales = {"lhs_scale": bits.view(np.float32)}
    operands = dataclasses.replace(operands, **scales)
    assert_same_bits(case.run(row, operands), gemm_by_fractions(case, operands), any_nan=True)


INSTRUCTIONS = {
    "mma.m16n8k32.f32.{a}.{b}.f32": "sm_89",
    "mma.m16n8k32.f16.{a}.{b}.f16": "sm_89",
    "mma.m16n8k16.f32.{a}.{b}.f32": "sm_90",
    "mma.m16n8k32.f32.{a}.{b}": "sm_90",
    "mma.m16n8k32.f32.{b}.{a}": "sm_120",
    "mma.m16n8k32.f16.{b}.{a}": "sm_120",
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_instructions_have_the_bits_of_fractions_for_every_accumulator(
    name: str, kind: str
) -> None:
    ours = instruction(name.format(a="e4m3", b="e5m2"), arch=INSTRUCTIONS[name])
    m, n, k = ours.shape
    for seed, accumulator in enumerate(("zero", "moderate", "finite", "bits")):
        rng = np.random.default_rng(seed)
        a, b = operand_codes(rng, kind, ours.a_dtype, ours.b_dtype, m, n, k)
        b = np.ascontiguousarray(b.T)
        c = random_accumulator(rng, accumulator, ours.c_dtype, (m, n))
        d = np.asarray(ours(a, b, c))[:6]
        expected = instruction_by_fractions(ours.machine.name, a[:6], b, c[:6])
        assert_same_bits(d, expected.astype(ours.c_dtype), any_nan=True)


def test_fractions_have_the_published_check_values() -> None:
    checks = (
        ((16, 0.125, 0.375, 1.5), (16, 0.125, 0.1875, 0.75), 0x43809800),
        ((15, 0.125), (15, 0.0625), 0x43610000),
    )
    for x, w, expected in checks:
        a, b = (np.array(v, np.float32).astype(OCP["e4m3"]) for v in (x, w))
        d = instruction_by_fractions(
            "hopper_wgmma", a[None], b[:, None], np.zeros((1, 1), np.float32)
        )
        assert d.view(np.uint32)[0, 0] == expected
