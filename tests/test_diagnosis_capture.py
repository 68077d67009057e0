"""`capture` sees every FP8 GEMM, forward and both gradients, with the operands that it got."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_fp8 as fp8
from jax_fp8.diagnosis.capture import MAX_ITERATIONS, capture
from jax_fp8.testing.oracle import dequantize_np, gemm_np, quantize_np

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.standard_normal((32, 32)), jnp.float32)
X = jnp.asarray(RNG.standard_normal((8, 32)), jnp.float32)
STACK = jnp.asarray(RNG.standard_normal((3, 32, 32)) / 6, jnp.float32)
RECIPES = [
    fp8.TensorScaling(),
    fp8.RowScaling(),
    fp8.BlockScaling(),
    fp8.MXScaling(),
    fp8.StaticScaling(input=0.01, weight=0.02, gradient=1e-3),
    fp8.RowScaling(residuals="high_precision"),
]


def names(captured: Any) -> list[str]:
    return sorted(gemm.name for gemm in captured.gemms)


def layer(scope: str, x: Any, w: Any, **options: Any) -> Any:
    with jax.named_scope(scope):
        return jnp.tanh(fp8.matmul(x, w, **options))


def test_forward_and_both_gradients_are_seen() -> None:
    def loss(w, x):
        return jnp.sum(layer("two", layer("one", x, w["a"]), w["b"]) ** 2)

    found = capture(loss, {"a": W, "b": W}, X)
    assert names(found) == ["one forward", "one wgrad", "two dgrad", "two forward", "two wgrad"]
    assert found.differentiated
    assert not found.notices
    assert "one dgrad" in names(capture(loss, {"a": W, "b": W}, X, argnums=(0, 1)))


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_operands_are_what_was_quantised_and_the_result_is_their_product(recipe: Any) -> None:
    g = jnp.asarray(RNG.standard_normal((2, 8, 16)), jnp.float32)
    w = jnp.asarray(RNG.standard_normal((48, 16)), jnp.float32)
    x = jnp.asarray(RNG.standard_normal((2, 8, 48)), jnp.float32)

    def loss(w, x):
        return jnp.vdot(fp8.matmul(x, w, recipe=recipe), g)

    found = {gemm.direction: gemm for gemm in capture(loss, w, x, argnums=(0, 1)).gemms}
    flat = {"x": np.asarray(x).reshape(16, 48), "w": np.asarray(w), "g": np.asarray(g)}
    flat["g"] = flat["g"].reshape(16, 16)
    expected = {
        "forward": (flat["x"], flat["w"].T),
        "dgrad": (flat["g"], flat["w"]),
        "wgrad": (flat["x"].T, flat["g"].T),
    }
    assert set(found) == set(expected)
    for direction, gemm in found.items():
        sides = dict(zip(("lhs", "rhs"), expected[direction], strict=True))
        if not np.array_equal(gemm.lhs.exact[0], sides["lhs"]):  # the product may be transposed
            sides = {"lhs": sides["rhs"], "rhs": sides["lhs"]}
        for side, exact in sides.items():
            operand = getattr(gemm, side)
            np.testing.assert_array_equal(operand.exact[0], exact)
            role = "gradient" if exact.size == 256 else "input" if exact.size == 768 else None
            assert operand.role == role or operand.role in ("weight", "input")
            scale = operand.scale[0] if operand.given_scale else None
            codes, scale = quantize_np(
                exact, operand.format.name, operand.tile, scale=scale,
                power_of_two=recipe.power_of_two and not operand.given_scale,
            )  # fmt: skip
            np.testing.assert_array_equal(operand.codes[0].view(np.uint8), codes.view(np.uint8))
            np.testing.assert_array_equal(operand.scale[0], scale)
        product = gemm_np(
            gemm.lhs.codes, gemm.rhs.codes, gemm.lhs.scale, gemm.rhs.scale,
            gemm.lhs.tile, gemm.rhs.tile,
        )  # fmt: skip
        np.testing.assert_allclose(gemm.out, product, rtol=1e-5, atol=1e-5 * np.abs(product).max())


def test_roles_are_those_of_the_call() -> None:
    found = capture(lambda q, k: jnp.sum(fp8.matmul(q, k.T, roles=("input", "input")) ** 2), X, X)
    assert {gemm.direction for gemm in found.gemms} == {"forward", "dgrad"}
    forward = next(gemm for gemm in found.gemms if gemm.direction == "forward")
    assert forward.rhs.role == "input"


def test_jit_and_vmap() -> None:
    @jax.jit
    def loss(w, x):
        return jnp.sum(jax.vmap(functools.partial(layer, "one"), (0, None))(x, w))

    found = capture(loss, W, jnp.stack([X, 2 * X]))
    assert names(found) == ["one forward", "one wgrad"]
    assert found.gemms[0].lhs.codes.shape == (2, 8, 32)


def scanned(w: Any, x: Any, remat: bool = False) -> Any:
    block = functools.partial(layer, "block")
    if remat:
        block = jax.checkpoint(block)
    return jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x, w)[0] ** 2)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_gives_a_gemm_for_each_iteration(remat: bool) -> None:
    found = capture(functools.partial(scanned, remat=remat), STACK, X)
    # dx of the first iteration is computed too: scan does not know that nobody wants it.
    expected = [f"block[{i}] {way}" for i in range(3) for way in ("dgrad", "forward", "wgrad")]
    assert names(found) == sorted(expected)
    for gemm in found.gemms:
        if gemm.direction == "forward":
            index = int(gemm.layer[-2])
            np.testing.assert_array_equal(gemm.rhs.exact[0], np.asarray(STACK[index]).T)
            assert gemm.rhs.role == "weight"
    again = capture(functools.partial(scanned, remat=True), STACK, X, recomputed=True)
    assert sum(gemm.recomputed for gemm in again.gemms) == 3


def test_residuals_find_their_way_through_loops() -> None:
    """The backward loop's operands know what they were rounded from in the forward loop."""
    found = capture(scanned, STACK, X)
    xs = {gemm.layer: gemm.lhs.exact for gemm in found.gemms if gemm.direction == "forward"}
    for gemm in found.gemms:
        if gemm.direction == "wgrad":
            x = gemm.lhs if gemm.lhs.role == "input" else gemm.rhs
            np.testing.assert_array_equal(x.exact[0].T, xs[gemm.layer][0])


