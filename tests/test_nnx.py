"""Flax NNX: the objects work wherever its modules take a `dot_general` or an `einsum_op`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_fp8 as fp8

DotGeneral, EinsumOp = fp8.flax.nnx.DotGeneral, fp8.flax.nnx.EinsumOp
StochasticDotGeneral = fp8.flax.nnx.StochasticDotGeneral
RECIPES = [
    fp8.TensorScaling(),
    fp8.RowScaling(),
    fp8.BlockScaling(),
    fp8.StaticScaling(),
    fp8.TileScaling(128, 32),
    fp8.MXScaling(),
]
X = np.random.default_rng(0).standard_normal((3, 5, 160)).astype(np.float32)


def dot(ours: bool) -> Any:
    return DotGeneral() if ours else jax.lax.dot_general


def linear(ours: bool, d_in: int = 160, d_out: int = 24, **options: Any) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, dot_general=dot(ours), rngs=nnx.Rngs(0), **options)


def general(ours: bool, *sizes: Any, **options: Any) -> nnx.LinearGeneral:
    return nnx.LinearGeneral(*sizes, dot_general=dot(ours), rngs=nnx.Rngs(0), **options)


def einsum(ours: bool, *arguments: Any, **options: Any) -> nnx.Einsum:
    op = EinsumOp() if ours else jnp.einsum
    return nnx.Einsum(*arguments, einsum_op=op, rngs=nnx.Rngs(0), **options)


def attention(ours: bool, **options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        num_heads=4,
        in_features=160,
        decode=False,
        qkv_dot_general=dot(ours),
        out_dot_general=dot(ours),
        rngs=nnx.Rngs(0),
        **options,
    )


def keep_dtypes(arrays: Any, dtype: Any = None) -> Any:
    return arrays


MODULES: dict[str, Callable[[bool], nnx.Module]] = {
    "Linear": linear,
    "Linear without bias": functools.partial(linear, use_bias=False),
    "Linear computing in bf16": functools.partial(linear, dtype=jnp.bfloat16),
    "Linear with bf16 parameters": functools.partial(linear, param_dtype=jnp.bfloat16),
    "Linear all bf16": functools.partial(linear, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16),
    "Linear all f16": functools.partial(linear, dtype=jnp.float16, param_dtype=jnp.float16),
    "Linear bf16 into f32": functools.partial(
        linear, dtype=jnp.bfloat16, preferred_element_type=jnp.float32
    ),
    "Linear f32 × bf16": functools.partial(
        linear, param_dtype=jnp.bfloat16, promote_dtype=keep_dtypes
    ),
    "Linear precision": functools.partial(linear, precision="highest"),
    "LinearGeneral": lambda ours: general(ours, 160, (4, 6)),
    "LinearGeneral two axes": lambda ours: general(ours, (5, 160), 6, axis=(-2, -1)),
    "LinearGeneral axis 1": lambda ours: general(ours, 5, 6, axis=1),
    "LinearGeneral batch": lambda ours: general(ours, 160, 6, batch_axis={0: 3}),
    "LinearGeneral bf16": lambda ours: general(
        ours, 160, (4, 6), dtype=jnp.bfloat16, preferred_element_type=jnp.float32
    ),
    "Einsum": lambda ours: einsum(ours, "bld,df->blf", (160, 24), (24,)),
    "Einsum heads": lambda ours: einsum(ours, "nta,hab->nthb", (4, 160, 6), (4, 6)),
    "Einsum ellipsis": lambda ours: einsum(ours, "...d,fd->...f", (24, 160), None),
    "Einsum bf16": lambda ours: einsum(
        ours,
        "bld,df->blf",
        (160, 24),
        None,
        dtype=jnp.bfloat16,
        preferred_element_type=jnp.float32,
    ),
    "attention": attention,
    "attention bf16": functools.partial(attention, dtype=jnp.bfloat16),
}


def relative_error(got: Any, exact: Any) -> float:
    got, exact = (np.asarray(a, np.float64) for a in (got, exact))
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def loss_of(module: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(module(x).astype(jnp.float32)))


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_their_gradients_are_close_to_those_without_fp8_but_not_equal(
    name: str,
) -> None:
    ours, plain = (MODULES[name](flag) for flag in (True, False))
    out, expected = ours(X), plain(X)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert 0.005 < relative_error(out, expected) < 0.08  # below: the quantisers are off

    (params, dx), (exact_params, exact_dx) = (
        nnx.grad(loss_of, argnums=(0, 1))(module, X) for module in (ours, plain)
    )
    assert dx.dtype == exact_dx.dtype
    assert 0.02 < relative_error(dx, exact_dx) < 0.2
    exact_leaves = dict(nnx.to_flat_state(exact_params))
    for path, leaf in nnx.to_flat_state(params):
        exact = exact_leaves[path]
        assert leaf[...].dtype == exact[...].dtype
        if path[-1] == "kernel":
            assert 0.02 < relative_error(leaf[...], exact[...]) < 0.2, path


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_every_module_multiplies_by_the_recipe_it_was_given(recipe: fp8.Recipe) -> None:
    ours = DotGeneral(recipe=recipe)
    layer = nnx.Linear(160, 24, dot_general=ours, rngs=nnx.Rngs(0))
    expected = fp8.matmul(X, layer.kernel[...], recipe=recipe)
    np.testing.assert_array_equal(layer(X), expected)

    heads = nnx.LinearGeneral(160, (4, 6), dot_general=ours, rngs=nnx.Rngs(0))
    flat = heads.kernel[...].reshape(160, 24)
    np.testing.assert_array_equal(heads(X), fp8.matmul(X, flat, recipe=recipe).reshape(3, 5, 4, 6))

    layer = nnx.Einsum(
        "bld,df->blf", (160, 24), einsum_op=EinsumOp(recipe=recipe), rngs=nnx.Rngs(0)
    )
    expected = fp8.matmul(X, layer.kernel[...], recipe=recipe)
    np.testing.assert_array_equal(layer(X), expected)


def test_same_kernel_gives_the_same_bits_in_linen_and_nnx() -> None:
    layer = linear(True)
    dense = nn.Dense(24, dot_general_cls=fp8.flax.linen.DotGeneral)
    variables = {"params": {"kernel": layer.kernel[...], "bias": layer.bias[...]}}
    np.testing.assert_array_equal(layer(X), dense.apply(variables, X))


def test_class_is_taken_too_where_a_module_has_dot_general_cls() -> None:
    layer = nnx.LinearGeneral(160, 24, dot_general_cls=DotGeneral, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(X), general(True, 160, 24)(X))


def test_einsum_keeps_roles_where_jnp_einsum_swaps_operands() -> None:
    firsts = []

    def record(lhs: jax.Array, rhs: jax.Array, *rest: Any, **options: Any) -> jax.Array:
        firsts.append(lhs.shape)
        return jax.lax.dot_general(lhs, rhs, *rest, **options)

    subscripts, kernel_shape = "bd,df->fb", (160, 24)
    x = X[0]
    with jax.disable_jit():
        jnp.einsum(subscripts, x, jnp.ones(kernel_shape), _dot_general=record)
    assert firsts == [kernel_shape]  # the premise: the kernel comes first there

    layer = nnx.Einsum(subscripts, kernel_shape, einsum_op=EinsumOp(), rngs=nnx.Rngs(0))
    direct = fp8.matmul(x, layer.kernel[...]).T
    np.testing.assert_array_equal(layer(x), direct)
    # And roles matter here: the kernel with tiles of an input gives other bits.
    wrong = EinsumOp(roles=("weight", "input"))(subscripts, x, layer.kernel[...])
    assert (np.asarray(wrong) != np.asarray(direct)).any()


def test_two_activations_have_the_role_input_in_an_einsum() -> None:
    scores = EinsumOp(roles=("input", "input"))("bld,bmd->blm", X, X)
    expected = fp8.einsum("bld,bmd->blm", X, X, roles=("input", "input"))
    np.testing.assert_array_equal(scores, expected)
    # Equal quantisation on both sides: the scores of a sequence with itself are symmetric.
    np.testing.assert_array_equal(scores, np.swapaxes(scores, 1, 2))


def test_linear_loss_and_gradients_are_three_gemm_calls_and_no_dot() -> None:
    graph, params = nnx.split(linear(True))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return loss_of(nnx.merge(graph, params), x)

    for argnums, gemms in (((0, 1), 3), ((0,), 2), ((1,), 2)):
        step = jax.value_and_grad(loss, argnums)
        lowered = jax.jit(step).lower(params, X)
        assert lowered.as_text().count("jax_fp8.gemm.v1") == gemms
        compiled = lowered.compile().as_text()
        assert compiled.count('custom_call_target="jax_fp8.gemm.v1"') == gemms
        assert " dot(" not in compiled
        assert "dot_general" not in str(jax.make_jaxpr(step)(params, X))


def test_variables_are_the_same_as_without_fp8() -> None:
    for name in ("Linear", "Einsum", "attention"):
        ours, plain = (nnx.state(MODULES[name](flag)) for flag in (True, False))
        assert jax.tree.structure(ours) == jax.tree.structure(plain)
        assert [a.shape for a in jax.tree.leaves(ours)] == [a.shape for a in jax.tree.leaves(plain)]


def test_objects_are_equal_by_value_and_so_are_the_graphs_that_hold_them() -> None:
    for make in (DotGeneral, EinsumOp):
        ours = make(recipe=fp8.RowScaling(power_of_two=True))
        for other in (make(recipe=fp8.RowScaling(power_of_two=True)), copy.deepcopy(ours)):
            assert (ours, hash(ours)) == (other, hash(other))
        assert ours != make(recipe=fp8.RowScaling())
        assert ours != make()
    model = nnx.Sequential(linear(True), linear(True, 24, 8))
    for other in (copy.deepcopy(model), nnx.clone(model), nnx.merge(*nnx.split(model))):
        assert nnx.graphdef(other) == nnx.graphdef(model)
        assert hash(nnx.graphdef(other)) == hash(nnx.graphdef(model))
        np.testing.assert_array_equal(other(X), model(X))


def test_nnx_jit_traces_equal_modules_once_and_another_recipe_again() -> None:
    traces = []

    @nnx.jit
    def apply(module: nnx.Linear, x: jax.Array) -> jax.Array:
        traces.append(module.dot_general)
        return module(x)

    np.testing.assert_allclose(apply(linear(True), X), linear(True)(X), rtol=1e-6, atol=1e-6)
    apply(linear(True), X)
    apply(copy.deepcopy(linear(True)), X)
    assert len(traces) == 1
    row = nnx.Linear(160, 24, dot_general=DotGeneral(recipe=fp8.RowScaling()), rngs=nnx.Rngs(0))
    apply(row, X)
    assert len(traces) == 2


class Layer(nnx.Module):
    """A square layer, for scan and vmap over its parameters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(160, 160, dot_general=DotGeneral(), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x))


