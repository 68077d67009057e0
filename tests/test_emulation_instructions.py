"""Single instructions: names, operands, and the table of machines. Their bits: the golden files."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_fp8 as fp8
from checks import assert_same_bits
from emulation_cases import random_accumulator
from jax_fp8 import _ffi
from jax_fp8.emulation import MACHINES, Instruction, instruction

Array = np.ndarray[Any, Any]


def test_python_and_the_kernels_have_the_same_table_of_machines() -> None:
    ours = [
        (
            m.name, m.summation, m.step, m.fraction_bits, m.rounding, m.zero_exponent,
            m.fp16_operands, m.scales_inside, m.fnuz_operands, m.ignores_interval,
        )
        for m in MACHINES.values()
    ]  # fmt: skip
    assert ours == [tuple(row) for row in _ffi.machines()]
    assert all(name == machine.name and machine.source for name, machine in MACHINES.items())


def test_every_machine_takes_its_own_default_interval() -> None:
    for machine in MACHINES.values():
        assert machine.default_interval is None or machine.takes_interval(machine.default_interval)


def test_short_accumulators_are_those_with_fewer_bits_than_fp32() -> None:
    assert {name for name, machine in MACHINES.items() if machine.is_short} == {
        "hopper_wgmma", "hopper_wgmma_f16", "ada_mma", "ada_mma_f16", "blackwell_tcgen05_f16",
        "fp16", "fp16_chunked", "bf16_chunked",
    }  # fmt: skip


# --- Names ----------------------------------------------------------------------------------------

NAMES: dict[str, tuple[str | None, str, tuple[int, int, int], str, str, str]] = {
    "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e5m2": (
        None, "hopper_wgmma", (64, 256, 32), "float8_e4m3fn", "float8_e5m2", "float32",
    ),
    "wgmma.m64n8k32.f16.e5m2.e5m2": (
        "sm_90a", "hopper_wgmma_f16", (64, 8, 32), "float8_e5m2", "float8_e5m2", "float16",
    ),
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32": (
        "sm_89", "ada_mma", (16, 8, 32), "float8_e4m3fn", "float8_e4m3fn", "float32",
    ),
    "mma.m16n8k16.f16.e4m3.e5m2.f16": (
        "sm_89", "ada_mma_f16", (16, 8, 16), "float8_e4m3fn", "float8_e5m2", "float16",
    ),
    "mma.m16n8k32.f32.e4m3.e4m3": (
        "sm_90", "hopper_mma", (16, 8, 32), "float8_e4m3fn", "float8_e4m3fn", "float32",
    ),
    "mma.m16n8k32.kind::f8f6f4.f32.e4m3.e4m3.f32": (
        "sm_120a", "blackwell_tcgen05", (16, 8, 32), "float8_e4m3fn", "float8_e4m3fn", "float32",
    ),
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3"
    ".f32.ue8m0": (
        "sm_120", "blackwell_tcgen05_blockscale", (16, 8, 32), "float8_e4m3fn", "float8_e4m3fn",
        "float32",
    ),
    "tcgen05.mma.cta_group::1.kind::f8f6f4.m128n64k32.f16.e5m2.e4m3": (
        "sm_100f", "blackwell_tcgen05_f16", (128, 64, 32), "float8_e5m2", "float8_e4m3fn",
        "float16",
    ),
    "tcgen05.mma.m128n8k32.kind::mxf8f6f4.block_scale.block32.f32.e4m3.e4m3.ue8m0": (
        None, "blackwell_tcgen05_blockscale", (128, 8, 32), "float8_e4m3fn", "float8_e4m3fn",
        "float32",
    ),
    "v_mfma_f32_16x16x32_fp8_bf8": (
        "gfx942", "cdna3_mfma", (16, 16, 32), "float8_e4m3fnuz", "float8_e5m2fnuz", "float32",
    ),
    "v_mfma_f32_32x32x16_bf8_fp8": (
        None, "cdna3_mfma", (32, 32, 16), "float8_e5m2fnuz", "float8_e4m3fnuz", "float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_gives_machine_shape_and_types(name: str) -> None:
    arch, machine, shape, a, b, c = NAMES[name]
    found = instruction(name, arch=arch)
    assert (found.name, found.machine, found.shape) == (name, MACHINES[machine], shape)
    assert [x.name for x in (found.a_dtype, found.b_dtype, found.c_dtype)] == [a, b, c]


BAD_NAMES = {
    "ambiguous arch": ("mma.m16n8k32.f32.e4m3.e4m3.f32", None,
                       "'mma.m16n8k32.*' differs between GPUs; give arch='sm_89' or 'sm_90' or "
                       "'sm_120'"),
    "unknown arch": ("mma.m16n8k32.f32.e4m3.e4m3.f32", "sm_80", "arch is 'sm_80'"),
    "another family's arch": ("wgmma.m64n8k32.f32.e4m3.e4m3", "sm_89", "known on 'sm_90'"),
    "AMD's arch": ("v_mfma_f32_16x16x32_fp8_fp8", "gfx950", "known on 'gfx942'"),
    "unknown family": ("mmma.m16n8k32.f32.e4m3.e4m3", None, "is not understood; examples: wgmma"),
    "unknown shape": ("wgmma.m64n12k32.f32.e4m3.e4m3", None, "there is no .* among the emulated"),
    "shape of other types": ("wgmma.m64n8k16.f32.e4m3.e4m3", None, "there is no"),
    "no shape": ("wgmma.f32.e4m3.e4m3", None, "is not understood"),
    "two shapes": ("wgmma.m64n8k32.m64n8k32.f32.e4m3.e4m3", None, "is not understood"),
    "no types": ("wgmma.m64n8k32", None, "is not understood"),
    "types of BF16": ("wgmma.m64n8k32.f32.bf16.bf16", None, "is not understood"),
    "C of another type": ("mma.m16n8k32.f32.e4m3.e4m3.f16", "sm_89", "is not understood"),
    "accumulator that it has not": ("mma.m16n8k32.f16.e4m3.e4m3.f16", "sm_90", "there is no"),
    "block scales with FP16": (
        "tcgen05.mma.m128n8k32.kind::mxf8f6f4.f16.e4m3.e4m3", None, "there is no"),
    "block scales on Hopper": ("wgmma.m64n8k32.kind::mxf8f6f4.f32.e4m3.e4m3", None, ""),
    "block scales of a kind without": (
        "tcgen05.mma.m128n8k32.kind::f8f6f4.block_scale.f32.e4m3.e4m3.ue8m0", None, ""),
    "MFMA's shape": ("v_mfma_f32_16x16x16_fp8_fp8", None, "there is no"),
    "MFMA's types": ("v_mfma_f32_16x16x32_fp8_f16", None, "is not understood"),
    "MFMA's accumulator": ("v_mfma_f16_16x16x32_fp8_fp8", None, "is not understood"),
    "nothing": ("", None, "is not understood"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_NAMES)
def test_a_bad_name_says_what_is_wrong(case: str) -> None:
    name, arch, message = BAD_NAMES[case]
    with pytest.raises(ValueError, match=f"instruction: .*{message}"):
        instruction(name, arch=arch)


# --- Operands -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wgmma() -> Instruction:
    return instruction("wgmma.m64n16k32.f32.e4m3.e5m2")


def operands_of(ours: Instruction, seed: int = 0) -> list[Array]:
    rng, (m, n, k) = np.random.default_rng(seed), ours.shape
    a = rng.standard_normal((m, k)).astype(ours.a_dtype)
    b = rng.standard_normal((k, n)).astype(ours.b_dtype)
    return [a, b, random_accumulator(rng, "moderate", ours.c_dtype, (m, n))]


def test_bytes_are_codes_and_no_accumulator_is_zero(wgmma: Instruction) -> None:
    a, b, c = operands_of(wgmma)
    d = wgmma(a, b, c)
    assert (d.shape, d.dtype) == (c.shape, np.float32)
    assert_same_bits(wgmma(a.view(np.uint8), b.view(np.uint8), c), d)
    assert_same_bits(wgmma(a, b), wgmma(a, b, np.zeros_like(c)))


def test_jit_and_vmap_change_no_bit(wgmma: Instruction) -> None:
    examples = [operands_of(wgmma, seed) for seed in range(3)]
    stacked = [np.stack(x) for x in zip(*examples, strict=True)]
    expected = np.stack([np.asarray(wgmma(*x)) for x in examples])
    assert_same_bits(jax.vmap(wgmma.__call__)(*stacked), expected)
    assert_same_bits(jax.jit(jax.vmap(lambda *x: wgmma(*x)))(*stacked), expected)


def test_a_deeper_instruction_is_two_of_half_its_k() -> None:
    deep = instruction("mma.m16n8k32.f32.e4m3.e5m2", arch="sm_89")
    half = instruction("mma.m16n8k16.f32.e4m3.e5m2", arch="sm_89")
    a, b, c = operands_of(deep)
    assert_same_bits(deep(a, b, c), half(a[:, 16:], b[16:], half(a[:, :16], b[:16], c)))


@pytest.mark.filterwarnings("ignore::jax_fp8.emulation.OverflowWarning")
@pytest.mark.parametrize("name", ["hopper_wgmma", "blackwell_tcgen05", "hopper_wgmma_f16"])
def test_a_gemm_is_a_chain_of_instructions(name: str, emulate_row: str) -> None:
    types = "f16" if MACHINES[name].is_fp16 else "f32"
    ours = instruction(
        f"wgmma.m64n16k32.{types}.e4m3.e5m2" if name.startswith("hopper")
        else f"tcgen05.mma.m64n16k32.{types}.e4m3.e5m2"
    )  # fmt: skip
    assert ours.machine.name == name
    parts = [operands_of(ours, seed)[:2] for seed in range(4)]
    d = None
    for a, b in parts:
        d = ours(a, b, d)
    lhs, rhs = (np.concatenate([p[i] for p in parts], axis=1 - i) for i in (0, 1))
    with fp8.force_kernel(emulate_row):
        out = fp8.scaled_matmul(lhs, rhs, 1.0, 1.0, accumulation=name, promotion_interval=None)
    assert_same_bits(out, jnp.asarray(d).astype(np.float32))


#: Fraction bits of an accumulator of 1 that survive a step of zeros.
KEPT_BITS = {
    "wgmma.m64n8k32.f32.e4m3.e4m3": (None, 13),
    "mma.m16n8k32.f32.e4m3.e4m3.f32": ("sm_90", 23),
    "mma.m16n8k16.f32.e4m3.e4m3.f32": ("sm_89", 13),
    "tcgen05.mma.m128n8k32.kind::f8f6f4.f32.e4m3.e4m3": (None, 23),
    "v_mfma_f32_16x16x32_fp8_fp8": (None, 23),
}


@pytest.mark.parametrize("name", KEPT_BITS)
def test_an_accumulator_keeps_as_many_bits_as_its_machine_has(name: str) -> None:
    arch, kept = KEPT_BITS[name]
    ours = instruction(name, arch=arch)
    m, n, k = ours.shape
    c = np.ones((m, n), np.float32)
    c[0] += np.float32(2.0**-kept)
    c[1] = -c[0]
    c[2] += np.float32(2.0 ** -(kept + 1))  # 1 where FP32 itself has no such bit
    d = ours(np.zeros((m, k), ours.a_dtype), np.zeros((k, n), ours.b_dtype), c)
    expected = c.copy()
    expected[2] = 1
    assert_same_bits(d, expected)


def test_codes_that_become_fp16_align_as_fp16_values_do() -> None:
    # 2^-9 is subnormal in E4M3, whose smallest exponent is -6, and normal in FP16. The accumulator
    # lies 22 bits below their product, and 28 below what E4M3's exponents say of it.
    c = np.full((16, 8), 2.0**-40, np.float32)
    for arch, expected in (("sm_90", 2.0**-18 + 2.0**-40), ("sm_120", 2.0**-18)):
        ours = instruction("mma.m16n8k32.f32.e4m3.e4m3.f32", arch=arch)
        a, b = np.zeros((16, 32), ours.a_dtype), np.zeros((32, 8), ours.b_dtype)
        a[:, 3] = b[3] = 2.0**-9
        assert_same_bits(ours(a, b, c), np.full((16, 8), expected, np.float32))


def test_a_nan_has_all_bits_but_the_sign(wgmma: Instruction) -> None:
    half = instruction("wgmma.m64n16k32.f16.e4m3.e5m2")
    for ours, expected in ((wgmma, 0x7FFFFFFF), (half, 0x7FFF)):
        a, b, _ = operands_of(ours)
        a[3, 7] = np.nan
        d = np.asarray(ours(a, b))
        unsigned = d.view(np.uint32 if d.itemsize == 4 else np.uint16)
        assert set(unsigned[3].tolist()) == {expected}
        assert np.isfinite(np.delete(d, 3, axis=0)).all()


def test_block_scales_multiply_by_powers_of_two() -> None:
    ours = instruction("tcgen05.mma.m128n8k32.kind::mxf8f6f4.f32.e4m3.e4m3")
    a, b, _ = operands_of(ours)
    e8m0 = ml_dtypes.float8_e8m0fnu
    one = np.ones((128, 1), e8m0), np.ones((1, 8), e8m0)
    plain = np.asarray(ours(a, b, None, *one))
    quarter, eight = np.full((128, 1), 0.25, e8m0), np.full((1, 8), 8, e8m0)
    assert_same_bits(ours(a, b, None, quarter, eight), plain * np.float32(2))
    as_bytes = [x.view(np.uint8) for x in (quarter, eight)]
    assert_same_bits(ours(a, b, None, *as_bytes), plain * np.float32(2))
    quarter[5] = np.nan
    d = np.asarray(ours(a, b, None, quarter, eight))
    assert np.isnan(d[5]).all()
    assert np.isfinite(np.delete(d, 5, axis=0)).all()


def test_bad_operands_raise_with_instruction_operand_and_what_it_must_be(
    wgmma: Instruction,
) -> None:
    a, b, c = operands_of(wgmma)
    scale = np.ones((64, 1), ml_dtypes.float8_e8m0fnu), np.ones((1, 16), ml_dtypes.float8_e8m0fnu)
    bad: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (TypeError, "a has dtype float8_e5m2; it must be float8_e4m3fn",
         (a.astype(b.dtype), b, c)),
        (TypeError, "b has dtype float32; it must be float8_e5m2", (a, b.astype(np.float32), c)),
        (TypeError, "c has dtype float16; it must be float32", (a, b, np.float16(c / 1e9))),
        (ValueError, r"a has shape \(32, 64\); it must be \(64, 32\)", (a.T, b, c)),
        (ValueError, r"b has shape \(32, 15\); it must be \(32, 16\)", (a, b[:, 1:], c)),
        (ValueError, r"c has shape \(16,\); it must be \(64, 16\)", (a, b, c[0])),
        (ValueError, "it has no scales: leave a_scale and b_scale out", (a, b, c, *scale)),
        (ValueError, "it has no scales", (a, b, c, None, scale[1])),
    ]  # fmt: skip
    for error, message, operands in bad:
        for call in (wgmma, lambda *x: jax.eval_shape(wgmma.__call__, *x)):
            with pytest.raises(error, match=f"wgmma.m64n16k32.f32.e4m3.e5m2: {message}"):
                call(*operands)


def test_missing_and_wrong_scales_raise() -> None:
    ours = instruction("mma.m16n8k32.kind::mxf8f6f4.f32.e4m3.e4m3.f32.ue8m0", arch="sm_120")
    a, b, c = operands_of(ours)
    e8m0 = ml_dtypes.float8_e8m0fnu
    a_scale, b_scale = np.ones((16, 1), e8m0), np.ones((1, 8), e8m0)
    with pytest.raises(ValueError, match="it multiplies by scales: give a_scale and b_scale"):
        ours(a, b, c)
    with pytest.raises(ValueError, match="give a_scale and b_scale"):
        ours(a, b, c, a_scale)
    with pytest.raises(ValueError, match=r"b_scale has shape \(8, 1\); it must be \(1, 8\)"):
        ours(a, b, c, a_scale, b_scale.T)
    with pytest.raises(TypeError, match="a_scale has dtype float32; it must be float8_e8m0fnu"):
        ours(a, b, c, a_scale.astype(np.float32), b_scale)


def test_instructions_and_machines_are_values() -> None:
    name = "wgmma.m64n16k32.f32.e4m3.e4m3"
    assert instruction(name) == instruction(name) != instruction(name.replace("n16", "n24"))
    assert len({instruction(name), instruction(name)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        MACHINES["fp16"].step = 2  # type: ignore[misc]
