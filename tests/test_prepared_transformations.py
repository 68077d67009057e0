"""Prepared weights under transformations, their derivatives, and what explain and diagnose show."""

import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from checks import assert_same_bits
from jax_fp8.diagnosis import capture
from jax_fp8.testing import oracle

Array = np.ndarray[Any, Any]


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- Transformations ------------------------------------------------------------------------------


def test_vmap_over_any_operand_is_a_loop() -> None:
    x, w = normal(0, 3, 2, 40), normal(1, 3, 40, 70)
    prepared = fp8.prepare(w)
    first = jax.tree.map(lambda y: y[0], prepared)
    expected = np.stack([fp8.matmul(a, b) for a, b in zip(x, w, strict=True)])
    assert_same_bits(jax.vmap(fp8.matmul)(x, prepared), expected)
    one_w = np.stack([fp8.matmul(a, w[0]) for a in x])
    assert_same_bits(jax.vmap(fp8.matmul, (0, None))(x, first), one_w)
    one_x = np.stack([fp8.matmul(x[0], b) for b in w])
    assert_same_bits(jax.vmap(fp8.matmul, (None, 0))(x[0], prepared), one_x)
    nested = jax.vmap(jax.vmap(fp8.matmul, (0, None)), (None, 0))(x, prepared)
    assert_same_bits(nested, np.stack([[fp8.matmul(a, b) for a in x] for b in w]))
    assert_same_bits(jax.vmap(fp8.prepare)(w).values, prepared.values)


def test_jit_argument_constant_scan_and_remat_are_eager_calls() -> None:
    x, w = normal(0, 2, 70), normal(1, 3, 70, 70)
    prepared = jax.device_put(fp8.prepare(w))
    expected = x
    for matrix in w:
        expected = fp8.matmul(expected, matrix)

    def stack(x: Any, prepared: Any) -> Any:
        body = jax.checkpoint(lambda c, w: (fp8.matmul(c, w), None))
        return jax.lax.scan(body, x, prepared)[0]

    assert_same_bits(jax.jit(stack)(x, prepared), expected)
    assert_same_bits(jax.jit(lambda x: stack(x, prepared))(x), expected)


def test_gradient_goes_through_a_scan_with_remat() -> None:
    x, w = normal(0, 2, 70), normal(1, 3, 70, 70) / 8
    prepared = fp8.prepare(w)

    def stack(x: Any, w: Any) -> Any:
        body = jax.checkpoint(lambda c, w: (jnp.tanh(fp8.matmul(c, w)), None))
        return jax.lax.scan(body, x, w)[0].sum()

    actual = jax.jit(jax.grad(stack))(x, prepared)
    assert_same_bits(actual, jax.jit(jax.grad(stack))(x, w))


def test_leaves_may_be_numpy_arrays() -> None:
    x, w = normal(0, 2, 70), normal(1, 70, 66)
    loaded = jax.tree.map(np.asarray, fp8.prepare(w))
    for run in (lambda f: f, jax.jit):
        assert_same_bits(run(fp8.matmul)(x, loaded), fp8.matmul(x, w))
    assert_same_bits(fp8.matmul(x[None], loaded), fp8.matmul(x[None], w))


def test_a_decode_step_reads_codes_only_and_quantises_no_weights() -> None:
    x, prepared = normal(0, 1, 128), fp8.prepare(normal(1, 128, 130))
    text = jax.jit(fp8.matmul).lower(x, prepared).as_text()
    assert text.count("@jax_fp8.quantize.v1") == 1  # x
    assert text.count('rhs_layout = "panels"') == 1
    assert "f32[128,130]" not in jax.jit(fp8.matmul).lower(x, prepared).compile().as_text()


def test_export_round_trip() -> None:
    x, prepared = normal(0, 2, 40), fp8.prepare(normal(1, 40, 70))
    names = ("quantize", "gemm")
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"jax_fp8.{n}.v1") for n in names]
    exported = jax.export.export(jax.jit(fp8.matmul), disabled_checks=checks)(x, prepared)
    assert_same_bits(exported.call(x, prepared), fp8.matmul(x, prepared))