def stack_of_layers(size: int = 3) -> Layer:
    @nnx.split_rngs(splits=size)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs: nnx.Rngs) -> Layer:
        return Layer(rngs)

    return create(nnx.Rngs(0))


def layer_of(stack: Layer, index: int) -> Layer:
    graph, state = nnx.split(stack)
    return nnx.merge(graph, jax.tree.map(lambda a: a[index], state))


def test_nnx_scan_over_layers_with_remat_equals_a_loop_and_so_do_gradients() -> None:
    stack = stack_of_layers()

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def forward(layer: Layer, x: jax.Array) -> jax.Array:
        return layer(x)

    def loss(stack: Layer, x: jax.Array) -> jax.Array:
        return jnp.sum(forward(stack, x))

    grads, dx = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(stack, X)
    layers = [layer_of(stack, i) for i in range(3)]

    def looped_loss(layers: list[Layer], x: jax.Array) -> jax.Array:
        return jnp.sum(functools.reduce(lambda x, layer: layer(x), layers, x))

    assert relative_error(forward(stack, X), functools.reduce(lambda x, f: f(x), layers, X)) < 1e-5
    looped, looped_dx = nnx.grad(looped_loss, argnums=(0, 1))(layers, X)
    # One last-bit difference in a tanh may move a code, 1/8 of a value: a few of them at most.
    assert relative_error(dx, looped_dx) < 0.01
    for i in range(3):
        kernel = grads.linear.kernel[...][i]
        assert relative_error(kernel, looped[i].linear.kernel[...]) < 0.01


