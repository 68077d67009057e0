"""What short accumulators cost: the published sizes of their errors, and how to be rid of them.

Errors are against float64 sums of the same codes, which are exact for E4M3 operands. Percentages
with a range were measured with other code, for this data, at other seeds.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.emulation import MACHINES, OverflowWarning, count_overflows

Array = np.ndarray[Any, Any]
NUMBERS = (((1,), (1,)), ((), ()))
SAME_SIGN = {
    "relu": lambda rng, shape: np.maximum(rng.standard_normal(shape), 0),
    "uniform": lambda rng, shape: rng.random(shape),
}


def normal(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return rng.standard_normal(shape)


@functools.cache
def operands(data: Callable[..., Array], size: int, k: int, seed: int = 0) -> tuple[Any, Any]:
    """Two operands (size, k) in E4M3 with scales of amax / 448."""
    rng = np.random.default_rng(seed)
    sides = (np.asarray(data(rng, (size, k)), np.float32) for _ in range(2))
    lhs, rhs = (fp8.quantize(x, "e4m3", (-1, -1)) for x in sides)
    return lhs, rhs


def error_and_exact(lhs: Any, rhs: Any, **options: Any) -> tuple[Array, Array]:
    out = np.asarray(fp8.scaled_dot_general(lhs, rhs, NUMBERS, **options), np.float64)
    codes = [np.asarray(q.values).astype(np.float64) for q in (lhs, rhs)]
    exact = codes[0] @ codes[1].T * float(lhs.scale[0, 0]) * float(rhs.scale[0, 0])
    return out - exact, exact


def frobenius(error: Array, exact: Array) -> float:
    """In percent of the result."""
    return 100 * float(np.linalg.norm(error) / np.linalg.norm(exact))


def bias(error: Array, exact: Array) -> float:
    """In percent of the result."""
    return 100 * float(error.sum() / exact.sum())


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


def test_hopper_without_promotion_loses_two_percent_of_rms_at_worst() -> None:
    for seed in range(2):
        error, exact = error_and_exact(
            *operands(normal, 512, 4096, seed), accumulation="hopper_wgmma", promotion_interval=None
        )
        assert 0.12 < frobenius(error, exact) < 0.15
        assert 1.3 < 100 * np.abs(error).max() / rms(exact) < 2.5


def test_error_without_promotion_grows_with_k_to_the_power_of_two_thirds() -> None:
    errors = [
        frobenius(
            *error_and_exact(
                *operands(normal, 128, k), accumulation="hopper_wgmma", promotion_interval=None
            )
        )
        for k in (512, 4096, 16384)
    ]
    assert errors == pytest.approx([0.033, 0.134, 0.321], rel=0.1)


def test_promotion_every_128_makes_the_error_small_and_independent_of_k() -> None:
    errors = []
    for k in (512, 1024, 4096, 16384):
        lhs, rhs = operands(normal, 128, k)
        default = error_and_exact(lhs, rhs, accumulation="hopper_wgmma")
        errors.append(frobenius(*default))
    assert 0.010 < min(errors) < max(errors) < 0.016
    assert max(errors) < 1.1 * min(errors)


def test_the_error_falls_with_the_interval() -> None:
    lhs, rhs = operands(normal, 128, 4096)
    errors = [
        frobenius(
            *error_and_exact(lhs, rhs, accumulation="hopper_wgmma", promotion_interval=interval)
        )
        for interval in (32, 64, 128, 512)
    ]
    assert errors == pytest.approx([0.005, 0.008, 0.013, 0.034], rel=0.2)
    assert errors == sorted(errors)


@pytest.mark.parametrize("seed", range(3))
def test_sums_of_one_sign_drift_to_zero_without_promotion_and_not_with_it(seed: int) -> None:
    lhs, rhs = operands(SAME_SIGN["relu"], 128, 4096, seed)
    never = error_and_exact(lhs, rhs, accumulation="hopper_wgmma", promotion_interval=None)
    assert -1.7 < bias(*never) < -1.3
    assert abs(bias(*error_and_exact(lhs, rhs, accumulation="hopper_wgmma"))) < 0.02


def test_uniform_numbers_lose_a_quarter_of_long_sums() -> None:
    uniform = SAME_SIGN["uniform"]
    for size, k, expected, tolerance in ((128, 4096, -7.4, 0.3), (64, 16384, -25, 1)):
        never = error_and_exact(
            *operands(uniform, size, k), accumulation="hopper_wgmma", promotion_interval=None
        )
        assert bias(*never) == pytest.approx(expected, abs=tolerance)
        assert never[0].max() < 0
        promoted = error_and_exact(*operands(uniform, size, k), accumulation="hopper_wgmma")
        assert abs(bias(*promoted)) < 0.06


def test_accumulators_of_25_bits_need_no_promotion() -> None:
    for machine in ("hopper_mma", "blackwell_tcgen05", "cdna3_mfma", "fp32", "fp32_pairwise"):
        lhs, rhs = operands(normal, 64, 4096)
        error = error_and_exact(lhs, rhs, accumulation=machine, promotion_interval=None)
        assert frobenius(*error) < 0.0005
    exact = error_and_exact(lhs, rhs, accumulation="exact")
    assert frobenius(*exact) < 2.0**-23 * 100


def test_models_rank_as_their_bits_do() -> None:
    lhs, rhs = (
        fp8.quantize(x, "e4m3", (-1, -1), scale=np.float32([[0.25]]))
        for x in (np.random.default_rng(i).standard_normal((64, 2048)) for i in range(2))
        for x in (x.astype(np.float32),)
    )
    errors = {}
    with warnings.catch_warnings(action="ignore", category=OverflowWarning):
        for machine in ("exact", "hopper_mma", "hopper_wgmma", "fp16", "bf16_chunked"):
            options = {"accumulation": machine, "promotion_interval": None}
            errors[machine] = frobenius(*error_and_exact(lhs, rhs, **options))
    assert list(errors.values()) == sorted(errors.values())
    assert errors["fp16"] == pytest.approx(0.65, rel=0.25)
    assert errors["bf16_chunked"] == pytest.approx(0.94, rel=0.25)


# --- Range of FP16 --------------------------------------------------------------------------------

FP16 = [name for name, machine in MACHINES.items() if machine.is_fp16]
#: Share of normal · normal sums that overflow with scales of amax / 448, in percent, by K.
SHARES = {"fp16": {32: 73, 64: 93, 512: 100}, "hopper_wgmma_f16": {32: 45, 64: 71, 512: 99.9}}


@pytest.mark.parametrize("machine", FP16)
def test_fp16_sums_with_scales_of_amax_overflow_with_a_warning_and_are_counted(
    machine: str,
) -> None:
    for k in (32, 64, 512):
        lhs, rhs = operands(normal, 64, k)
        options = {"accumulation": machine, "promotion_interval": None}
        with count_overflows() as overflows:
            with pytest.warns(OverflowWarning, match=f"sums of {machine} overflow beyond 65504"):
                out = fp8.scaled_dot_general(lhs, rhs, NUMBERS, **options)
            out = np.asarray(jax.block_until_ready(out))
        infinite = np.count_nonzero(~np.isfinite(out))
        assert overflows.count == infinite > 0
        if machine in SHARES:
            assert 100 * infinite / out.size == pytest.approx(SHARES[machine][k], abs=8)


@pytest.mark.parametrize("machine", FP16)
def test_scales_that_leave_room_keep_fp16_sums_finite_without_a_warning(machine: str) -> None:
    rng = np.random.default_rng(0)
    x, w = (np.asarray(rng.standard_normal(s), np.float32) for s in ((64, 512), (512, 64)))
    # Codes up to 16: a sum of 512 products is a few hundred.
    recipe = fp8.StaticScaling(input=0.3, weight=0.3, accumulation=machine)
    with warnings.catch_warnings(action="error"), count_overflows() as overflows:
        out = np.asarray(jax.block_until_ready(fp8.matmul(x, w, recipe=recipe)))
    assert np.isfinite(out).all()
    assert overflows.count == 0
    native = np.asarray(fp8.matmul(x, w, recipe=fp8.StaticScaling(input=0.3, weight=0.3)))
    assert frobenius(out - native, native.astype(np.float64)) < 0.6


def test_the_warning_points_at_the_users_line_and_names_the_remedy() -> None:
    lhs, rhs = operands(normal, 64, 32)
    x = np.ones((4, 32), np.float32)
    calls = (
        lambda: fp8.scaled_dot_general(lhs, rhs, NUMBERS, accumulation="fp16"),
        lambda: fp8.matmul(x, x.T, accumulation=fp8.PerGemm(wgrad="fp16")),
        lambda: jax.jit(lambda x: fp8.matmul(x, x.T, accumulation="fp16"))(x),
        lambda: jax.grad(lambda x: fp8.matmul(x, x.T, accumulation="fp16").sum())(x),
    )
    for call in calls:
        with pytest.warns(OverflowWarning) as caught:
            call()
        assert {warning.filename for warning in caught} == {__file__}
        for part in ("room in the scales", "StaticScaling", "quantize(scale=", "count_overflows()"):
            assert all(part in str(warning.message) for warning in caught)


def test_the_count_is_of_overflows_alone() -> None:
    lhs, rhs = operands(normal, 64, 512)
    values = np.array(lhs.values)
    values[0, 0] = np.nan
    spoilt = fp8.ScaledArray(values, lhs.scale, lhs.tile)
    with warnings.catch_warnings(action="ignore"), count_overflows() as total:
        with count_overflows() as first:
            for accumulation in ("native", "exact", "hopper_wgmma", "bf16_chunked"):
                options = {"accumulation": accumulation, "promotion_interval": None}
                jax.block_until_ready(fp8.scaled_dot_general(lhs, rhs, NUMBERS, **options))
        with count_overflows() as second:
            out = fp8.scaled_dot_general(spoilt, rhs, NUMBERS, accumulation="fp16")
            jax.block_until_ready(out)
    assert first.count == 0
    assert second.count == np.count_nonzero(np.isinf(out)[1:]) == total.count
    with warnings.catch_warnings(action="ignore"):
        jax.block_until_ready(fp8.scaled_dot_general(lhs, rhs, NUMBERS, accumulation="fp16"))
    assert second.count == total.count  # a count that has ended stays as it is
