"""What cannot be emulated raises, and says which call, what was given, and the remedy."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

import jax_fp8 as fp8
from jax_fp8 import PerGemm
from jax_fp8.emulation import MACHINES

pytestmark = pytest.mark.filterwarnings("ignore::jax_fp8.emulation.OverflowWarning")

X, W = np.ones((4, 256), np.float32), np.ones((256, 8), np.float32)
LHS, RHS = X.astype(ml_dtypes.float8_e4m3fn), W.astype(ml_dtypes.float8_e5m2)
FNUZ = X.astype(ml_dtypes.float8_e4m3fnuz)
Q, P = fp8.quantize(X), fp8.quantize(W)
NUMBERS = (((1,), (0,)), ((), ()))
MX = "blackwell_tcgen05_blockscale"
E8M0 = ml_dtypes.float8_e8m0fnu
MX_SCALES = np.ones((4, 8), E8M0), np.ones((8, 8), E8M0)

CALLS: dict[str, Any] = {
    "matmul": lambda **options: fp8.matmul(X, W, **options),
    "dot_general": lambda **options: fp8.dot_general(X, W, NUMBERS, **options),
    "einsum": lambda **options: fp8.einsum("mk,kn->mn", X, W, **options),
    "scaled_matmul": lambda **options: fp8.scaled_matmul(LHS, RHS, 1.0, 1.0, **options),
    "scaled_dot_general": lambda **options: fp8.scaled_dot_general(Q, P, NUMBERS, **options),
    "emulate": lambda accumulation="native", **options: fp8.emulate(accumulation, **options),
    "TensorScaling": lambda **options: fp8.TensorScaling(**options),
}
COUNT = "it must be an integer >= 1"
INTERVAL = "it must be None or an integer >= 1"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown model": (
        {"accumulation": "abacus"},
        "accumulation is 'abacus'; there is no such accumulation model; there are native, "
        f"{', '.join(MACHINES)}",
    ),
    "model that is no name": ({"accumulation": None}, "accumulation is None; there is no such"),
    "unknown model of one gradient": (
        {"accumulation": PerGemm(wgrad="abacus")},
        "accumulation is 'abacus'; there is no such accumulation model",
    ),
    "interval 0": ({"promotion_interval": 0}, f"promotion_interval is 0; {INTERVAL}"),
    "negative interval": ({"promotion_interval": -1}, f"promotion_interval is -1; {INTERVAL}"),
    "fractional interval": ({"promotion_interval": 1.5}, f"promotion_interval is 1.5; {INTERVAL}"),
    "interval True": ({"promotion_interval": True}, f"promotion_interval is True; {INTERVAL}"),
    "split_k 0": ({"split_k": 0}, f"split_k is 0; {COUNT}"),
    "split_k None": ({"split_k": None}, f"split_k is None; {COUNT}"),
    "split_k of one gradient": ({"split_k": PerGemm(1, 0)}, f"split_k is 0; {COUNT}"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", BAD)
def test_a_value_that_no_gemm_can_take_raises_where_it_is_given(name: str, call: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        CALLS[call](**options)
    assert f"{call}: {message}" in str(raised.value)


@pytest.mark.parametrize(
    "call", [name for name in CALLS if name[0].islower() and name != "emulate"]
)
@pytest.mark.parametrize(("machine", "interval"), [("hopper_wgmma", 16), ("cdna3_mfma", 40)])
def test_an_interval_between_steps_raises_and_names_the_step(
    call: str, machine: str, interval: int
) -> None:
    step = MACHINES[machine].step
    message = (
        f"{call}: promotion_interval is {interval}, but {machine} adds {step} "
        f"products at a time: give None or a multiple of {step}"
    )
    with pytest.raises(ValueError, match=message):
        CALLS[call](accumulation=machine, promotion_interval=interval)
    with fp8.emulate(machine), pytest.raises(ValueError, match=message):
        CALLS[call](promotion_interval=interval)
    with pytest.raises(ValueError, match=message.replace(f"{call}:", "emulate:")):
        fp8.emulate(machine, promotion_interval=interval)
    with fp8.emulate("fp32", promotion_interval=interval):  # which ignores it, as quantize does
        fp8.quantize(jnp.ones((2, 64)))
        with pytest.raises(ValueError, match=message):
            CALLS[call](accumulation=machine)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: CALLS[call](accumulation=machine, promotion_interval=interval))


def test_models_without_steps_take_any_interval() -> None:
    for machine in ("fp32", "fp32_pairwise", "exact", "fp16", "native"):
        out = fp8.scaled_matmul(LHS, RHS, 1.0, 1.0, accumulation=machine, promotion_interval=7)
        assert out.tolist() == [[256.0] * 8] * 4


# --- Platforms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
@pytest.mark.parametrize("required", ["0", "1"])
def test_another_platform_raises_and_names_the_cpu(
    platform: str, required: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_FP8_REQUIRE_KERNEL", required)

    def call(lhs: Any, rhs: Any) -> Any:
        return fp8.scaled_matmul(lhs, rhs, 1.0, 1.0, accumulation="hopper_wgmma")

    message = (
        "accumulation 'hopper_wgmma' is emulated by CPU kernels only, and this is the platform "
        f"{platform}: .*jax.default_device"
    )
    with pytest.raises(NotImplementedError, match=message):
        export.export(jax.jit(call), platforms=[platform])(LHS, RHS)
    gradient = jax.grad(lambda x: fp8.matmul(x, W, accumulation=PerGemm(dgrad="ada_mma")).sum())
    monkeypatch.setenv("JAX_FP8_REQUIRE_KERNEL", "0")  # the other GEMMs may run the reference
    with pytest.raises(NotImplementedError, match="accumulation 'ada_mma' is emulated by CPU"):
        jax.jit(gradient).trace(X).lower(lowering_platforms=(platform,))


# --- Operands -------------------------------------------------------------------------------------


def test_block_scaled_steps_refuse_other_scales_and_tiles() -> None:
    e8m0 = "multiplies by powers of two: use MXScaling, or scales of dtype float8_e8m0fnu"
    for recipe in (fp8.TensorScaling(), fp8.BlockScaling(), fp8.TileScaling(1, 32)):
        with pytest.raises(ValueError, match=f"matmul: recipe {type(recipe).__name__}.* {e8m0}"):
            fp8.matmul(X, W, recipe=recipe, accumulation=MX)
    with pytest.raises(
        ValueError, match=f"scaled_matmul: lhs has scales that are not E8M0.*{e8m0}"
    ):
        fp8.scaled_matmul(LHS, RHS, 1.0, 1.0, accumulation=MX)
    with pytest.raises(
        ValueError, match=f"has a scale for every 64 k, but {MX} takes one for every 32: use MXScal"
    ):
        fp8.scaled_matmul(LHS, RHS, MX_SCALES[0][:, :4], MX_SCALES[1][:4], accumulation=MX)
    with pytest.raises(ValueError, match=r"dgrad|gradient|recipe|E8M0"):
        fp8.matmul(X, W, recipe=fp8.RowScaling(), accumulation=PerGemm(dgrad=MX))
    out = fp8.scaled_matmul(LHS, RHS, *MX_SCALES, accumulation=MX)
    assert out.tolist() == [[256.0] * 8] * 4


def test_fnuz_codes_are_refused_by_name_unless_the_machine_takes_them() -> None:
    rhs = W.astype(ml_dtypes.float8_e5m2fnuz)
    out = fp8.scaled_matmul(FNUZ, rhs, 1.0, 1.0, accumulation="cdna3_mfma")
    assert out.tolist() == [[256.0] * 8] * 4
    for machine in [name for name in ("native", *MACHINES) if name not in ("cdna3_mfma", MX)]:
        for lhs, other in ((FNUZ, RHS), (LHS, rhs)):
            with pytest.raises(TypeError, match="scaled_matmul: .hs.*FNUZ"):
                fp8.scaled_matmul(lhs, other, 1.0, 1.0, accumulation=machine)
    with pytest.raises(TypeError, match="scaled_matmul: lhs.*FNUZ"):
        fp8.scaled_matmul(FNUZ, RHS, *MX_SCALES, accumulation=MX)


def test_the_native_kernels_refuse_to_split_k() -> None:
    message = "split_k is 2, but native kernels add all k in order: .* accumulation='fp32'"
    for options in ({"split_k": 2}, {"split_k": 2, "accumulation": "native"}):
        with pytest.raises(ValueError, match=f"scaled_matmul: {message}"):
            fp8.scaled_matmul(LHS, RHS, 1.0, 1.0, **options)
    with pytest.raises(ValueError, match=f"matmul: {message}"):
        fp8.matmul(X, W, split_k=PerGemm(wgrad=2))
    out = fp8.scaled_matmul(LHS, RHS, 1.0, 1.0, accumulation="fp32", split_k=2)
    assert out.tolist() == [[256.0] * 8] * 4


# --- Precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST, "float32"])
def test_highest_precision_asks_for_promotion_of_a_short_accumulator(precision: Any) -> None:
    tensor = {"recipe": fp8.TensorScaling(), "precision": precision}
    for machine in ("hopper_wgmma", "ada_mma", "fp16", "bf16_chunked"):
        with pytest.raises(ValueError, match=f"precision .* asks for FP32 sums, .*{machine}"):
            fp8.matmul(X, W, accumulation=machine, promotion_interval=None, **tensor)
        with fp8.emulate(machine, promotion_interval=None), pytest.raises(ValueError, match="FP32"):
            jax.eval_shape(lambda x: fp8.dot_general(x, W, NUMBERS, **tensor), X)
        promoted = fp8.matmul(X, W, accumulation=machine, promotion_interval=128, **tensor)
        assert promoted.shape == (4, 8)
        fp8.matmul(X, W, accumulation=machine, promotion_interval=None, recipe=fp8.TensorScaling())
        # Tiles along k promote too.
        fp8.matmul(X, W, accumulation=machine, promotion_interval=None, precision=precision)
    for machine in ("native", "fp32", "hopper_mma", "blackwell_tcgen05", "cdna3_mfma", "exact"):
        assert fp8.matmul(X, W, accumulation=machine, **tensor).shape == (4, 8)


def test_a_per_gemm_value_is_for_differentiable_calls_only() -> None:
    for call in ("scaled_matmul", "scaled_dot_general"):
        out = CALLS[call](accumulation=PerGemm(forward="ada_mma", wgrad="fp16"))
        assert jnp.all(out == CALLS[call](accumulation="ada_mma"))
