"""Stochastic rounding: unbiased, never beyond a neighbour, and only with a key."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from checks import assert_same_bits
from jax_fp8 import config
from jax_fp8.quantize_primitive import bind_quantize
from jax_fp8.testing import oracle

KEY = jax.random.key(0)
STOCHASTIC = {
    "tensor": fp8.TensorScaling(rounding="stochastic"),
    "row": fp8.RowScaling(rounding="stochastic"),
    "block": fp8.BlockScaling(rounding="stochastic"),
    "mx": fp8.MXScaling(rounding="stochastic"),
}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def neighbours(values, fmt):
    """The representable magnitudes below and above each value."""
    codes = np.arange(256, dtype=np.uint8).view(fmt.dtype).astype(np.float64)
    grid = np.unique(np.abs(codes[np.isfinite(codes)]))
    above = np.searchsorted(grid, values)
    return grid[np.maximum(above - 1, 0)], grid[above]


@pytest.mark.parametrize("tile", [(1, 128), (7, 300), (5, 32), (7, 1)])
@pytest.mark.parametrize("fmt", fp8.formats.ALL, ids=lambda f: f.name)
def test_codes_are_those_of_the_oracle_for_the_same_noise(quantize_row, fmt, tile):
    x = normal(0, 1, 7, 300) * np.exp2(np.arange(300) % 40 - 30).astype(np.float32)
    x[0, 0, :4] = np.nan, np.inf, -np.inf, 0
    noise = np.random.default_rng(1).integers(0, 2**32, x.shape, dtype=np.uint32)
    with fp8.force_kernel(quantize_row):
        got = bind_quantize(
            [jnp.asarray(x), jnp.asarray(noise)],
            fmt,
            (tile,),
            config.without_sums("test"),
            rounding="stochastic",
        )
    values, scale = oracle.quantize_np(x, fmt.name, tile, bits=noise)
    assert_same_bits(got[0], values)
    assert_same_bits(got[1], scale)


@pytest.mark.parametrize("fmt", fp8.formats.ALL, ids=lambda f: f.name)
def test_rounding_is_unbiased_and_stays_between_the_neighbours(fmt):
    # 800 values, log-uniform over the format: z stays below 5.2 but once in 10^4 such tests.
    draws, count = 2**12, 800
    rng = np.random.default_rng(0)
    low = np.log2(fmt.smallest_subnormal / 8)
    values = np.exp2(rng.uniform(low, np.log2(fmt.max * 0.98), count)).astype(np.float32)
    x = np.broadcast_to(values, (draws, count))
    q = fp8.quantize(x, fmt, scale=1.0, rounding="stochastic", key=KEY)
    out = np.asarray(q.values).astype(np.float64)
    below, above = neighbours(values.astype(np.float64), fmt)
    assert ((out == below) | (out == above)).all()
    p = (values - below) / (above - below)
    spread = (above - below) * np.sqrt(np.maximum(p * (1 - p), 1e-12) / draws)
    z = (out.mean(0) - values) / spread
    frequent = p * (1 - p) * draws > 9  # the normal approximation holds
    assert frequent.sum() > 600
    assert np.abs(z[frequent]).max() < 5.2
    ratio = out.var(0)[frequent] / ((above - below) ** 2 * p * (1 - p))[frequent]
    assert abs(ratio.mean() - 1) < 0.01
    nearest = np.asarray(fp8.quantize(values, fmt, scale=1.0).values).astype(np.float64)
    assert np.abs((nearest - values)[frequent] / spread[frequent]).max() > 20  # the test can fail


def test_exact_values_and_specials_are_unchanged():
    for fmt in fp8.formats.ALL:
        codes = np.arange(256, dtype=np.uint8).view(fmt.dtype)
        x = codes.astype(np.float32)
        q = fp8.quantize(x, fmt, scale=1.0, rounding="stochastic", key=KEY)
        assert_same_bits(q.values, codes, any_nan=True)
    big = fp8.quantize(np.float32([460, 1e9]), "e4m3", scale=1.0, rounding="stochastic", key=KEY)
    np.testing.assert_array_equal(np.asarray(big.values, np.float32), [448, 448])


@pytest.mark.parametrize("recipe", STOCHASTIC.values(), ids=STOCHASTIC)
def test_gradients_are_unbiased_and_the_forward_pass_is_not_touched(recipe):
    x, w, g = normal(0, 8, 64), normal(1, 64, 8), normal(2, 8, 8)

    def gradient(key):
        _, vjp = jax.vjp(lambda x, w: fp8.matmul(x, w, recipe=recipe, key=key), x, w)
        return vjp(jnp.asarray(g))

    keys = jax.random.split(KEY, 600)
    draws = jax.jit(jax.vmap(gradient))(keys)
    nearest = type(recipe)()
    assert_same_bits(fp8.matmul(x, w, recipe=recipe, key=KEY), fp8.matmul(x, w, recipe=nearest))
    fixed = [
        jax.jvp(lambda x, w: fp8.matmul(x, w, recipe=nearest), (x, w), unit)[1]
        for unit in ((x, jnp.zeros_like(w)), (jnp.zeros_like(x), w))
    ]
    # <g, y'> for y' along x and along w: what the mean of the gradients must give.
    for mean, operand, tangent in zip((d.mean(0) for d in draws), (x, w), fixed, strict=True):
        expected = float(jnp.vdot(tangent, g))
        sizes = float(jnp.linalg.norm(tangent) * np.linalg.norm(g))
        assert abs(float(jnp.vdot(mean, operand)) - expected) < 0.01 * sizes
    single = np.asarray(draws[0], np.float64)
    assert single.std(0).max() > 0  # different keys, different gradients


def test_a_key_gives_the_same_gradient_again_and_under_jit_and_vmap():
    recipe = STOCHASTIC["block"]
    x, w = normal(0, 3, 8, 64), normal(1, 64, 8)

    def gradient(x, w, key):
        return jax.grad(lambda w: jnp.sum(jnp.sin(fp8.matmul(x, w, recipe=recipe, key=key))))(w)

    expected = [gradient(e, w, KEY) for e in x]
    assert_same_bits(jax.vmap(gradient, (0, None, None))(x, w, KEY), np.stack(expected))
    keys = jax.random.split(KEY, 3)
    each = np.stack([gradient(x[0], w, k) for k in keys])
    assert_same_bits(jax.jit(jax.vmap(gradient, (None, None, 0)))(x[0], w, keys), each)
    raw = jax.random.PRNGKey(0)
    assert_same_bits(gradient(x[0], w, raw), gradient(x[0], w, jax.random.wrap_key_data(raw)))
    scanned = jax.lax.scan(lambda _, k: (None, gradient(x[0], w, k)), None, keys)[1]
    assert_same_bits(scanned, each)


def test_second_order_works():
    recipe = STOCHASTIC["row"]
    x, w = normal(0, 8, 64), normal(1, 64, 8) / 8

    def loss(w, matmul):
        return jnp.sum(jnp.sin(matmul(x, w)))

    ours = lambda x, w: fp8.matmul(x, w, recipe=recipe, key=KEY)
    got = jax.jvp(jax.grad(lambda w: loss(w, ours)), (w,), (w,))[1]
    exact = jax.jvp(jax.grad(lambda w: loss(w, jnp.matmul)), (w,), (w,))[1]
    assert jnp.linalg.norm(got - exact) < 0.25 * jnp.linalg.norm(exact)


def test_every_call_takes_a_key_and_asks_for_it():
    recipe, x, w = STOCHASTIC["tensor"], normal(0, 4, 8), normal(1, 8, 4)
    dims = (((1,), (0,)), ((), ()))
    for call in (
        lambda **k: fp8.matmul(x, w, **k),
        lambda **k: fp8.dot_general(x, w, dims, **k),
        lambda **k: fp8.einsum("mk,kn->mn", x, w, **k),
    ):
        assert call(recipe=recipe, key=KEY).shape == (4, 4)
        with pytest.raises(ValueError, match=r"needs randomness; give key=jax\.random\.key"):
            call(recipe=recipe)
        with pytest.raises(ValueError, match="key is given, but nothing here rounds"):
            call(key=KEY)
    with pytest.raises(ValueError, match="quantize: stochastic rounding needs randomness"):
        fp8.quantize(x, rounding="stochastic")
    with pytest.raises(ValueError, match="'up'; it must be 'nearest' or 'stochastic'"):
        fp8.quantize(x, rounding="up")


def test_linen_takes_keys_from_its_stream():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            def cls():
                return fp8.flax.linen.DotGeneral(recipe=STOCHASTIC["block"])

            return nn.Dense(4, use_bias=False, dot_general_cls=cls)(x)

    x = normal(0, 5, 16)
    rngs = {"stochastic_rounding": KEY}
    variables = Layer().init({"params": KEY, **rngs}, x)

    def gradient(key):
        def loss(v):
            out = Layer().apply(v, x, rngs={"stochastic_rounding": key})
            return jnp.sum(out * normal(9, 5, 4))

        return jax.tree.leaves(jax.grad(loss)(variables))[0]

    assert_same_bits(gradient(KEY), gradient(KEY))
    assert (np.asarray(gradient(KEY)) != np.asarray(gradient(jax.random.key(1)))).any()
