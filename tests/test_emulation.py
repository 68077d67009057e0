"""Emulated GEMMs: published check values, and the same bits on every row, however they are cut.

What the bits must be is the business of the other files: `test_emulation_fractions.py`,
`test_emulation_mmasim.py` and `test_emulation_golden.py`.
"""

import dataclasses
import hashlib
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_fp8 as fp8
from checks import assert_same_bits, bits
from emulation_cases import KINDS, OCP, Case, Operands, every_pair, formats_of
from jax_fp8.emulation import MACHINES, instruction
from rows import runnable_rows
from strategies import seeds, sizes
from threads import digest_with_threads

pytestmark = pytest.mark.filterwarnings("ignore::jax_fp8.emulation.OverflowWarning")

Array = np.ndarray[Any, Any]
ROWS = runnable_rows("emulate")

# --- Check values ---------------------------------------------------------------------------------

#: Of Hopper's wgmma. The first loses bits when products are aligned, the second when the sum is
#: rounded.
CHECKS = {
    "alignment": ((16, 0.125, 0.375, 1.5), (16, 0.125, 0.1875, 0.75), 0x43809800),
    "rounding": ((15, 0.125), (15, 0.0625), 0x43610000),
}
every_check = pytest.mark.parametrize("check", CHECKS)


@every_check
def test_hopper_has_the_published_check_values(check: str, emulate_row: str) -> None:
    x, w, expected = CHECKS[check]
    lhs, rhs = np.float32([x]), np.float32([w]).T
    with fp8.force_kernel(emulate_row), fp8.emulate("hopper_wgmma"):
        out = fp8.matmul(lhs, rhs, recipe=fp8.StaticScaling())
        assert bits(np.asarray(out)).tolist() == [[expected]]
        codes = lhs.astype(OCP["e4m3"]), rhs.astype(OCP["e4m3"])
        assert bits(np.asarray(fp8.scaled_matmul(*codes, 1.0, 1.0))).tolist() == [[expected]]
    native = fp8.matmul(lhs, rhs, recipe=fp8.StaticScaling())
    assert float(native[0, 0]) == np.dot(x, w) != np.uint32(expected).view(np.float32)


@every_check
def test_the_instruction_has_the_published_check_values(check: str) -> None:
    x, w, expected = CHECKS[check]
    wgmma = instruction("wgmma.m64n8k32.f32.e4m3.e4m3")
    a, b = np.zeros((64, 32), wgmma.a_dtype), np.zeros((32, 8), wgmma.b_dtype)
    a[63, : len(x)], b[: len(w), 7] = x, w
    d = np.asarray(wgmma(a, b))
    assert bits(d)[63, 7] == expected
    assert np.count_nonzero(d) == 1


ALIGNED = [name for name, machine in MACHINES.items() if machine.fraction_bits]


@pytest.mark.parametrize("machine", ALIGNED)
def test_a_term_counts_down_to_the_last_fraction_bit_below_the_largest(
    machine: str, emulate_row: str
) -> None:
    # Two large products cancel each other; the third is what is left of it. All three are of even
    # index, which some machines align apart from the odd ones.
    bits = MACHINES[machine].fraction_bits
    for large in (-4, 0, 8):
        for below, expected in ((bits - 1, 1.0), (bits, 1.0), (bits + 1, 0.0)):
            small = large - below
            case = Case(machine, 1, 1, 5, ("e5m2", "e5m2"))
            if small < (-24 if MACHINES[machine].is_fp16 else -28):
                continue
            operands = case.operands()
            half = small // 2
            lhs = [2.0**large, 0, 2.0**half, 0, -(2.0**large)]
            rhs = [1, 0, 2.0 ** (small - half), 0, 1]
            ones = {
                name: np.ones_like(getattr(operands, name)) for name in ("lhs_scale", "rhs_scale")
            }
            values = [np.float32([x]).astype(OCP["e5m2"]) for x in (lhs, rhs)]
            assert case.run(emulate_row, Operands(*values, **ones)) == expected * 2.0**small


# --- Rows -----------------------------------------------------------------------------------------

TILE_SIZES = (None, 1, 32, 48, 64, 100, 128)


