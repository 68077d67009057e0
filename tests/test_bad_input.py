"""What does not fit raises while it is traced, and says which call and operand, and the remedy.

Each case runs eagerly, under jit, and with abstract values only, which no kernel ever sees.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_fp8 as fp8
from bad_input.common import E4M3FN, LHS, NUMBERS, ONE, Q_LHS, Q_RHS, RHS, W, X, scaled_dot
from bad_input.operands import DOUBLE, DTYPES, SIZES
from bad_input.options import GRADIENTS, OPTIONS
from bad_input.prepared import PREPARED, WEIGHTS
from bad_input.scales import SCALES, TILES

BAD = SCALES | TILES | DTYPES | SIZES | OPTIONS | GRADIENTS | PREPARED
RUNS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "abstract": lambda f: functools.partial(jax.eval_shape, f),
}


def assert_raises(bad, run):
    operands = jax.tree.map(jnp.asarray, bad.operands)
    with pytest.raises(bad.error) as raised:
        run(bad.call)(*operands)
    for part in bad.parts:
        assert part in str(raised.value)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_with_call_operand_sizes_and_remedy(name, run):
    assert_raises(BAD[name], RUNS[run])


# --- float64 --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", DOUBLE)
def test_float64_raises(name, run):
    assert_raises(DOUBLE[name], RUNS[run])


@pytest.mark.usefixtures("x64")
def test_x64_changes_nothing_for_float32_operands_and_python_scales():
    y = fp8.scaled_matmul(LHS, RHS, 0.5, 2)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, np.full((4, 8), 256))
    q = fp8.quantize(X, scale=0.25)
    assert q.scale.dtype == np.float32
    np.testing.assert_array_equal(q.values.astype(np.float32), np.full((4, 256), 4))
    dx, dw = jax.grad(lambda x, w: fp8.matmul(x, w).sum(), (0, 1))(X, W)
    assert dx.dtype == dw.dtype == np.float32
    np.testing.assert_allclose(dw, np.full((256, 8), 4), rtol=1e-6)


# --- Platforms and kernels ------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
@pytest.mark.parametrize(
    ("call", "operands", "name"),
    [
        (fp8.matmul, (X, W), "quantize"),
        (jax.grad(lambda x, w: fp8.matmul(x, w).sum()), (X, W), "quantize"),
        (fp8.quantize, (X,), "quantize"),
        (fp8.dequantize, (Q_LHS,), "dequantize"),
        (fp8.scaled_matmul, (LHS, RHS, ONE, ONE), "gemm"),
    ],
)
def test_platform_without_kernel_raises_where_a_kernel_is_required(platform, call, operands, name):
    with fp8.require_kernel():
        traced = jax.jit(call).trace(*operands)
    with pytest.raises(NotImplementedError) as raised:
        traced.lower(lowering_platforms=(platform,))
    for part in (
        f"jax_fp8.{name} on float",  # and the shapes
        f": there is no kernel for the platform {platform}",
        "kernels exist for cpu",
        "JAX_FP8_REQUIRE_KERNEL=1 or require_kernel() forbids it",
    ):
        assert part in str(raised.value)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_platform_without_kernel_raises_where_one_is_forced(platform, monkeypatch):
    monkeypatch.setenv("JAX_FP8_REQUIRE_KERNEL", "0")

    def lower(call):
        traced = jax.jit(call).trace(LHS, RHS, ONE, ONE)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "dot_general" in lower(lambda *operands: fp8.scaled_matmul(*operands))  # the reference
    with (
        fp8.force_kernel("scalar"),
        pytest.raises(NotImplementedError, match=f"kernel 'scalar' was forced.*{platform}.*cpu"),
    ):
        lower(lambda *operands: fp8.scaled_matmul(*operands))


def test_unknown_kernel_raises_and_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"force_kernel: there is no kernel 'turbo'.*scalar"):
        fp8.force_kernel("turbo")


def test_unknown_machine_raises_and_lists_those_that_exist():
    with pytest.raises(
        ValueError,
        match=r"emulate: accumulation is 'abacus'; there is no such accumulation model; there are "
        r"native, hopper_wgmma, .*, exact",
    ):
        fp8.emulate("abacus")


# --- Explicit meshes ------------------------------------------------------------------------------

EXPLICIT = {
    "lhs of matmul": (lambda x: fp8.matmul(x, W), X, "matmul: dim 0 of lhs (shape (4, 256))"),
    "rhs of matmul": (lambda w: fp8.matmul(X, w), W, "matmul: dim 0 of rhs (shape (256, 8))"),
    "dot_general": (
        lambda x: fp8.dot_general(x, W, NUMBERS),
        X,
        "dot_general: dim 0 of lhs (shape (4, 256))",
    ),
    "einsum": (
        lambda x: fp8.einsum("mk,kn->mn", x, W),
        X,
        "einsum: dim 0 of operand 0 (shape (4, 256))",
    ),
    "gradient": (
        jax.grad(lambda x: fp8.matmul(x, W).sum()),
        X,
        "matmul: dim 0 of lhs (shape (4, 256))",
    ),
    "lhs of scaled_matmul": (
        lambda lhs: fp8.scaled_matmul(lhs, RHS, ONE, ONE),
        LHS,
        "scaled_matmul: dim 0 of lhs (shape (4, 256))",
    ),
    "lhs_scale of scaled_matmul": (
        lambda scale: fp8.scaled_matmul(LHS, RHS, scale, ONE),
        np.ones((4, 1), np.float32),
        "(shape (4, 1))",
    ),
    "scaled_dot_general": (
        lambda lhs: scaled_dot(fp8.ScaledArray(lhs, Q_LHS.scale, Q_LHS.tile), Q_RHS),
        LHS,
        "scaled_dot_general: dim 0 of lhs (shape (4, 256))",
    ),
    "lhs of prepared weights": (
        lambda x: fp8.matmul(x, WEIGHTS),
        X,
        "matmul: dim 0 of lhs (shape (4, 256))",
    ),
    "prepared weights": (
        lambda values: fp8.matmul(
            W.T, fp8.PreparedArray(values, ONE.reshape(1, 1), 200, (256, 200))
        ),
        np.ones((4, 256, 64), E4M3FN),
        "matmul: dim 0 of rhs (shape (4, 256, 64))",
    ),
    "prepare": (fp8.prepare, W, "prepare: dim 0 of w (shape (256, 8))"),
    "quantize": (fp8.quantize, X, "quantize: dim 0 of x (shape (4, 256))"),
    "dequantize": (
        lambda values: fp8.dequantize(fp8.ScaledArray(values, Q_LHS.scale, Q_LHS.tile)),
        LHS,
        "dequantize: dim 0 of q (shape (4, 256))",
    ),
}


def sharded(x, axis_type):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(axis_type,))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", EXPLICIT)
def test_operand_sharded_over_an_explicit_axis_raises(name, run):
    call, operand, part = EXPLICIT[name]
    with pytest.raises(NotImplementedError) as raised:
        RUNS[run](call)(sharded(operand, AxisType.Explicit))
    for expected in (part, "Explicit mesh axis 'd'", "jax.shard_map", "jax.sharding.reshard"):
        assert expected in str(raised.value)


def test_remedies_for_an_explicit_axis_work():
    x = sharded(np.arange(4 * 256, dtype=np.float32).reshape(4, 256) / 1024, AxisType.Explicit)
    want = fp8.matmul(np.asarray(x), W)  # rows are quantised one by one: the same bits
    mesh = x.sharding.mesh
    rows, whole = PartitionSpec("d"), PartitionSpec()
    in_shard_map = jax.shard_map(fp8.matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    replicated = jax.sharding.reshard(x, NamedSharding(mesh, whole))
    auto = sharded(np.asarray(x), AxisType.Auto)
    for y in (
        jax.jit(in_shard_map)(x, jax.device_put(W, NamedSharding(mesh, whole))),
        fp8.matmul(replicated, W),
        fp8.matmul(auto, W),
    ):
        np.testing.assert_array_equal(y, want)