def test_long_loops_are_sampled_and_that_is_said() -> None:
    found = capture(
        lambda x: jax.lax.scan(lambda x, _: (layer("f", x, W), None), x, None, 30)[0], X
    )
    assert len(found.gemms) == MAX_ITERATIONS
    assert found.gemms[0].layer == "f[0]"
    assert found.gemms[-1].layer == "f[29]"
    assert found.notices == ("f forward: 8 of 30 iterations were looked at",)


@pytest.mark.parametrize("sign", [1, -1])
def test_only_the_branch_that_ran_is_seen(sign: int) -> None:
    def loss(w, x):
        up, down = functools.partial(layer, "up"), functools.partial(layer, "down")
        return jnp.sum(jax.lax.cond(sign * jnp.sum(x**2) > 0, up, down, x, w))

    taken = "up" if sign > 0 else "down"
    assert names(capture(loss, W, X)) == [f"{taken} forward", f"{taken} wgrad"]


def test_remat_and_recomputation() -> None:
    def loss(w, x):
        return jnp.sum(jax.checkpoint(functools.partial(layer, "one"))(x, w))

    assert names(capture(loss, W, X)) == ["one forward", "one wgrad"]
    assert names(capture(loss, W, X, recomputed=True)) == [
        "one forward",
        "one forward",
        "one wgrad",
    ]


def test_a_while_loop_is_named_as_not_seen() -> None:
    def run(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1e9, lambda x: layer("f", x, W), x)

    found = capture(run, X)
    assert not found.gemms
    assert "inside while were not seen" in found.notices[0]


def test_a_training_step_and_its_own_gradients() -> None:
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.sum(layer("one", x, w)))(w)
        return w - gradient, value

    found = capture(step, W, X)
    assert names(found) == ["one forward", "one wgrad"]
    assert not found.differentiated


