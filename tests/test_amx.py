"""The amx row, which adds up in an order of its own: its bits against a model of the instruction.

Skipped where the CPU, or its system, has no AMX.
"""

from typing import Any

import hypothesis
import jax
import numpy as np
import pytest

import jax_fp8 as fp8
import strategies
from checks import assert_gemm_close, assert_same_bits
from jax_fp8 import lowering
from jax_fp8.testing import oracle
from strategies import GemmCase, canonical, matmul_arguments

WHY_NOT = next(row.why_not for row in lowering.kernel_table() if row.name == "amx")
needs_amx = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

#: Products that the instruction adds up at once.
STEP = 32


def add_in_steps(fma: oracle.Fma, begin: int, end: int) -> oracle.Float32:
    """The sum of a piece by TDPBF16PS.

    Of every 32 k, counted from the start of the piece, those with even and those with odd index
    are two chains of FMAs, whose sum is added to the accumulator (Intel 64 and IA-32 Architectures
    Software Developer's Manual, volume 2).
    """
    total = np.zeros((), np.float32)
    for step in range(begin, end, STEP):
        chains = [np.zeros((), np.float32)] * 2
        for i in range(step, min(step + STEP, end)):
            chains[(i - step) % 2] = fma(i, chains[(i - step) % 2])
        with np.errstate(all="ignore"):
            total = total + (chains[0] + chains[1])
    return total


def expected(arguments: tuple[Any, ...]) -> oracle.Float32:
    return oracle.sum_of_pieces_np(add_in_steps, *arguments)


@needs_amx
@hypothesis.given(case=strategies.gemm_cases(largest=90, max_products=60_000, finite=False))
@hypothesis.settings(max_examples=120)
def test_generated_cases_have_the_bits_of_the_instruction(case: GemmCase) -> None:
    def call(*arrays: Any) -> jax.Array:
        lhs = fp8.ScaledArray(arrays[0], arrays[1], case.lhs.tile)
        rhs = fp8.ScaledArray(arrays[2], arrays[3], case.rhs.tile)
        return fp8.scaled_dot_general(lhs, rhs, case.dimension_numbers, case.out_dtype)

    with fp8.force_kernel("amx"):
        actual = jax.jit(call)(case.lhs.values, case.lhs.scale, case.rhs.values, case.rhs.scale)
    with np.errstate(all="ignore"):
        bits = expected(case.problem().arguments).reshape(case.out_shape).astype(case.out_dtype)
    assert_same_bits(np.asarray(actual), bits, any_nan=True)


@needs_amx
@pytest.mark.parametrize(
    ("m", "n", "k", "lhs_tile", "rhs_tile"),
    [
        (33, 65, 515, (1, 128), (128, 128)),  # a row tile of one row, a step that is not full
        (5, 40, 1030, (2, 513), (600, 3)),  # pieces longer than a block, of odd length
        (17, 31, 700, (17, 700), (700, 31)),  # one piece over several blocks
        (64, 32, 290, (1, 37), (61, 1)),
        (1, 1, 31, (1, 31), (31, 1)),
    ],
    ids=str,
)
def test_pieces_and_blocks_have_the_bits_of_the_instruction(
    m: int, n: int, k: int, lhs_tile: tuple[int, int], rhs_tile: tuple[int, int]
) -> None:
    arguments = matmul_arguments(3, m, n, k, lhs_tile, rhs_tile)
    with fp8.force_kernel("amx"):
        actual = np.asarray(fp8.scaled_matmul(**arguments))
        first = np.asarray(fp8.scaled_matmul(**arguments))
    assert_same_bits(actual, expected(canonical(arguments)))
    assert_same_bits(actual, first)


@needs_amx
def test_it_adds_up_in_another_order_than_the_others_within_the_same_bound() -> None:
    arguments = matmul_arguments(5, 70, 300, 1000, (1, 128), (128, 100))
    with fp8.force_kernel("amx"):
        actual = np.asarray(fp8.scaled_matmul(**arguments))
    assert (actual != np.asarray(fp8.scaled_matmul(**arguments))).any()
    assert_gemm_close(
        actual,
        oracle.gemm_np(*canonical(arguments)),
        oracle.gemm_bound_np(*canonical(arguments)),
    )


def test_it_is_chosen_only_where_any_order_will_do() -> None:
    x = jax.ShapeDtypeStruct((64, 256), np.float32)
    w = jax.ShapeDtypeStruct((256, 64), np.float32)
    for choice in fp8.explain(x, w).gemms:
        assert choice.kernel != "amx"
        assert WHY_NOT or "deterministic(False)" in dict(choice.refusals)["amx"]


@needs_amx
def test_it_is_chosen_under_deterministic_false_but_for_few_rows() -> None:
    arguments = matmul_arguments(6, 5, 40, 300, (1, 128), (128, 40))
    few = arguments | {name: arguments[name][:4] for name in ("lhs", "lhs_scale")}
    with fp8.force_kernel("amx"):
        forced = np.asarray(fp8.scaled_matmul(**arguments))
    in_order = np.asarray(fp8.scaled_matmul(**arguments))
    with fp8.deterministic(False):
        assert_same_bits(fp8.scaled_matmul(**arguments), forced)
        assert_same_bits(fp8.scaled_matmul(**few), in_order[:4])
    assert (forced[:4] != in_order[:4]).any()
