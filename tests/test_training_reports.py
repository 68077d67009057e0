"""Reports of FP8 training users (state and numerics) that this package answers so far, by id.

T1 to T34; those about the state of delayed scaling, meshes and hardware accumulators come with the
capabilities that they concern, and are listed with that reason. `pytest -k T9` runs a report.
"""

from __future__ import annotations

import functools
import io

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_fp8 as fp8
from checks import assert_same_bits
from jax_fp8.testing import oracle

REPORTS = {}


def report(name, reference):
    """Registers the test of a report; its docstring is the claim."""

    def register(test):
        REPORTS[name] = (reference, test)
        return test

    return register


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, W1, W2 = normal(0, 8, 160), normal(1, 160, 160) / 12, normal(2, 160, 160) / 12


def two_linears(x, weights):
    return fp8.matmul(jnp.tanh(fp8.matmul(x, weights[0])), weights[1])


@report("T9", "NVIDIA/TransformerEngine#415")
def recomputed_layers_have_the_same_gradient():
    """jax.checkpoint around two FP8 linears works."""
    plain = jax.grad(lambda w: two_linears(X, w).sum())((W1, W2))
    remat = jax.grad(lambda w: jax.checkpoint(two_linears)(X, w).sum())((W1, W2))
    for a, b in zip(plain, remat, strict=True):
        assert_same_bits(a, b)


@report("T10", "NVIDIA/TransformerEngine PR 1723")
def recomputation_gives_the_codes_of_the_forward_pass():
    """Codes and scales that are computed again are the same bits, with donated operands too."""

    def layer(x, w):
        q = fp8.quantize(jax.lax.stop_gradient(x), "e4m3", (1, 128))
        return fp8.matmul(x, w), q

    def step(x, w):
        y, q = jax.checkpoint(layer)(x, w)
        return jnp.sum(y), q

    expected = fp8.quantize(X, "e4m3", (1, 128))
    (_, q), _ = jax.jit(jax.value_and_grad(step, has_aux=True), donate_argnums=1)(X, jnp.array(W1))
    assert_same_bits(q.values, expected.values)
    assert_same_bits(q.scale, expected.scale)


@report("T11", "NVIDIA/Megatron-LM PR 7538")
def the_backward_pass_follows_the_forward_trace():
    """A context around the forward trace only decides about the backward GEMMs too."""
    with fp8.force_kernel("scalar"):
        _, backward = jax.vjp(two_linears, X, (W1, W2))
    text = jax.jit(backward).lower(jnp.ones((8, 160))).as_text()
    calls = [line for line in text.splitlines() if "@jax_fp8.gemm.v1" in line]
    assert len(calls) == 4
    assert all('kernel = "scalar"' in line for line in calls)
    assert "dot_general" not in text


@report("T12", "float8_experimental#267")
def the_first_step_under_recomputation_needs_no_flag():
    """There is no hidden state: the first call, recomputed, equals any later one."""

    def fresh():
        return jax.jit(jax.grad(lambda w: jax.checkpoint(two_linears)(X, w).sum()))((W1, W2))

    first, second = fresh(), fresh()
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


@report("T16", "jax-ml/ml_dtypes#148")
def a_scaled_array_can_be_saved_with_numpy():
    """np.load forgets FP8 dtypes; the documented way keeps dtype and bits."""
    q = fp8.quantize(X, "e5m2", (1, 128))
    file = io.BytesIO()
    np.savez(file, values=np.asarray(q.values).view(np.uint8), scale=q.scale)
    file.seek(0)
    saved = np.load(file)
    values = saved["values"].view(ml_dtypes.float8_e5m2)
    again = fp8.ScaledArray(jnp.asarray(values), jnp.asarray(saved["scale"]), q.tile)
    assert_same_bits(again.values, q.values)
    assert_same_bits(again.scale, q.scale)
    assert_same_bits(again.dequantize(), q.dequantize())
    assert "view(np.uint8)" in fp8.ScaledArray.__doc__


TILES = ((-1, -1), (1, -1), (1, 128), (128, 128), (1, 32))


@report("T17", "NVIDIA/TransformerEngine PR 786")
def tiny_operands_have_a_finite_scale():
    """amax of 1e-38 or 2^-149 gives a finite scale and no NaN."""
    for tiny in (1e-38, 2.0**-149):
        x = np.full((4, 256), tiny, np.float32)
        for tile in TILES:
            q = fp8.quantize(x, "e4m3", tile)
            assert (np.asarray(q.scale) == np.float32(2.0**-126)).all()
            values, _ = oracle.quantize_np(x, "e4m3fn", tile)
            assert_same_bits(q.values, values)