@st.composite
def cases(draw: st.DrawFn, machine: str) -> Case:
    """Any shape, layout, tiles, formats, interval, split and output type."""
    facts = MACHINES[machine]
    step = facts.step
    fnuz = facts.fnuz_operands and draw(st.booleans())
    names = st.sampled_from(sorted(formats_of(machine) if fnuz else OCP))
    tile = st.tuples(st.sampled_from((None, 1, 3, 128)), st.sampled_from(TILE_SIZES))
    layouts = ("mk", "kn") if fnuz else draw(st.sampled_from(LAYOUTS))
    case = Case(
        machine,
        m=draw(sizes(70)),
        n=draw(sizes(70)),
        k=draw(sizes(300)),
        formats=(draw(names), draw(names)),
        tiles=(draw(tile), draw(tile)),
        interval=draw(st.sampled_from((None, step, 4 * step, 128, 256))),
        split_k=draw(st.sampled_from((1, 1, 2, 3))),
        layouts=layouts,
        out_dtype=draw(st.sampled_from(("float32", "bfloat16", "float16"))),
    )
    return dataclasses.replace(case, split_k=2) if machine == "fp32" else case


LAYOUTS = (("mk", "nk"), ("mk", "kn"), ("km", "nk"), ("km", "kn"))


@pytest.mark.parametrize("machine", MACHINES)
def test_every_row_has_the_bits_of_the_readable_row(machine: str) -> None:
    @hypothesis.given(cases(machine), seeds, st.sampled_from(KINDS))
    @hypothesis.settings(max_examples=15)
    def check(case: Case, seed: int, kind: str) -> None:
        operands = case.operands(seed, kind)
        expected = case.run("scalar", operands)
        assert expected.shape == (case.m, case.n)
        for row in ROWS:
            if row != "scalar" and not case.why_not(row):
                assert_same_bits(case.run(row, operands), expected)

    check()


@every_pair
def test_all_layouts_and_tiles_have_the_bits_of_the_readable_row(row: str, machine: str) -> None:
    # Sizes beyond the register tiles and cache blocks of every row.
    tiles = ((None, None), (None, None)), ((1, 128), (128, 128)), ((1, 32), (1, 32))
    for i, layouts in enumerate(LAYOUTS):
        split = 2 if machine == "fp32" else 1
        case = Case(machine, 37, 75, 290, ("e4m3", "e5m2"), tiles[i % 3], layouts=layouts)
        case = dataclasses.replace(case, split_k=split)
        operands = case.operands(i, "special" if i == 3 else "finite")
        assert_same_bits(case.run(row, operands), case.run("scalar", operands))


@every_pair
def test_output_is_one_rounding_of_the_float32_result(row: str, machine: str) -> None:
    case = Case(machine, 9, 17, 130, split_k=2)
    operands = case.operands()
    wide = case.run(row, operands)
    for name in ("bfloat16", "float16"):
        narrow = dataclasses.replace(case, out_dtype=name).run(row, operands)
        with np.errstate(over="ignore"):
            assert_same_bits(narrow, wide.astype(narrow.dtype))


# --- Zeros, infinities, NaN -----------------------------------------------------------------------


@every_pair
def test_nothing_to_add_up_gives_positive_zeros(row: str, machine: str) -> None:
    case = Case(machine, 3, 2, 64, split_k=2)
    operands = case.operands()
    zero = np.zeros((), case.dtypes[0])
    for lhs in (zero, zero if MACHINES[machine].fnuz_operands else -zero):
        empty = dataclasses.replace(operands, lhs=np.full_like(operands.lhs, lhs))
        assert_same_bits(case.run(row, empty), np.zeros((3, 2), np.float32))
    for shape in ((0, 2, 5), (3, 0, 5), (3, 2, 0)):
        case = Case(machine, *shape, split_k=2)
        assert_same_bits(case.run(row, case.operands()), np.zeros(shape[:2], np.float32))


@every_pair
def test_nan_and_infinity_reach_their_own_outputs_only(row: str, machine: str) -> None:
    formats = (list(formats_of(machine))[1],) * 2  # E5M2 has infinities, its FNUZ form has not
    case = Case(machine, 4, 5, 96, formats, split_k=2)
    operands = case.operands(kind="subnormal")
    clean = case.run(row, operands)
    specials = {1: np.nan} if MACHINES[machine].fnuz_operands else {1: np.nan, 2: np.inf}
    for i, value in specials.items():
        operands.lhs[i, 40] = value
    operands.rhs[:, 40] = [1, 1, -1, -1, 0]
    out = case.run(row, operands)
    assert np.isnan(out[1]).all()
    if 2 in specials:
        assert out[2, :4].tolist() == [np.inf, np.inf, -np.inf, -np.inf]
        assert np.isnan(out[2, 4])
        operands.lhs[2, 41], operands.rhs[:, 41] = -np.inf, operands.rhs[:, 40]
        assert np.isnan(case.run(row, operands)[2]).all()
    assert np.isfinite(out[[0, 3]]).all()
    assert np.isfinite(clean).all()


