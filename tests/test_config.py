"""Contexts and environment variables: part of jit's key, read when traced, static afterwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8 import config, gemm, quantize_primitive

X, W = np.ones((4, 8), np.float32), np.ones((8, 2), np.float32)


def kernel_of(fn, *args):
    """The forced kernel in the lowered GEMM calls of `fn`."""
    text = jax.jit(fn).lower(*args).as_text()
    return {
        line.split('kernel = "')[1].split('"')[0] for line in text.splitlines() if "gemm.v1" in line
    }


def test_a_jitted_function_is_traced_again_inside_a_context():
    traces = []

    @jax.jit
    def f(x):
        traces.append(None)
        return fp8.matmul(x, W)

    f(X)
    f(X)
    assert len(traces) == 1
    with fp8.force_kernel("scalar"):
        f(X)
        assert len(traces) == 2
    f(X)
    assert len(traces) == 2
    with fp8.force_kernel("scalar"):
        f(X)
    assert len(traces) == 2


def test_force_kernel_reaches_forward_and_backward_calls():
    gradient = jax.grad(lambda x, w: fp8.matmul(x, w).sum(), (0, 1))
    assert kernel_of(gradient, X, W) == {""}
    with fp8.force_kernel("scalar"):
        assert kernel_of(gradient, X, W) == {"scalar"}
        assert kernel_of(
            lambda x: fp8.scaled_matmul(x, x.T, 1.0, 1.0), X.astype(fp8.E4M3FN.dtype)
        ) == {"scalar"}
        with fp8.require_kernel():
            assert kernel_of(gradient, X, W) == {"scalar"}
    assert kernel_of(gradient, X, W) == {""}


def any_order_of(fn, *args):
    """The attribute any_order in the lowered GEMM calls of `fn`."""
    text = jax.jit(fn).lower(*args).as_text()
    return {"any_order = true" in line for line in text.splitlines() if "gemm.v1" in line}


def test_deterministic_reaches_forward_and_backward_calls(monkeypatch):
    gradient = jax.grad(lambda x, w: fp8.matmul(x, w).sum(), (0, 1))
    assert any_order_of(gradient, X, W) == {False}
    with fp8.deterministic(False):
        assert any_order_of(gradient, X, W) == {True}
        with fp8.deterministic(True):
            assert any_order_of(gradient, X, W) == {False}
    monkeypatch.setenv("JAX_FP8_DETERMINISTIC", "0")
    assert any_order_of(lambda x: fp8.matmul(x, W), X) == {True}
    with fp8.deterministic(True):
        assert any_order_of(lambda x: fp8.matmul(x, W) + 1, X) == {False}


def test_deterministic_takes_true_or_false():
    with pytest.raises(TypeError, match="deterministic: enabled is 0; it must be True or False"):
        fp8.deterministic(0)


def test_an_ahead_of_time_compiled_function_keeps_what_it_has():
    compiled = jax.jit(fp8.matmul).lower(X, W).compile()
    with fp8.force_kernel("scalar"):
        assert "scalar" not in compiled.as_text()
        np.testing.assert_array_equal(compiled(X, W), fp8.matmul(X, W))


def test_a_context_ends_with_an_exception():
    with pytest.raises(KeyError), fp8.force_kernel("scalar"):
        raise KeyError
    assert kernel_of(fp8.matmul, X, W) == {""}


def test_environment_forces_a_kernel_and_a_context_overrides_it(monkeypatch):
    monkeypatch.setenv("JAX_FP8_FORCE_KERNEL", "scalar")
    assert kernel_of(lambda x: fp8.matmul(x, W), X) == {"scalar"}
    monkeypatch.setenv("JAX_FP8_FORCE_KERNEL", "no_such_row")
    with pytest.raises(ValueError, match="JAX_FP8_FORCE_KERNEL.*'no_such_row'"):
        jax.jit(lambda x: fp8.matmul(x, W) + 1).lower(X)


def test_unknown_names_say_what_there_is():
    with pytest.raises(
        ValueError, match=r"force_kernel: there is no kernel 'fast'; there are .*scalar"
    ):
        fp8.force_kernel("fast")
    models = "there is no such accumulation model; there are native, hopper_wgmma, .*, fp32, "
    with pytest.raises(ValueError, match=f"emulate: accumulation is 'hopper'; {models}"):
        fp8.emulate("hopper")
    q = fp8.quantize(X)
    with pytest.raises(ValueError, match=f"scaled_dot_general: accumulation is 'fp12'; {models}"):
        fp8.scaled_dot_general(q, q, (((1,), (1,)), ((), ())), accumulation="fp12")
    with pytest.raises(
        ValueError, match="promotion_interval is -1; it must be None or an integer >= 1"
    ):
        fp8.scaled_dot_general(q, q, (((1,), (1,)), ((), ())), promotion_interval=-1)


def test_cpu_native_is_the_fp32_model_whatever_the_interval():
    rng = np.random.default_rng(0)
    x, w = (
        rng.standard_normal((9, 300)).astype(np.float32),
        rng.standard_normal((300, 7)).astype(np.float32),
    )
    expected = fp8.matmul(x, w)
    with fp8.emulate("fp32", promotion_interval=32):
        np.testing.assert_array_equal(fp8.matmul(x, w), expected)
        assert "accumulation='fp32'" in str(jax.make_jaxpr(fp8.matmul)(x, w))
    q, p = fp8.quantize(x), fp8.quantize(w)
    dims = (((1,), (0,)), ((), ()))
    plain = fp8.scaled_dot_general(q, p, dims)
    for accumulation, interval in (("native", 128), ("fp32", None)):
        out = fp8.scaled_dot_general(
            q, p, dims, accumulation=accumulation, promotion_interval=interval
        )
        np.testing.assert_array_equal(out, plain)


def test_without_a_kernel_the_reference_runs_unless_one_is_required(monkeypatch):
    traced = jax.jit(fp8.matmul).trace(X, W)
    with pytest.raises(
        NotImplementedError, match="no kernel for the platform cuda; kernels exist for cpu"
    ):
        traced.lower(lowering_platforms=("cuda",))
    monkeypatch.delenv("JAX_FP8_REQUIRE_KERNEL")
    text = (
        jax.jit(lambda x, w: fp8.matmul(x, w))
        .trace(X, W)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "dot_general" in text
    assert "jax_fp8" not in text
    with (
        fp8.require_kernel(),
        pytest.raises(NotImplementedError, match=r"require_kernel\(\) forbids"),
    ):
        jax.jit(fp8.matmul).trace(X, W).lower(lowering_platforms=("cuda",))
    with (
        fp8.force_kernel("scalar"),
        pytest.raises(NotImplementedError, match="'scalar' was forced"),
    ):
        jax.jit(fp8.matmul).trace(X, W).lower(lowering_platforms=("rocm",))


def test_the_reference_is_close_to_the_kernel(monkeypatch):
    # Not an oracle: only that the fallback computes the same thing.
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 50, 300)).astype(np.float32)
    execution = {"power_of_two": False, "saturate": True, "rounding": "nearest", "execution": None}
    for tile in ((50, 300), (1, 300), (1, 128), (128, 128), (7, 1)):
        kernel = quantize_primitive.bind_quantize(
            [jnp.asarray(x)], fp8.E4M3FN, (tile,), config.without_sums("test")
        )
        plain = quantize_primitive._quantize_reference(
            x, format="e4m3fn", tiles=(tile,), **execution
        )
        np.testing.assert_allclose(kernel[1], plain[1], rtol=2**-23)
        codes = [np.asarray(values).view(np.uint8).astype(int) for values in (kernel[0], plain[0])]
        assert np.abs(codes[0] - codes[1]).max() <= 1  # a scale one unit off may move a tie
        assert np.mean(codes[0] != codes[1]) < 1e-3
    a, b = fp8.quantize(x, "e4m3", (1, 128)), fp8.quantize(x, "e5m2", (-1, -1))
    out = fp8.scaled_dot_general(a, b, (((2,), (2,)), ((0,), (0,))))
    plain = gemm._reference(
        a.values, b.values, a.scale, b.scale, lhs_axis=-1, rhs_axis=-1,
        lhs_tile=(1, 128), rhs_tile=(50, 300), rhs_n=None, out_dtype="float32", execution=None,
    )  # fmt: skip
    np.testing.assert_allclose(out, plain, rtol=1e-4, atol=1e-4)