@report("T18", "pytorch/ao#4713")
def a_zero_row_leaves_the_others_unchanged():
    """A zero row has codes 0 and, where it has a scale of its own, scale 1."""
    x = normal(5, 4, 256)
    full = x.copy()
    x[2] = 0
    for tile in TILES:
        for power_of_two in (False, True):
            q = fp8.quantize(x, "e4m3", tile, power_of_two=power_of_two)
            assert (np.asarray(q.values[2]).astype(np.float32) == 0).all()
            if tile[0] == 1:
                assert (np.asarray(q.scale[2]) == 1).all()
                other = fp8.quantize(full, "e4m3", tile, power_of_two=power_of_two)
                for rows in ([0, 1, 3],):
                    assert_same_bits(np.asarray(q.values)[rows], np.asarray(other.values)[rows])
    mx = fp8.quantize(x, "e4m3", (1, 32), scale_dtype=ml_dtypes.float8_e8m0fnu)
    assert (np.asarray(mx.scale[2]).view(np.uint8) == 127).all()  # 2^0


@report("T19", "huggingface/kernels-community PR 680")
def a_zero_block_is_not_nan():
    """A zero first block of 128 has codes 0 and scale 1."""
    x = normal(6, 1, 256)
    x[:, :128] = 0
    q = fp8.quantize(x, "e4m3", (1, 128))
    assert float(q.scale[0, 0]) == 1
    assert (np.asarray(q.values[0, :128]).astype(np.float32) == 0).all()
    assert np.isfinite(np.asarray(fp8.matmul(x, np.ones((256, 3), np.float32)))).all()


@report("T20", "pytorch/ao PR 3171")
def bfloat16_rows_have_the_codes_of_the_same_float32_values():
    """amax and scale are FP32 whatever the input, and nothing saturates."""
    amax = np.float32([446, 448, 450])
    rows = (normal(7, 3, 64) / 8).astype(ml_dtypes.bfloat16)
    rows[:, 0] = amax
    for power_of_two in (False, True):
        narrow = fp8.quantize(rows, "e4m3", (1, -1), power_of_two=power_of_two)
        wide = fp8.quantize(rows.astype(np.float32), "e4m3", (1, -1), power_of_two=power_of_two)
        assert_same_bits(narrow.values, wide.values)
        assert_same_bits(narrow.scale, wide.scale)
        ratio = np.abs(rows.astype(np.float32)) / np.asarray(narrow.scale)
        assert (ratio < fp8.E4M3FN.saturation_threshold).all()
    recipe = fp8.RowScaling(power_of_two=True)
    grads = jax.grad(lambda x: fp8.matmul(x, rows.T, recipe=recipe).astype(jnp.float32).sum())(rows)
    assert np.isfinite(np.asarray(grads, np.float32)).all()


@report("T21", "jax-ml/ml_dtypes#400, #260, #147")
def casts_saturate_explicitly():
    """464, 465 and 1e6 become 448, and 61440 becomes 57344, not NaN or infinity."""
    for fmt, values in (("e4m3", (464, 465, 1e6)), ("e5m2", (61440, 1e9))):
        q = fp8.quantize(np.float32([*values, *(-v for v in values)]), fmt, scale=1.0)
        largest = fp8.formats.lookup(fmt).max
        expected = [largest] * len(values) + [-largest] * len(values)
        np.testing.assert_array_equal(np.asarray(q.values, np.float32), expected)


@report("T22", "vllm-project/vllm PR 32201")
def scale_clip_and_mask_read_the_same_row_of_the_table():
    """The value at amax becomes the largest code; one just above a static scale saturates."""
    for fmt in fp8.formats.ALL:
        x = np.float32([[3.0, -1.0, 0.5]])
        q = fp8.quantize(x, fmt)
        assert float(q.values[0, 0]) == fmt.max
        above = np.float32([[fmt.saturation_threshold, fmt.max]])
        assert np.asarray(fp8.quantize(above, fmt, scale=1.0).values, np.float32).max() == fmt.max
        recipe = fp8.StaticScaling(ste="mask_saturated", input_format=fmt)
        w = np.ones((2, 1), np.float32)
        dx = jax.grad(lambda x: fp8.matmul(x, w, recipe=recipe).sum())(above)  # noqa: B023
        np.testing.assert_array_equal(dx, [[0, 1]])
    with pytest.raises(TypeError, match="FNUZ"):
        fp8.quantize(x, "float8_e4m3fnuz")