def test_shard_map_over_rows_and_over_a_stack() -> None:
    x, w = normal(0, 8, 40), normal(1, 4, 40, 70)
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    first = fp8.prepare(w[0])
    rows = jax.shard_map(fp8.matmul, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
    assert_same_bits(jax.jit(rows)(x, first), fp8.matmul(x, w[0]))
    grad = jax.jit(jax.grad(lambda x, w: (rows(x, w) ** 2).sum()))(x, first)
    assert_same_bits(grad, jax.grad(lambda x, w: (fp8.matmul(x, w) ** 2).sum())(x, w[0]))
    stack = jax.shard_map(fp8.matmul, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    assert_same_bits(jax.jit(stack)(x[None], fp8.prepare(w)), fp8.matmul(x[None], w))
    dx = jax.jit(jax.grad(lambda x, w: stack(x, w).sum()))(x[None], fp8.prepare(w))
    assert np.isfinite(dx).all()


# --- Derivatives ----------------------------------------------------------------------------------


def loss(x: Any, w: Any, recipe: Any, **options: Any) -> Any:
    return jnp.sum(jnp.sin(fp8.matmul(x, w, recipe=recipe, **options)))


@pytest.mark.parametrize(
    "recipe",
    [
        fp8.TensorScaling(), fp8.BlockScaling(), fp8.TileScaling(32, 32),
        fp8.StaticScaling(input=1 / 448, weight=2.0**-7, ste="mask_saturated"),
    ],
    ids=lambda recipe: type(recipe).__name__,
)  # fmt: skip
@pytest.mark.parametrize(
    ("lhs_batch", "rhs_batch"), [((), ()), ((3,), ()), ((1,), (3,)), ((3,), (1,))], ids=str
)
def test_gradient_of_the_input_has_the_bits_of_unprepared_weights_where_tiles_are_square(
    recipe: Any, lhs_batch: tuple[int, ...], rhs_batch: tuple[int, ...]
) -> None:
    x, w = normal(0, *lhs_batch, 5, 70), normal(1, *rhs_batch, 70, 130)
    prepared = fp8.prepare(w, recipe=recipe)
    expected = jax.jit(jax.grad(functools.partial(loss, recipe=recipe)))(x, w)
    actual = jax.jit(jax.grad(functools.partial(loss, recipe=recipe)))(x, prepared)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("recipe", [fp8.RowScaling(), fp8.MXScaling()], ids=["row", "mx"])
def test_gradient_of_the_input_is_a_product_with_the_stored_codes(recipe: Any) -> None:
    x, w, ct = normal(0, 5, 70), normal(1, 70, 66), normal(2, 5, 66)
    prepared = fp8.prepare(w, recipe=recipe)
    _, pullback = jax.vjp(lambda x: fp8.matmul(x, prepared, recipe=recipe), x)
    rows, k = recipe.tile("gradient")
    g = oracle.quantize_np(ct, "e5m2", (rows, k), power_of_two=recipe.power_of_two)
    codes = oracle.dequantize_np(np.asarray(prepared.unprepare().values),
                                 np.asarray(prepared.scale), prepared.tile)  # fmt: skip
    exact = oracle.dequantize_np(*g, (rows, k)) @ codes.T
    (dx,) = pullback(ct)
    assert np.abs(dx - exact).max() < 1e-6 * np.abs(exact).max()


def test_gradient_of_the_input_takes_a_key_and_keeps_the_dtype() -> None:
    recipe = fp8.BlockScaling(rounding="stochastic")
    x, w, key = normal(0, 5, 70).astype(jnp.bfloat16), normal(1, 70, 66), jax.random.key(3)
    prepared = fp8.prepare(w.astype(jnp.bfloat16), recipe=recipe)
    f = functools.partial(loss, recipe=recipe, key=key)
    actual = jax.grad(f)(x, prepared)
    assert_same_bits(actual, jax.grad(f)(x, w.astype(jnp.bfloat16)))
    examples = jax.vmap(jax.grad(f), (0, None))(jnp.stack([x, x]), prepared)
    assert examples.dtype == jnp.bfloat16


def test_prepared_weights_have_no_gradient() -> None:
    x, prepared = normal(0, 5, 70), fp8.prepare(normal(1, 70, 66))
    f = functools.partial(loss, recipe=None)
    message = (
        "a gradient was asked of the .* of rhs, a PreparedArray, .* prepared weights are const"
    )
    for run in (lambda g: g, jax.jit):
        with pytest.raises(TypeError, match=message):
            run(jax.grad(f, 1))(x, prepared)
    stopped = lambda x, w: f(x, jax.lax.stop_gradient(w))
    assert not np.asarray(jax.grad(stopped, 1)(x, prepared).scale).any()
    with pytest.raises(TypeError, match="piecewise constant"):
        jax.grad(lambda w: f(x, fp8.prepare(w)))(normal(1, 70, 66))


def test_a_second_derivative_and_forward_mode_are_refused() -> None:
    x, prepared = normal(0, 5, 70), fp8.prepare(normal(1, 70, 66))
    f = functools.partial(loss, w=prepared, recipe=None)
    with pytest.raises(TypeError, match="second derivatives need the weights from before prepare"):
        jax.grad(lambda x: jax.grad(f)(x).sum())(x)
    linear = lambda x: fp8.matmul(x, prepared).sum()
    assert not np.asarray(jax.grad(lambda x: jax.grad(linear)(x).sum())(x)).any()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (x,), (x,))


# --- explain and diagnose -------------------------------------------------------------------------


def test_explain_shows_the_layout_and_no_gradient_of_the_weights() -> None:
    prepared = fp8.prepare(normal(1, 70, 66), recipe=fp8.RowScaling(weight_format="e5m2"))
    found = fp8.explain(jax.ShapeDtypeStruct((2, 70), jnp.bfloat16), prepared)
    assert [choice.name for choice in found.gemms] == ["forward", "lhs gradient"]
    assert found.gemms[0].request == "m=2 n=66 k=70 e4m3fn[1x70,mk]·e5m2[1x70,panels]->bf16"
    assert found.gemms[1].request == "m=2 n=70 k=66 e5m2[1x66,mk]·e5m2[70x1,nk]->bf16"
    with fp8.force_kernel("scalar"):
        assert fp8.explain(normal(0, 2, 70), prepared).gemms[0].kernel == "scalar"
    stack = jax.eval_shape(fp8.prepare, jnp.ones((3, 70, 66)))
    assert fp8.explain(jnp.ones((3, 2, 70)), stack).gemms[0].request.startswith("m=2 n=66 k=70")
    shapes = jax.eval_shape(fp8.prepare, jnp.ones((70, 66)))
    assert fp8.explain(jnp.ones((2, 70)), shapes).gemms[0].kernel == found.gemms[0].kernel


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"rhs": (1, 70, 64)}, r"rhs\(1, 70, 64\) does not have the 2 panels of 64 .* hold n=66"),
        ({"rhs": (2, 70, 32)}, r"rhs\(2, 70, 32\) does not have the 2 panels of 64 .* hold n=66"),
        ({"rhs": (70, 66)}, r"rhs\(70, 66\) in panels, with one dim more, .* same number of dims"),
        ({"rhs": (2, 71, 64)}, r"lhs\(2, 70\) has k=70, rhs\(2, 71, 64\) has k=71"),
        ({"rhs_scale": (1, 2)}, r"rhs_scale\(1, 2\) does not have .* of \(n=66, k=70\)"),
        ({"lhs_layout": "panels"}, "lhs_layout must be 'mk' or 'km', is 'panels'"),
        ({"rhs_layout": "panel"}, "rhs_layout must be 'nk' or 'kn' or 'panels', is 'panel'"),
        ({"kernel": "fast"}, r"e4m3fn\[66x70,panels\]->f32\): there is no row named 'fast'"),
    ],
    ids=str,
)
def test_the_handler_reads_nothing_outside_of_panels(change: Any, message: str) -> None:
    fp8.register()
    shapes = {"lhs": (2, 70), "rhs": (2, 70, 64), "rhs_scale": (1, 1)}
    shapes |= {key: value for key, value in change.items() if key in shapes}
    attributes = {
        "lhs_layout": "mk", "rhs_layout": "panels", "kernel": "", "accumulation": "native",
        "lhs_tile": np.array([2, 80]), "rhs_tile": np.array([66, 80]),
        "promotion_interval": np.int64(0), "split_k": np.int64(1), "any_order": False,
    }  # fmt: skip
    attributes |= {key: value for key, value in change.items() if key in attributes}
    call = jax.ffi.ffi_call("jax_fp8.gemm.v1", jax.ShapeDtypeStruct((2, 66), np.float32))
    codes = [np.ones(shapes[side], fp8.E4M3FN.dtype) for side in ("lhs", "rhs")]
    operands = (*codes, np.ones((1, 1), np.float32), np.ones(shapes["rhs_scale"], np.float32))
    if not message:
        assert_same_bits(call(*operands, **attributes), np.full((2, 66), 70, np.float32))
        return
    with pytest.raises(Exception, match=message):
        call(*operands, **attributes)


def test_diagnose_sees_prepared_weights_as_a_matrix_and_their_gradient() -> None:
    x, w = normal(0, 2, 16, 70), normal(1, 70, 66)
    weights = {"up": fp8.prepare(w)}
    f = lambda x, weights: jnp.sin(fp8.matmul(x, weights["up"])).sum()
    forward, dgrad = capture.capture(f, x, weights).gemms
    assert (forward.name, dgrad.name) == ("up forward", "up dgrad")
    assert_same_bits(forward.rhs.codes[0].T, weights["up"].unprepare().values)
    assert (dgrad.lhs.role, dgrad.rhs.role) == ("gradient", "weight")
    assert_same_bits(dgrad.rhs.codes[0], weights["up"].unprepare().values)
    assert "up dgrad" in str(fp8.diagnose(f, x, weights))