# --- Threads, batches, splits ---------------------------------------------------------------------


def digest_of_results() -> str:
    """Of products large enough for several threads, on every row."""
    digest = hashlib.sha256()
    for row in ROWS:
        for machine in MACHINES:
            case = Case(machine, 150, 90, 70, split_k=1 + (machine == "fp32"))
            if not case.why_not(row):
                digest.update(case.run(row, case.operands()).tobytes())
    return digest.hexdigest()


def test_number_of_threads_changes_no_bit() -> None:
    digests = {n: digest_with_threads("test_emulation", n) for n in (1, 7)}
    assert set(digests.values()) == {digest_of_results()}, digests


@every_pair
def test_place_in_a_batch_and_in_a_matrix_changes_no_bit(row: str, machine: str) -> None:
    case = Case(machine, 26, 35, 130, tiles=((1, None), (1, None)), split_k=2)
    operands = case.operands()
    whole = case.run(row, operands)
    for m, n in ((1, 34), (17, 2)):
        rows = [slice(0, m), slice(m, None)]
        columns = [slice(0, n), slice(n, None)]
        blocks = [[case_of(case, operands, row, i, j) for j in columns] for i in rows]
        assert_same_bits(np.block(blocks), whole)

    def product(*arrays: Array) -> jax.Array:
        lhs, rhs, lhs_scale, rhs_scale = arrays
        tiles = {"lhs_tile": case.sizes[0], "rhs_tile": case.sizes[1][::-1]}
        return fp8.scaled_matmul(
            lhs, rhs.T, lhs_scale, rhs_scale.T, accumulation=machine, split_k=2, **tiles,
            promotion_interval=None,
        )  # fmt: skip

    others = case.operands(seed=1)
    pair = [np.stack([other, one, one]) for one, other in zip(operands, others, strict=True)]
    with fp8.force_kernel(row):
        batch = np.asarray(jax.vmap(product)(*pair))
        shared = np.asarray(
            jax.vmap(product, (0, None, 0, None))(
                pair[0], operands.rhs, pair[2], operands.rhs_scale
            )
        )
    for out in (batch[1], batch[2], shared[1], shared[2]):
        assert_same_bits(out, whole)
    assert not np.array_equal(batch[0], whole)


def case_of(case: Case, operands: Operands, row: str, rows: slice, columns: slice) -> Array:
    """A block of the outputs, as a GEMM of its own."""
    lhs, rhs, lhs_scale, rhs_scale = operands
    part = Operands(lhs[rows], rhs[columns], lhs_scale[rows], rhs_scale[columns])
    smaller = dataclasses.replace(case, m=len(part.lhs), n=len(part.rhs))
    return smaller.run(row, part)


def test_an_unforced_call_takes_the_first_row_that_accepts() -> None:
    x, w = np.ones((3, 64), np.float32), np.ones((64, 2), np.float32)
    for machine in MACHINES:
        if MACHINES[machine].scales_inside or machine == "fp32":
            continue
        with fp8.emulate(machine):
            choice = fp8.explain(x, w, recipe=fp8.TensorScaling()).gemms[0]
        case = Case(
            machine, 3, 2, 64, ("e4m3", "e4m3"), interval=MACHINES[machine].default_interval
        )
        assert choice.kernel == next(row for row in ROWS if not case.why_not(row))
        assert f"by {machine}" in choice.request


@pytest.mark.parametrize("row", ROWS)
def test_subnormals_of_e4m3_align_as_the_fp16_values_that_hopper_converts_them_to(row: str) -> None:
    # The first product is 64: of exponent 6 as a product of FP16 values, but 9 if 2^-9 keeps the
    # exponent of E4M3's subnormals. Then the second one, 2^-17, is below the last bit of the sum.
    a = np.array([[2**-9, 2**-3]], jax.numpy.float8_e4m3fn)
    b = np.array([[2**15], [2**-14]], jax.numpy.float8_e5m2)
    for machine, expected in (("hopper_mma", 0x42800001), ("blackwell_tcgen05", 0x42800000)):
        for lhs, rhs in ((a, b), (b.T, a.T)):
            with fp8.force_kernel(row):
                y = fp8.scaled_matmul(lhs, rhs, 1.0, 1.0, accumulation=machine)
            assert bits(y)[0, 0] == expected
