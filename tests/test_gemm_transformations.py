"""The GEMM under vmap, nested vmap and scan: equal to loops, and no operand is copied."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_fp8 as fp8
from checks import assert_same_bits
from jax_fp8.gemm import gemm_p
from strategies import matmul_arguments

Array = np.ndarray[Any, Any]
NAMES = ("lhs", "rhs", "lhs_scale", "rhs_scale")
OUT_DTYPES = [np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16)]
SUBSETS = [subset for subset in itertools.product((False, True), repeat=4) if any(subset)]


def product_of_pieces(*arrays: Any) -> jax.Array:
    return fp8.scaled_matmul(*arrays, lhs_tile=(1, 16), rhs_tile=(16, 8))


def batched_operands(subset: tuple[bool, ...], axes: tuple[int, ...], size: int) -> list[Array]:
    """Arrays of which those in `subset` have a batch dim at their axis."""
    plain = matmul_arguments(12, 7, 18, 40, (1, 16), (16, 8))
    many = matmul_arguments(13, 7, 18, 40, (1, 16), (16, 8), batch=(size,))
    return [
        np.moveaxis(many[name], 0, axis) if batched else plain[name]
        for name, batched, axis in zip(NAMES, subset, axes, strict=True)
    ]


def loop(
    function: Callable[..., Any], arrays: list[Any], in_axes: tuple[int | None, ...], size: int
) -> Array:
    """What vmap must equal."""
    return np.stack(
        [
            function(
                *(
                    x if axis is None else np.take(x, i, axis)
                    for x, axis in zip(arrays, in_axes, strict=True)
                )
            )
            for i in range(size)
        ]
    )


@pytest.mark.parametrize("subset", SUBSETS, ids=str)
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (1, 2, -1, 1)], ids=str)
def test_vmap_over_any_operands_equals_a_loop(
    subset: tuple[bool, ...], axes: tuple[int, ...]
) -> None:
    arrays = batched_operands(subset, axes, 3)
    in_axes = tuple(axis if batched else None for batched, axis in zip(subset, axes, strict=True))
    mapped = jax.jit(jax.vmap(product_of_pieces, in_axes=in_axes))(*arrays)
    assert_same_bits(mapped, loop(product_of_pieces, arrays, in_axes, 3))


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ((0, None, None, None), (None, 0, None, None)),
        ((0, None, 0, None), (None, 0, None, 0)),
        ((1, 0, None, None), (0, None, 0, None)),
        ((None, None, 0, None), (None, None, None, 1)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
        ((2, None, 1, 0), (None, 1, None, -1)),
    ],
    ids=str,
)
def test_nested_vmap_equals_nested_loops(
    outer: tuple[int | None, ...], inner: tuple[int | None, ...]
) -> None:
    plain = matmul_arguments(14, 7, 18, 40, (1, 16), (16, 8))
    rng = np.random.default_rng(15)
    arrays = []
    for name, first, second in zip(NAMES, outer, inner, strict=True):
        x = plain[name]
        for axis, size in ((second, 3), (first, 2)):  # the outer map takes its axis off first
            if axis is not None:
                x = np.stack([x[..., rng.permutation(x.shape[-1])] for _ in range(size)], axis)
        arrays.append(x)
    mapped = jax.jit(jax.vmap(jax.vmap(product_of_pieces, inner), outer))(*arrays)

    def inner_loop(*slices: Any) -> Array:
        return loop(product_of_pieces, list(slices), inner, 3)

    assert_same_bits(mapped, loop(inner_loop, arrays, outer, 2))


@pytest.mark.parametrize("subset", SUBSETS, ids=str)
def test_vmap_copies_no_operand_that_has_no_batch(subset: tuple[bool, ...]) -> None:
    size = 5
    arrays = batched_operands(subset, (0, 0, 0, 0), size)
    in_axes = tuple(0 if batched else None for batched in subset)
    mapped = jax.vmap(product_of_pieces, in_axes=in_axes)
    shapes = [
        (size if batched else 1, *x.shape[-2:]) for x, batched in zip(arrays, subset, strict=True)
    ]
    (equation,) = gemms(jax.make_jaxpr(mapped)(*arrays).jaxpr)
    assert [variable.aval.shape for variable in equation.invars] == shapes
    text = jax.jit(mapped).lower(*arrays).compile().as_text()
    (call,) = (line for line in text.splitlines() if 'custom_call_target="jax_fp8.gemm.v1"' in line)
    kinds = ("f8e4m3fn", "f8e5m2", "f32", "f32")
    for kind, shape in zip(kinds, shapes, strict=True):
        assert f"{kind}[{','.join(map(str, shape))}]" in call
    assert "broadcast(" not in text
    assert "dot(" not in text


def gemms(jaxpr: Any) -> list[Any]:
    """Equations of the GEMM primitive in a jaxpr and the jaxprs inside it."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive is gemm_p:
            found.append(equation)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                found += gemms(getattr(inner, "jaxpr", inner))
    return found


@pytest.mark.parametrize("layouts", list(itertools.product((0, 1), repeat=2)), ids=str)
def test_no_layout_needs_a_transposing_copy(layouts: tuple[int, int]) -> None:
    q = fp8.quantize(np.ones((48, 48), np.float32), "e4m3", (16, 16))
    dims = (((layouts[0],), (layouts[1],)), ((), ()))
    call = jax.jit(lambda q: fp8.scaled_dot_general(q, q, dims))
    text = call.lower(q).compile().as_text()
    assert text.count('custom_call_target="jax_fp8.gemm.v1"') == 1
    assert "transpose(" not in text
    assert "copy(" not in text


def test_scan_over_stacked_weights_equals_a_loop() -> None:
    rng = np.random.default_rng(16)
    x = rng.standard_normal((5, 32)).astype(np.float32)
    weights = rng.standard_normal((4, 32, 32)).astype(np.float32)
    q = fp8.quantize(weights, "e4m3", (16, 16))

    def layer(x: jax.Array, w: fp8.ScaledArray) -> tuple[jax.Array, None]:
        y = fp8.scaled_dot_general(fp8.quantize(x, "e4m3", (1, 16)), w, (((1,), (0,)), ((), ())))
        return y / 8, None

    scanned = jax.jit(lambda x, q: jax.lax.scan(layer, x, q)[0])(jnp.asarray(x), q)
    looped = jnp.asarray(x)
    for i in range(4):
        looped, _ = layer(looped, jax.tree.map(lambda leaf, i=i: leaf[i], q))
    assert_same_bits(scanned, looped)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_matmul_is_its_quantisers_and_one_gemm(out_dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(17)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((20, 200), (200, 150)))
    for recipe, x_tile, w_tile in (
        (fp8.TensorScaling(), (-1, -1), (-1, -1)),
        (fp8.RowScaling(), (1, -1), (-1, 1)),
        (fp8.BlockScaling(), (1, 128), (128, 128)),
    ):
        qx, qw = fp8.quantize(x, "e4m3", x_tile), fp8.quantize(w, "e4m3", w_tile)
        expected = fp8.scaled_dot_general(qx, qw, (((1,), (0,)), ((), ())), out_dtype)
        actual = fp8.matmul(x, w, recipe=recipe, preferred_element_type=out_dtype)
        assert_same_bits(actual, expected)
