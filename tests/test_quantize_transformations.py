"""The quantiser and its arrays under jit, vmap, nested vmap, scan and tree_map: equal to loops."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
import strategies
from checks import assert_same_bits
from jax_fp8 import formats
from jax_fp8.formats import Format

FLOAT32 = np.dtype(np.float32)

every_format = pytest.mark.parametrize("fmt", formats.ALL, ids=lambda fmt: fmt.name)

quantize = jax.jit(fp8.quantize, static_argnames=("format", "tile"))
dequantize = jax.jit(fp8.dequantize, static_argnums=1)


def assert_same_scaled_array(actual: fp8.ScaledArray, expected: fp8.ScaledArray) -> None:
    # XLA itself moves E5M2 arrays by way of FP16, which turns one NaN into another.
    assert_same_bits(actual.values, expected.values, any_nan=True)
    assert_same_bits(actual.scale, expected.scale)


def stack(arrays: list[fp8.ScaledArray]) -> fp8.ScaledArray:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *arrays)


@every_format
@pytest.mark.parametrize("tile", [None, (1, 8), (3, -1), (-1, 2, 3)], ids=str)
def test_jit_changes_no_bit(tile: tuple[int, ...] | None, fmt: Format) -> None:
    x = strategies.varied_numbers((3, 5, 21), FLOAT32)
    assert_same_scaled_array(quantize(x, fmt, tile), fp8.quantize(x, fmt, tile))
    q = fp8.quantize(x, fmt, tile)
    assert_same_bits(dequantize(q, np.dtype(np.float16)), fp8.dequantize(q, np.float16))


@every_format
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("tile", [None, (1, 8), (3, -1), (2, 2)], ids=str)
def test_vmap_equals_a_loop(tile: tuple[int, ...] | None, axis: int, fmt: Format) -> None:
    x = strategies.varied_numbers((5, 6, 21), FLOAT32)
    run = functools.partial(fp8.quantize, format=fmt, tile=tile)
    mapped = jax.jit(jax.vmap(run, in_axes=axis))(x)
    examples = [run(x.take(i, axis)) for i in range(x.shape[axis])]
    assert_same_scaled_array(mapped, stack(examples))
    back = jax.vmap(fp8.dequantize)(mapped)
    assert_same_bits(back, jnp.stack([fp8.dequantize(q) for q in examples]), any_nan=True)


def test_vmap_gives_a_whole_array_one_scale_per_example() -> None:
    x = np.float32([[448.0, 1.0], [896.0, 1.0]])
    assert jax.vmap(fp8.quantize)(x).scale.ravel().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("tile", [None, (4,), (2, -1)], ids=str)
def test_nested_vmap_equals_nested_loops(tile: tuple[int, ...] | None) -> None:
    x = strategies.varied_numbers((3, 7, 4, 5), FLOAT32)
    run = functools.partial(fp8.quantize, format="e4m3", tile=tile)
    mapped = jax.vmap(jax.vmap(run, in_axes=1), in_axes=-1, out_axes=0)(x)
    # The outer map takes the last axis; the inner one axis 1 of what is left: (3, 7, 4) -> (3, 4).
    loops = [stack([run(x[:, j, :, i]) for j in range(7)]) for i in range(5)]
    assert_same_scaled_array(mapped, stack(loops))


@pytest.mark.parametrize(("x_axis", "scale_axis"), [(0, 0), (1, 0), (None, 0), (0, None)])
def test_vmap_over_given_scales_equals_a_loop(x_axis: int | None, scale_axis: int | None) -> None:
    x = strategies.varied_numbers((4, 4, 10), FLOAT32)
    x = x[0] if x_axis is None else x
    scale = strategies.random_scales(np.random.default_rng(4), (4, 4, 2), (-4, 4))
    scale = scale[0] if scale_axis is None else scale

    def run(x: Any, scale: Any) -> fp8.ScaledArray:
        return fp8.quantize(x, "e5m2", (1, 8), scale=scale)

    mapped = jax.vmap(run, in_axes=(x_axis, scale_axis), out_axes=0)(x, scale)
    loop = [
        run(
            x if x_axis is None else x.take(i, x_axis),
            scale if scale_axis is None else scale.take(i, scale_axis),
        )
        for i in range(4)
    ]
    assert_same_scaled_array(mapped, stack(loop))


def test_scaled_array_passes_through_jit_scan_and_tree_map() -> None:
    x = strategies.varied_numbers((6, 4, 40), FLOAT32)
    x = np.nan_to_num(x, posinf=0, neginf=0)
    q = fp8.quantize(x, "e4m3", (1, 32))
    assert (q.shape, q.ndim, q.size, q.format) == (x.shape, 3, x.size, formats.E4M3FN)

    def body(total: jax.Array, layer: fp8.ScaledArray) -> tuple[jax.Array, jax.Array]:
        real = layer.dequantize()
        return total + real, real

    total, stacked = jax.jit(lambda q: jax.lax.scan(body, jnp.zeros(x.shape[1:]), q))(q)
    real = np.asarray(fp8.dequantize(q))
    assert_same_bits(stacked, real)
    np.testing.assert_allclose(total, real.sum(0), rtol=1e-5, atol=1e-5)

    same = jax.tree.map(lambda leaf: leaf[::-1], q)
    assert isinstance(same, fp8.ScaledArray)
    assert same.tile == q.tile
    assert_same_bits(same.dequantize(), real[::-1])
    assert_same_scaled_array(jax.jit(lambda q: q)(q), q)
    assert len(jax.tree.leaves(q)) == 2


def test_a_tile_larger_than_its_dim_costs_nothing():
    x = np.ones((4, 5, 6), np.float32)
    for huge in (1000, 10**9, 2**63):
        q = fp8.quantize(x, "e4m3", (2, huge, 2))
        assert q.scale.shape == (2, 1, 3)
        assert_same_bits(q.values, fp8.quantize(x, "e4m3", (2, 5, 2)).values)
