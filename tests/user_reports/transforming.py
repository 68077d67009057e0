"""Reports about derivatives, vmap, and shard_map with one device per example."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jax_fp8 as fp8
from user_reports.helpers import (
    BFLOAT16,
    DTYPES,
    E4M3FN,
    RECIPES,
    Product,
    assert_close,
    assert_same_bits,
    devices,
    forward_and_gradients,
    gradients,
    normal,
)

ONE = np.float32(1)


# --- Derivatives ----------------------------------------------------------------------------------


def cotangents_have_the_dtype_of_their_primal():
    x, w = normal(1, 6, 40, dtype=BFLOAT16), normal(2, 3, 40, 5, dtype=BFLOAT16)
    ct = (normal(3, 3, 6, 5) * 4).round()  # exact in bfloat16
    recipe = fp8.BlockScaling()
    wanted = [gradients(x, w[i], ct[i].astype(BFLOAT16), recipe) for i in range(3)]

    def in_scan(x, w):
        def body(total, operands):
            w, ct = operands
            y = fp8.matmul(x, w)
            return total + jnp.sum(y.astype(jnp.float32) * ct), None  # f32 behind a bf16 product

        return jax.lax.scan(body, jnp.float32(0), (w, ct))[0]

    def used_thrice(x, w):
        return sum(jnp.sum(fp8.matmul(x, w[i]).astype(jnp.float32) * ct[i]) for i in range(3))

    def in_remat(x, w):
        return jax.checkpoint(in_scan)(x, w)

    for loss in (in_scan, used_thrice, in_remat):
        dx, dw = jax.jit(jax.grad(loss, (0, 1)))(x, w)
        assert (dx.dtype, dw.dtype) == (BFLOAT16, BFLOAT16)
        for i in range(3):
            assert_close(dw[i], wanted[i][1])
        # Three cotangents of x, each in bfloat16, are added there: two more roundings.
        total, size = (sum(w[0][j] for w in wanted) for j in (0, 1)), 0
        exact, bound = total
        size = sum(np.abs(w[0].exact) for w in wanted)
        assert_close(dx, Product(exact, bound + 2 * 2.0**-8 * (size + bound)))
    for lhs, rhs in itertools.product(DTYPES, repeat=2):

        def mixed(x, w):
            return fp8.matmul(x, w, preferred_element_type=jnp.float32).sum()

        f = jax.grad(mixed, (0, 1))
        dx, dw = f(x.astype(lhs), w[0].astype(rhs))
        assert (dx.dtype, dw.dtype) == (lhs, rhs)


def integer_operands_are_refused_or_have_no_gradient():
    x, codes = normal(1, 4, 8), np.arange(24, dtype=np.uint8).reshape(8, 3)
    with pytest.raises(TypeError, match=r"matmul: rhs has dtype uint8; convert it with astype"):
        jax.grad(lambda x: fp8.matmul(x, codes).sum())(x)

    def loss(x, codes):
        return fp8.matmul(x, codes.astype(jnp.float32)).sum()

    dx, dcodes = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(x, codes)
    want, _ = gradients(x, codes.astype(np.float32), np.ones((4, 3), np.float32), RECIPES[0])
    assert_close(dx, want)
    assert (dcodes.dtype, dcodes.shape) == (jax.dtypes.float0, (8, 3))


def raw_fp8_operands_have_no_gradient():
    raw, scale = np.ones((4, 4), E4M3FN), np.ones((1, 1), np.float32)
    q = fp8.ScaledArray(raw, scale, (4, 4))

    def scaled_dot(q):
        return fp8.scaled_dot_general(q, q, (((1,), (0,)), ((), ()))).sum()

    for operand, f, x in (
        ("lhs", lambda x: fp8.scaled_matmul(x, raw, ONE, ONE).sum(), raw),
        ("rhs", lambda x: fp8.scaled_matmul(raw, x, ONE, ONE).sum(), raw),
        ("lhs_scale", lambda s: fp8.scaled_matmul(raw, raw, s, ONE).sum(), ONE),
        ("rhs_scale", lambda s: fp8.scaled_matmul(raw, raw, ONE, s).sum(), ONE),
        ("lhs", scaled_dot, q),
        ("x", lambda x: fp8.quantize(x).dequantize().sum(), np.ones((4, 4), np.float32)),
    ):
        for derivative in (jax.grad(f), jax.jit(jax.grad(f))):
            with pytest.raises(TypeError, match=f"a gradient was asked of {operand}, which has"):
                derivative(x)


def forward_mode_and_second_derivatives_work():
    # Small integers and power-of-two scales: every product here is exact in E4M3 and E5M2.
    recipe = fp8.RowScaling(power_of_two=True)
    rng = np.random.default_rng(0)
    x, w, tx, tw = (
        rng.integers(-3, 4, shape).astype(np.float32) for shape in ((5, 4), (4, 3), (5, 4), (4, 3))
    )

    def f(x, w):
        return fp8.matmul(x, w, recipe=recipe)

    y, tangent = jax.jit(lambda: jax.jvp(f, (x, w), (tx, tw)))()
    np.testing.assert_array_equal(y, x @ w)
    np.testing.assert_array_equal(tangent, tx @ w + x @ tw)

    def half_square(w):
        return 0.5 * jnp.sum(f(x, w) ** 2)

    want = np.einsum("mi,mj,ab->iajb", x, x, np.eye(3))
    for hessian in (
        jax.hessian(half_square),
        jax.jacfwd(jax.jacfwd(half_square)),
        jax.jacrev(jax.jacrev(half_square)),
        jax.jacrev(jax.jacfwd(half_square)),
    ):
        np.testing.assert_array_equal(jax.jit(hessian)(w), want)
    # Across operands, where both gradients depend on each other's primal.
    cross = jax.jit(jax.jacfwd(jax.grad(lambda x, w: f(x, w).sum(), 1), 0))(x, w)
    np.testing.assert_array_equal(
        cross, np.einsum("kl,mj,n->knml", np.eye(4), np.ones((5, 1)), np.ones(3))
    )


def gradients_have_the_shape_of_their_primal():
    recipe = fp8.TensorScaling(power_of_two=True)  # ones and fours are exact

    def product(x, w):
        return fp8.matmul(x, w, recipe=recipe)

    def product_and_gradients(x, w):
        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(y)

    for lhs, rhs in (
        ((5, 4), (4, 3)),
        ((4,), (4, 3)),
        ((5, 4), (4,)),
        ((4,), (4,)),
        ((2, 5, 4), (4, 3)),
        ((2, 5, 4), (2, 4, 3)),
        ((1, 5, 4), (2, 4, 3)),
        ((2, 5, 4), (1, 4, 3)),
        ((7, 1, 5, 4), (2, 4, 3)),
        ((4,), (2, 4, 3)),
    ):
        x, w = np.ones(lhs, np.float32), np.ones(rhs, np.float32)
        y, *both = jax.jit(product_and_gradients)(x, w)
        want = np.matmul(x, w)
        assert_same_bits(y, want)
        for got, primal in zip(both, (x, w), strict=True):
            # Every entry of a primal meets as many fours as the result has entries for it.
            fours = np.float32(16 * want.size / primal.size)
            np.testing.assert_array_equal(got, np.full(primal.shape, fours))
    with pytest.raises(ValueError, match=r"float32\[3\]"):
        jax.vjp(product, x, w)[1](np.ones(3, np.float32))


def a_swapped_layer_differentiates():
    def model(cls):
        return nn.Sequential(
            [nn.Dense(48, dot_general_cls=cls), nn.gelu, nn.Dense(10, dot_general_cls=cls)]
        )

    x = normal(1, 16, 32)
    ours, plain = model(fp8.flax.linen.DotGeneral), model(None)
    variables = plain.init(jax.random.key(0), x)

    def loss(model):
        return lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)

    got = jax.tree.leaves(jax.jit(jax.grad(loss(ours), (0, 1)))(variables, x))
    want = jax.tree.leaves(jax.jit(jax.grad(loss(plain), (0, 1)))(variables, x))
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        a, b = (np.asarray(y, np.float64).ravel() for y in (a, b))
        assert 1e-3 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.15


# --- vmap -----------------------------------------------------------------------------------------


def _loop(f, in_axes, args, size):
    """`f` example by example, as a Python loop."""
    outs = []
    for i in range(size):
        pairs = zip(args, in_axes, strict=True)
        taken = [x if axis is None else np.take(x, i, axis=axis) for x, axis in pairs]
        outs.append(jax.tree.map(np.asarray, f(*taken)))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *outs)


def every_subset_of_operands_can_be_mapped():
    lhs, rhs = ((normal(i, 3, *s) * 8).astype(E4M3FN) for i, s in enumerate(((5, 64), (64, 4))))
    lhs_scale, rhs_scale = np.abs(normal(2, 3, 5, 2)) + ONE, np.abs(normal(3, 3, 1, 4)) + ONE
    args = lhs, rhs, lhs_scale, rhs_scale
    f = jax.jit(fp8.scaled_matmul)
    for mapped in itertools.product((True, False), repeat=4):
        if not any(mapped):
            continue
        axes = tuple(0 if m else None for m in mapped)
        given = [x if m else x[0] for x, m in zip(args, mapped, strict=True)]
        got = jax.jit(jax.vmap(fp8.scaled_matmul, axes))(*given)
        jax.tree.map(assert_same_bits, np.asarray(got), _loop(f, axes, given, 3))
    # Nested, over different operands and other dims than the first.
    inner = jax.vmap(fp8.scaled_matmul, (0, None, None, 0))
    got = jax.vmap(inner, (None, 2, 0, None), out_axes=1)(
        lhs, np.moveaxis(rhs, 0, 2), lhs_scale, rhs_scale
    )
    for i, j in itertools.product(range(3), repeat=2):
        assert_same_bits(got[i, j], f(lhs[i], rhs[j], lhs_scale[j], rhs_scale[i]))


def vmap_and_grad_commute():
    x, w, ct = normal(1, 3, 6, 40), normal(2, 3, 40, 5), normal(3, 3, 6, 5)
    for recipe in RECIPES:

        def f(x, w, ct, recipe=recipe):
            return forward_and_gradients(x, w, ct, recipe)

        for axes in ((0, 0, 0), (0, None, 0), (None, 0, 0), (None, None, 0), (0, None, None)):
            given = [a if axis == 0 else a[0] for a, axis in zip((x, w, ct), axes, strict=True)]
            got = jax.jit(jax.vmap(f, axes))(*given)
            for y, want in zip(got, _loop(jax.jit(f), axes, given, 3), strict=True):
                assert_same_bits(y, want)

        def shared(w, recipe=recipe):
            y = jax.vmap(lambda x: fp8.matmul(x, w, recipe=recipe))(x)
            return jnp.sum(y * ct)

        # A shared weight gets the sum over examples, in one FP32 accumulation.
        wanted = [gradients(x[i], w[0], ct[i], recipe)[1] for i in range(3)]
        exact, bound = (sum(part) for part in zip(*wanted, strict=True))
        assert_close(jax.jit(jax.grad(shared))(w[0]), Product(exact, 3 * bound))


def mapping_with_unmapped_operands_works():
    every_subset_of_operands_can_be_mapped()
    vmap_and_grad_commute()


def the_error_for_a_missing_platform_lists_platforms():
    raw = np.ones((4, 4), E4M3FN)
    with fp8.require_kernel():
        for platform in ("cuda", "tpu"):
            traced = jax.jit(fp8.scaled_matmul).trace(raw, raw, ONE, ONE)
            with pytest.raises(NotImplementedError, match=rf"gemm.*{platform}.*exist for cpu"):
                traced.lower(lowering_platforms=(platform,))
        y = jax.jit(fp8.scaled_matmul)(raw, raw, ONE, ONE)
    assert_same_bits(y, np.full((4, 4), 4, np.float32))


# --- shard_map ------------------------------------------------------------------------------------

SHARDED, WHOLE = PartitionSpec("d"), PartitionSpec()


def _mesh(count=4):
    return jax.make_mesh((count,), ("d",), axis_types=(AxisType.Auto,), devices=devices(count))


def vmap_works_inside_shard_map():
    x, w, ct = normal(1, 8, 6, 40), normal(2, 40, 5), normal(3, 8, 6, 5)

    def f(x, w, ct):
        y, dx, _ = forward_and_gradients(x, w, ct, fp8.BlockScaling())
        return y, dx

    mapped = jax.vmap(f, (0, None, 0))
    sharded = jax.shard_map(
        mapped, mesh=_mesh(), in_specs=(SHARDED, WHOLE, SHARDED), out_specs=SHARDED
    )
    for got, want in zip(jax.jit(sharded)(x, w, ct), mapped(x, w, ct), strict=True):
        assert_same_bits(got, want)


def results_vary_over_the_axes_of_their_operands():
    """A scan whose carry is a product: its type must be that of the varying operand."""
    x, w = normal(1, 8, 40), normal(2, 40, 40) / np.float32(6)

    def scanned(x, w):
        def body(carry, _):
            y = fp8.matmul(carry, w)
            # Only the second operand varies; rows stay inputs, so that each has its own scales.
            turned = fp8.dot_general(w, y, (((0,), (1,)), ((), ())), roles=("weight", "input"))
            return turned.T, fp8.quantize(y, "e4m3", (1, -1))

        return jax.lax.scan(body, x, length=3)

    def sharded(out_specs):
        return jax.shard_map(
            scanned, mesh=_mesh(), in_specs=(SHARDED, WHOLE), out_specs=out_specs, check_vma=True
        )

    y, q = jax.jit(sharded((SHARDED, PartitionSpec(None, "d"))))(x, w)
    want, stacked = jax.jit(scanned)(x, w)  # rows are quantised one by one: the same bits
    assert_same_bits(y, want)
    jax.tree.map(assert_same_bits, q, stacked)
    with pytest.raises(ValueError, match="out_specs"):  # the results do vary
        jax.eval_shape(sharded((WHOLE, WHOLE)), x, w)


def scans_over_shards_can_be_differentiated():
    x, w, ct = normal(1, 8, 40), normal(2, 3, 40, 40) / np.float32(6), normal(3, 8, 40)

    def loss(w, x, ct):
        y, _ = jax.lax.scan(lambda carry, w: (fp8.matmul(carry, w), None), x, w)
        return jnp.sum(y * ct)

    def inside(w, x, ct):
        value, dw = jax.value_and_grad(loss)(w, x, ct)
        return jax.lax.psum(value, "d"), dw  # dw is summed by the transpose of the broadcast of w

    specs = {"mesh": _mesh(), "in_specs": (WHOLE, SHARDED, SHARDED), "check_vma": True}
    value, dw = jax.jit(jax.shard_map(inside, out_specs=(WHOLE, WHOLE), **specs))(w, x, ct)
    total = jax.shard_map(lambda *args: jax.lax.psum(loss(*args), "d"), out_specs=WHOLE, **specs)
    outside = jax.jit(jax.grad(total))(w, x, ct)
    assert_same_bits(outside, dw)
    alone = jax.jit(jax.value_and_grad(loss))
    parts = [alone(w, x[i : i + 2], ct[i : i + 2]) for i in range(0, 8, 2)]
    want = sum(np.asarray(part[1], np.float64) for part in parts)
    size = sum(np.abs(np.asarray(part[1], np.float64)) for part in parts)
    assert_close(dw, Product(want, 4 * 2.0**-24 * size))
    np.testing.assert_allclose(value, sum(float(part[0]) for part in parts), rtol=1e-5)