def test_loose_tensors_and_raw_codes() -> None:
    def run(x):
        q = fp8.quantize(x, "e4m3", (1, 16))
        codes = jnp.ones((4, 4), jnp.float8_e4m3fn)
        return q, fp8.scaled_matmul(codes, codes, 2.0, 1.0)

    found = capture(run, X)
    (loose,) = found.loose
    np.testing.assert_array_equal(loose.exact[0], X)
    real = dequantize_np(loose.codes, loose.scale, loose.tile)[0]
    np.testing.assert_allclose(real, X, rtol=0.07, atol=0.01)
    assert found.gemms[0].lhs.exact is None
    assert found.gemms[0].lhs.given_scale


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, name="up", dot_general_cls=fp8.flax.linen.DotGeneral)(x))
        return nn.Dense(8, dot_general_cls=fp8.flax.linen.DotGeneral)(x)


def test_flax_linen_names() -> None:
    model = Linen()
    params = model.init(jax.random.key(0), X)
    found = capture(lambda params, x: jnp.sum(model.apply(params, x) ** 2), params, X)
    assert names(found) == sorted(
        ["Linen/up forward", "Linen/up wgrad"]
        + [f"Linen/Dense_0 {way}" for way in ("dgrad", "forward", "wgrad")]
    )
    weight = next(g for g in found.gemms if g.layer == "Linen/up").rhs
    assert weight.path == "params.up.kernel"
    np.testing.assert_array_equal(weight.exact[0].T, params["params"]["up"]["kernel"])


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 16, dot_general=fp8.flax.nnx.DotGeneral(), rngs=rngs)
        self.down = nnx.Linear(16, 8, dot_general=fp8.flax.nnx.DotGeneral(), rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def test_flax_nnx_names() -> None:
    model = Nnx(nnx.Rngs(0))
    expected = sorted(
        ["up forward", "up wgrad", *(f"down {way}" for way in ("dgrad", "forward", "wgrad"))]
    )
    graph, state = nnx.split(model)
    split = capture(lambda state, x: jnp.sum(nnx.merge(graph, state)(x) ** 2), state, X)
    assert names(split) == expected
    assert names(capture(lambda model, x: jnp.sum(model(x) ** 2), model, X)) == expected


def test_calls_in_one_scope_are_told_apart_by_their_weights() -> None:
    def loss(p, x):
        with jax.named_scope("mlp"):
            return jnp.sum(fp8.matmul(x, p["gate"]) * fp8.matmul(x, p["value"]))

    found = names(capture(loss, {"gate": W, "value": W}, X))
    assert found == ["mlp/gate forward", "mlp/gate wgrad", "mlp/value forward", "mlp/value wgrad"]


def test_operands_that_are_quantised_again_keep_their_layer() -> None:
    recipe = fp8.RowScaling(residuals="high_precision")

    def loss(p, x):
        return jnp.sum(fp8.matmul(x, p["up"], recipe=recipe) ** 2)

    assert names(capture(loss, {"up": W}, X)) == ["up forward", "up wgrad"]


def test_what_runs_inside_shard_map_is_named_as_not_seen() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = jax.sharding.PartitionSpec
    inside = jax.shard_map(
        fp8.matmul, mesh=mesh, in_specs=(spec("data"), spec()), out_specs=spec("data")
    )
    found = capture(lambda w, x: jnp.sum(inside(x, w)), W, X)
    assert not found.gemms
    assert "inside shard_map were not seen" in found.notices[0]


def test_forward_and_second_order_derivatives() -> None:
    def tangent(w, x):
        return jnp.sum(jax.jvp(lambda x: jnp.tanh(fp8.matmul(x, w)), (x,), (x,))[1])

    assert "w forward" in names(capture(tangent, W, X))

    def penalty(w, x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.tanh(fp8.matmul(x, w))))(x) ** 2)

    assert {"w forward", "w dgrad", "w wgrad"} <= set(names(capture(penalty, W, X)))