def test_nnx_vmap_over_models_gives_the_bits_of_each_alone() -> None:
    stack = stack_of_layers()

    @nnx.vmap(in_axes=(0, None), out_axes=0)
    def apply(layer: Layer, x: jax.Array) -> jax.Array:
        return layer.linear(x)

    out = apply(stack, X)
    for i in range(3):
        np.testing.assert_array_equal(out[i], layer_of(stack, i).linear(X))


@pytest.mark.parametrize("recipe", [None, *RECIPES[:2]], ids=lambda r: type(r).__name__)
def test_a_model_learns_a_function_with_nnx_optimizer(recipe: fp8.Recipe | None) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((256, 8)).astype(np.float32)
    y = np.tanh(x @ rng.standard_normal((8, 1)).astype(np.float32))

    def learn(dot_general: Any) -> list[float]:
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(
            nnx.Linear(8, 32, dot_general=dot_general, rngs=rngs),
            jnp.tanh,
            nnx.Linear(32, 1, dot_general=dot_general, rngs=rngs),
        )
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model: nnx.Sequential, optimizer: nnx.Optimizer) -> jax.Array:
            value, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x) - y)))(model)
            optimizer.update(model, grads)
            return value

        return [float(step(model, optimizer)) for _ in range(100)]

    losses, exact = learn(DotGeneral(recipe=recipe)), learn(jax.lax.dot_general)
    assert losses[-1] < 0.1 * losses[0]
    assert losses[0] != exact[0]
    assert losses[0] == pytest.approx(exact[0], rel=0.02)


