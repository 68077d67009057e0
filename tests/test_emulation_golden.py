"""Every row and every instruction has the bits that mmasim 2.1.1 returned when it was recorded.

`golden/make_emulation.py` records; `test_emulation_mmasim.py` compares more, where torch is.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checks import assert_same_bits
from emulation_cases import FNUZ, OCP, Case, Operands, every_pair, formats_of
from golden.make_emulation import GEMM_SIZES, INSTRUCTIONS, PAIRS, path_of
from jax_fp8.emulation import MACHINES, instruction

pytestmark = pytest.mark.filterwarnings("ignore::jax_fp8.emulation.OverflowWarning")

Array = np.ndarray[Any, Any]
E8M0 = ml_dtypes.float8_e8m0fnu


def load(pair: tuple[str, str]) -> dict[str, Array]:
    """The arrays of a file with their dtypes."""
    codes = dict(zip(("a", "b"), ((OCP | FNUZ)[name] for name in pair), strict=True))
    codes |= {"lhs": codes["a"], "rhs": codes["b"], "c_f16": np.float16}
    with np.load(path_of(pair)) as file:
        return {
            name: x.view(E8M0 if name.endswith("_scale") else codes.get(name, np.float32))
            if name.split()[0] not in ("d", "out")
            else x
            for name, x in file.items()
        }


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_instructions_have_the_recorded_bits(pair: tuple[str, str]) -> None:
    recorded, results = load(pair), 0
    for row, template, (rows, columns, depth) in INSTRUCTIONS:
        if pair not in row.formats:
            continue
        name = template.format(a=pair[0], b=pair[1])
        ours = instruction(name, arch=row.arch)
        assert ours.shape == (rows, columns, depth)
        c = recorded["c_f16" if ours.c_dtype == np.float16 else "c_f32"]
        operands = [recorded["a"], recorded["b"], c]
        operands = [operands[0][:rows, :depth], operands[1][:depth, :columns], c[:rows, :columns]]
        if ours.machine.scales_inside:
            operands += [recorded["a_scale"][:rows], recorded["b_scale"][:, :columns]]
        expected = recorded[f"d {name} {row.arch or ''}".strip()].view(ours.c_dtype)
        assert_same_bits(ours(*operands), expected)
        results += 1
    assert results == sum(name.startswith("d ") for name in recorded) > 0


@every_pair
def test_gemms_have_the_recorded_bits(row: str, machine: str) -> None:
    m, n, k = GEMM_SIZES
    results = 0
    for pair in PAIRS:
        recorded = load(pair)
        if f"out {machine}" not in recorded:
            continue
        facts = MACHINES[machine]
        case = Case(machine, m, n, k, pair, ((1, None), (1, None)))
        scales = [recorded[f"{side}_scale"] for side in ("lhs", "rhs")]
        if not facts.scales_inside:
            scales = [np.ones((rows, 1), np.float32) for rows in (m, n)]
        operands = Operands(recorded["lhs"], recorded["rhs"], *scales)
        out = recorded[f"out {machine}"].view(np.float16 if facts.is_fp16 else np.float32)
        assert_same_bits(case.run(row, operands), out.astype(np.float32), any_nan=True)
        results += 1
    assert results == (4 if "MMA-Sim" in MACHINES[machine].source else 0)


def test_every_machine_with_instructions_is_recorded() -> None:
    covered = {row.machine for row, _, _ in INSTRUCTIONS}
    assert covered == {name for name in MACHINES if "MMA-Sim" in MACHINES[name].source}
    for machine in covered:
        assert len([pair for pair in PAIRS if set(pair) <= set(formats_of(machine))]) == 4
