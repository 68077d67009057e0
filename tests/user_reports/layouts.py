"""Reports about layouts, scale semantics and arguments that are ignored."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8 import formats, gemm
from jax_fp8.testing import oracle
from user_reports.helpers import (
    BFLOAT16,
    DTYPES,
    E4M3FN,
    E5M2,
    RECIPES,
    Product,
    assert_close,
    assert_same_bits,
    eager_and_jit,
    forward,
    gradients,
    normal,
)

ONE = np.float32(1)
LAST_DIMS = (((1,), (1,)), ((), ()))


def _raw(seed, *shape, dtype=E4M3FN):
    return (normal(seed, *shape) * 8).astype(dtype)


def row_major_rhs_gives_the_same_bits_everywhere():
    lhs, rhs = _raw(1, 5, 40), _raw(2, 40, 7)
    scales = np.float32(0.5), np.abs(normal(3, 1, 7))
    y = eager_and_jit(fp8.scaled_matmul, lhs, rhs, *scales)

    def k_last(lhs, rhs, lhs_scale, rhs_scale):
        q = fp8.ScaledArray(lhs, jnp.full((1, 1), lhs_scale), lhs.shape)
        return fp8.scaled_dot_general(
            q, fp8.ScaledArray(rhs, rhs_scale, (1, rhs.shape[1])), LAST_DIMS
        )

    transposed = np.ascontiguousarray(rhs.T), scales[0], np.ascontiguousarray(scales[1].T)
    assert_same_bits(eager_and_jit(k_last, lhs, *transposed), y)
    one = (np.ones((1, 1), np.float32), (5, 40), (7, 40))
    want = oracle.gemm_np(lhs, rhs.T, one[0] * scales[0], scales[1].T, (5, 40), (1, 40))
    bound = oracle.gemm_bound_np(lhs, rhs.T, one[0] * scales[0], scales[1].T, (5, 40), (1, 40))
    assert_close(y, Product(want, bound))


def _layouts(x, w):
    """The same product from every layout of both operands: lhs (m, k) or (k, m), rhs likewise."""
    for lhs, lhs_k in ((x, 1), (x.T, 0)):
        for rhs, rhs_k in ((w, 0), (w.T, 1)):
            numbers = (((lhs_k,), (rhs_k,)), ((), ()))
            yield np.ascontiguousarray(lhs), np.ascontiguousarray(rhs), numbers


def transposed_operands_give_the_same_bits():
    x, w = normal(1, 9, 150), normal(2, 150, 6)
    for recipe in RECIPES:
        want = fp8.matmul(x, w, recipe=recipe)
        assert_close(want, forward(x, w, recipe))
        for lhs, rhs, numbers in _layouts(x, w):

            def f(lhs, rhs, numbers=numbers, recipe=recipe):
                return fp8.dot_general(lhs, rhs, numbers, recipe=recipe)

            assert_same_bits(eager_and_jit(f, lhs, rhs), want)
        # A transpose inside the jitted function, which XLA may turn into a layout.
        f = jax.jit(lambda x, w, recipe=recipe: fp8.matmul(x.T, w.T, recipe=recipe))
        assert_same_bits(f(x.T, w.T), want)


def gradients_of_every_layout_give_the_same_bits():
    x, w, ct = normal(1, 9, 150), normal(2, 150, 6), normal(3, 9, 6)
    for recipe in RECIPES:
        wanted = gradients(x, w, ct, recipe)
        first = None
        for lhs, rhs, numbers in _layouts(x, w):

            def f(lhs, rhs, numbers=numbers, recipe=recipe):
                return jax.vjp(
                    lambda a, b: fp8.dot_general(a, b, numbers, recipe=recipe), lhs, rhs
                )[1](ct)

            dlhs, drhs = (np.asarray(g) for g in jax.jit(f)(lhs, rhs))
            dx = dlhs if dlhs.shape == x.shape else dlhs.T
            dw = drhs if drhs.shape == w.shape else drhs.T
            first = first or (dx, dw)
            for got, same, want in zip((dx, dw), first, wanted, strict=True):
                assert_same_bits(got, same)
                assert_close(got, want)


def an_output_scale_is_refused():
    x, raw = np.ones((4, 4), np.float32), np.ones((4, 4), E4M3FN)
    q = fp8.quantize(x)
    for name in ("scale_result", "out_scale", "output_scale"):
        for call in (
            lambda **extra: fp8.scaled_matmul(raw, raw, ONE, ONE, **extra),
            lambda **extra: fp8.scaled_dot_general(q, q, LAST_DIMS, **extra),
            lambda **extra: fp8.matmul(x, x, **extra),
            lambda **extra: fp8.dot_general(x, x, LAST_DIMS, **extra),
        ):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                call(**{name: np.float32(2)})
    # The product of the scales is what the result is multiplied by.
    y = fp8.scaled_matmul(raw, raw, np.float32(2), np.float32(8))
    assert_same_bits(y, np.full((4, 4), 64, np.float32))


def no_argument_is_silently_unused():
    x, w = normal(1, 5, 200), normal(2, 200, 6)

    def matmul(**options):
        return np.asarray(fp8.matmul(x, w, **options))

    default = matmul()
    effects = {
        "recipe": {"recipe": fp8.TensorScaling()},
        "roles": {"roles": ("weight", "weight")},
        "preferred_element_type": {"preferred_element_type": jnp.bfloat16},
        "accumulation": {"accumulation": "hopper_wgmma"},
        "promotion_interval": {"accumulation": "hopper_wgmma", "promotion_interval": 32},
        "split_k": {"accumulation": "hopper_wgmma", "split_k": 2},
    }
    results = [(default.dtype, default.tobytes())]
    for options in effects.values():
        changed = matmul(**options)
        results.append((changed.dtype, changed.tobytes()))
    assert len(set(results)) == len(results)
    refusals = {
        "precision": ({"precision": "BF16_BF16_F32"}, ValueError, "precision 'BF16_BF16_F32'"),
        "out_sharding": ({"out_sharding": "x"}, NotImplementedError, "out_sharding is 'x'"),
        "key": ({"key": jax.random.key(0)}, ValueError, "key is given"),
    }
    for options, error, message in refusals.values():
        with pytest.raises(error, match=message):
            matmul(**options)
    for call in (fp8.matmul, fp8.dot_general):
        known = {*effects, *refusals, "lhs", "rhs", "dimension_numbers"}
        assert set(inspect.signature(call).parameters) <= known
    # FP32 accumulation satisfies every precision that asks for a quality rather than an algorithm.
    for precision in ("default", "highest", jax.lax.Precision.HIGHEST):
        assert_same_bits(matmul(precision=precision), default)


def one_validator_serves_tracing_and_running():
    lhs, rhs = _raw(1, 6, 64), _raw(2, 64, 4)
    shapes = [(), (1,), (1, 1), (6, 1), (6, 2), (1, 2), (3, 64), (6,), (2, 6, 1), (6, 3), (7, 1)]
    accepted = 0
    for shape in shapes:
        scale = np.ones(shape, np.float32)
        outcomes = []
        for run in (
            lambda *args: jax.eval_shape(fp8.scaled_matmul, *args),
            fp8.scaled_matmul,
            jax.jit(fp8.scaled_matmul),
        ):
            try:
                y = run(lhs, rhs, scale, ONE)
                outcomes.append((y.shape, y.dtype))
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1] == outcomes[2]
        accepted += outcomes[0] == ((6, 4), np.float32)
    assert accepted == 7


def _scale_of_kind(kind, rows, k):
    if kind == "mx":
        return np.full((rows, k // 32), 1, formats.E8M0), (1, 32)
    if kind == "tensor":
        return np.full((1, 1), 0.25, np.float32), (rows, k)
    if kind == "row":
        return np.abs(normal(4, rows, 1)) + ONE, (1, k)
    return np.abs(normal(5, -(-rows // 128), k // 128)) + ONE, (128, 128)


def pairs_of_scale_kinds_are_a_table():
    m, k, n = 130, 256, 140
    lhs, rhs = _raw(1, m, k), _raw(2, n, k)
    for pair in itertools.product(gemm.SCALE_KINDS, repeat=2):
        (lhs_scale, lhs_tile), (rhs_scale, rhs_tile) = (
            _scale_of_kind(kind, rows, k) for kind, rows in zip(pair, (m, n), strict=True)
        )
        args = (lhs, rhs.T, lhs_scale, rhs_scale.T)
        tiles = {"lhs_tile": lhs_tile, "rhs_tile": rhs_tile[::-1]}
        if pair not in gemm.SCALE_PAIRS:
            message = (
                f"lhs has scales of kind '{pair[0]}' and rhs of kind '{pair[1]}'; .* goes with"
            )
            with pytest.raises(ValueError, match=message):
                fp8.scaled_matmul(*args, **tiles)
            continue
        got = fp8.scaled_matmul(*args, **tiles)  # ("tile", "tile") is 128x128 on both sides
        args = (lhs, rhs, lhs_scale.astype(np.float32), rhs_scale.astype(np.float32))
        exact = oracle.gemm_np(*args, lhs_tile, rhs_tile)
        assert_close(got, Product(exact, oracle.gemm_bound_np(*args, lhs_tile, rhs_tile)))
    assert {(b, a) for a, b in gemm.SCALE_PAIRS} == gemm.SCALE_PAIRS
    assert ("tile", "tile") in gemm.SCALE_PAIRS


def default_result_is_float32():
    lhs, rhs = _raw(1, 3, 16, dtype=E5M2), _raw(2, 16, 4)
    assert fp8.scaled_matmul(lhs, rhs, ONE, ONE).dtype == np.float32
    q = fp8.quantize(normal(1, 3, 16, dtype=BFLOAT16))
    assert fp8.scaled_dot_general(q, q, LAST_DIMS).dtype == np.float32
    with pytest.raises(TypeError, match=r"preferred_element_type int32.*use float32, bfloat16 or"):
        fp8.scaled_matmul(lhs, rhs, ONE, ONE, preferred_element_type=jnp.int32)
    for dtype in DTYPES:  # differentiable calls follow their operands, as jnp does
        x = normal(1, 3, 3, dtype=dtype)
        assert fp8.matmul(x, x).dtype == dtype


def per_channel_scales_save_small_channels():
    x = normal(1, 32, 256)
    w = normal(2, 256, 7) * np.float32(10.0) ** -np.arange(7, dtype=np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64)

    def error(recipe):
        """Relative error of the worst output channel."""
        difference = np.asarray(fp8.matmul(x, w, recipe=recipe), np.float64) - exact
        return np.max(np.linalg.norm(difference, axis=0) / np.linalg.norm(exact, axis=0))

    per_channel, per_tensor = error(fp8.RowScaling()), error(fp8.TensorScaling())
    assert 0.025 < per_channel < 0.05
    assert per_tensor > 9.6 * per_channel
    assert "per output column of weights" in " ".join(fp8.RowScaling.__doc__.split())