def test_stochastic_rounding_draws_a_key_per_call_from_the_state_of_its_layer() -> None:
    recipe = fp8.RowScaling(rounding="stochastic")

    def layer_with(seed: int) -> nnx.Linear:
        rngs = nnx.Rngs(params=0, stochastic_rounding=seed)
        rounding = StochasticDotGeneral(recipe=recipe, rngs=rngs)
        return nnx.Linear(160, 24, dot_general=rounding, rngs=rngs)

    @nnx.jit
    def gradient(layer: nnx.Linear) -> jax.Array:
        return nnx.grad(loss_of)(layer, X).kernel[...]

    layer = layer_with(1)
    np.testing.assert_array_equal(
        layer(X), fp8.matmul(X, layer.kernel[...], recipe=fp8.RowScaling())
    )
    layer, same, other = layer_with(1), layer_with(1), layer_with(2)
    first, second = gradient(layer), gradient(layer)
    assert layer.dot_general.rngs.count[...] == 2
    assert (np.asarray(first) != np.asarray(second)).any()
    assert (np.asarray(first) != np.asarray(gradient(other))).any()
    np.testing.assert_array_equal(first, gradient(same))
    nearest = nnx.grad(loss_of)(linear(False), X).kernel[...]
    mean = np.mean([first, *(gradient(layer) for _ in range(15))], axis=0)
    # x and w keep the error of E4M3, that of g averages out.
    assert relative_error(mean, nearest) < 0.8 * relative_error(first, nearest)


def test_misuse_is_told_in_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"flax.nnx.DotGeneral: .*an instance"):
        nnx.Linear(160, 24, dot_general=DotGeneral, rngs=nnx.Rngs(0))(X)
    with pytest.raises(TypeError, match=r"flax.nnx.EinsumOp: .*an instance"):
        nnx.Einsum("bld,df->blf", (160, 24), einsum_op=EinsumOp, rngs=nnx.Rngs(0))(X)
    for make in (DotGeneral, EinsumOp):
        with pytest.raises(TypeError, match=rf"flax.nnx.{make.__name__}: recipe is .*instance"):
            make(recipe=fp8.RowScaling)
        with pytest.raises(
            ValueError, match=rf"flax.nnx.{make.__name__}: .* rounds stochastically"
        ):
            make(recipe=fp8.RowScaling(rounding="stochastic"))
    with pytest.raises(ValueError, match=r"flax.nnx.DotGeneral: roles is"):
        DotGeneral(roles=("input", "kernel"))
    with pytest.raises(ValueError, match=r"einsum: roles is"):
        EinsumOp(roles=("input",))("bld,df->blf", X, np.ones((160, 24), np.float32))
    spec = jax.sharding.PartitionSpec("d")
    with pytest.raises(NotImplementedError, match=r"einsum: out_sharding is"):
        EinsumOp()("bld,df->blf", X, np.ones((160, 24), np.float32), out_sharding=spec)
    numbers = (((1,), (0,)), ((), ()))
    with pytest.raises(NotImplementedError, match=r"dot_general: out_sharding is"):
        DotGeneral()(X[0], np.ones((160, 24), np.float32), numbers, out_sharding=spec)