@report("T30", "openxla/xla#6168")
def precision_cannot_change_the_accumulator():
    """DEFAULT and HIGHEST give the same bits: sums are FP32; an algorithm of its own raises."""
    expected = fp8.matmul(X, W1)
    for precision in (None, "default", "highest", jax.lax.Precision.HIGHEST):
        assert_same_bits(fp8.matmul(X, W1, precision=precision), expected)
    with pytest.raises(ValueError, match="precision"):
        fp8.matmul(X, W1, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)


@report("T31", "NVIDIA/TransformerEngine#758")
def a_narrow_accumulator_exists_in_emulation_only_and_warns():
    """FP16 sums are never the default, no GPU call falls back to them, and they name the remedy."""
    q = fp8.quantize(X)
    dims = (((1,), (1,)), ((), ()))

    def call(q):
        return fp8.scaled_dot_general(q, q, dims, accumulation="fp16")

    assert fp8.scaled_dot_general(q, q, dims).dtype == np.float32
    with pytest.warns(fp8.emulation.OverflowWarning, match="StaticScaling or quantize"):
        out = call(q)
    assert not np.isfinite(out).all()  # 448 · 448 is beyond 65504
    with (
        pytest.warns(fp8.emulation.OverflowWarning),
        pytest.raises(NotImplementedError, match="'fp16' is emulated by CPU kernels only"),
    ):
        jax.jit(call).trace(q).lower(lowering_platforms=("cuda",))


@report("T32", "triton-lang/triton PR 2300")
def long_sums_of_one_sign_do_not_drift():
    """uniform[0, 1) with K = 4096 has no bias: sums are FP32 by default."""
    rng = np.random.default_rng(0)
    x, w = (rng.random(s, dtype=np.float32) for s in ((16, 4096), (4096, 16)))
    q, p = fp8.quantize(x), fp8.quantize(w)
    out = fp8.scaled_dot_general(q, p, (((1,), (0,)), ((), ())))
    exact = oracle.dequantize_np(np.asarray(q.values), q.scale, (-1, -1)) @ oracle.dequantize_np(
        np.asarray(p.values), p.scale, (-1, -1)
    )
    assert np.abs(np.asarray(out, np.float64) / exact - 1).max() < 1e-4


@report("T34", "marin-community/marin#7298")
def a_training_step_holds_no_second_long_lived_copy():
    """Temporaries of a two-layer step are no more than those of bfloat16, plus the FP8 copies."""
    tokens, width = 512, 512
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    weights = [jax.ShapeDtypeStruct((width, width), jnp.bfloat16)] * 2

    def loss(matmul, weights, x):
        for w in weights:
            x = jnp.tanh(matmul(x, w))
        return jnp.sum(x.astype(jnp.float32))

    def temporaries(matmul):
        step = jax.jit(jax.grad(functools.partial(loss, matmul)))
        return step.lower(weights, x).compile().memory_analysis().temp_size_in_bytes

    copies = 2 * 2 * (tokens * width + width * width)  # two layers, x and w, two axes, 1 byte each
    assert temporaries(fp8.matmul) <= temporaries(jnp.matmul) + 1.5 * copies


STATE, MESH = "state of delayed scaling does not exist yet", "partitioning rules do not exist yet"
LEFT_OUT = {
    **dict.fromkeys([f"T{i}" for i in (*range(1, 9), 13, 14, 15, 23)], STATE),
    **dict.fromkeys([f"T{i}" for i in range(24, 30)], MESH),
    "T33": "accumulators of hardware come with their emulation",
}


@pytest.mark.parametrize("name", REPORTS)
def test_report(name):
    REPORTS[name][1]()


def test_every_report_is_tested_or_left_out_with_a_reason():
    assert sorted([*REPORTS, *LEFT_OUT]) == sorted(f"T{i}" for i in range(1, 35))
    assert not set(REPORTS) & set(LEFT_OUT)
    assert all(reference and test.__doc__ for reference, test in REPORTS.values())
