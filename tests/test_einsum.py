"""einsum and matmul: every form that jnp takes, with the roles kept where they were given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

FORMS = {
    "ij,jk->ik": ((3, 40), (40, 5)),
    "ij,jk": ((3, 40), (40, 5)),
    "bld,df->blf": ((2, 3, 40), (40, 5)),
    "bthd,bshd->bhts": ((2, 3, 4, 40), (2, 5, 4, 40)),
    "bhts,bshd->bthd": ((2, 4, 3, 40), (2, 40, 4, 5)),
    "dk,bd->bk": ((40, 3), (5, 40)),  # the weight first
    "abc,bcd->ad": ((3, 4, 10), (4, 10, 5)),
    "abc,cbd->ad": ((3, 4, 10), (10, 4, 5)),
    "i,i->": ((40,), (40,)),
    "i,j->ij": ((4,), (5,)),
    "ij,j->i": ((3, 40), (40,)),
    "ijk,jl->il": ((3, 40, 2), (40, 5)),  # k is summed before
    "iij,jk->ik": ((3, 3, 40), (40, 5)),  # the diagonal of i
    "...ij,...jk->...ik": ((2, 3, 40), (2, 40, 5)),
    "...i,ij->...j": ((2, 3, 40), (40, 5)),
    "bij,bjk->ikb": ((2, 3, 40), (2, 40, 5)),
    "bij,bjk->bik": ((2, 3, 40), (1, 40, 5)),  # a dim of size 1 is repeated
    "ij,jk,kl->il": ((3, 40), (40, 30), (30, 5)),
    "ab,bc,cd,de->ae": ((3, 8), (8, 9), (9, 10), (10, 5)),
}


def operands(shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


@pytest.mark.parametrize("subscripts", FORMS)
def test_forms_give_what_numpy_gives(subscripts):
    arrays = operands(FORMS[subscripts])
    wide = [a.astype(np.float64) for a in arrays]
    expected = np.einsum(subscripts, *wide)
    out = fp8.einsum(subscripts, *arrays)
    assert (out.shape, out.dtype) == (expected.shape, np.float32)
    scale = np.einsum(subscripts, *(np.abs(a) for a in wide))
    steps = len(arrays) - 1
    assert (np.abs(out - expected) <= 0.14 * steps * scale + 1e-6).all()
    gradient = jax.grad(lambda *a: fp8.einsum(subscripts, *a).sum(), tuple(range(len(arrays))))
    exact = jax.grad(lambda *a: jnp.einsum(subscripts, *a).sum(), tuple(range(len(arrays))))
    for a, b in zip(gradient(*arrays), exact(*arrays), strict=True):
        assert np.linalg.norm(a - b) <= 0.2 * np.linalg.norm(b) + 1e-5


def test_roles_belong_to_operands_not_positions():
    x, w = operands(((5, 300), (300, 7)))
    direct = fp8.matmul(x, w)
    np.testing.assert_array_equal(fp8.einsum("bd,dk->bk", x, w), direct)
    swapped = fp8.einsum("dk,bd->bk", w, x, roles=("weight", "input"))
    np.testing.assert_array_equal(swapped, direct)
    assert (np.asarray(fp8.einsum("dk,bd->bk", w, x)) != np.asarray(direct)).any()


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        ((40,), (40,)),
        ((3, 40), (40,)),
        ((40,), (40, 5)),
        ((2, 3, 40), (40, 5)),
        ((2, 3, 40), (2, 40, 5)),
        ((6, 1, 3, 40), (2, 40, 5)),
        ((3, 40), (4, 40, 5)),
        ((40,), (4, 40, 5)),
        ((2, 3, 40), (40,)),
        ((1, 3, 40), (7, 40, 5)),
    ],
)
def test_matmul_takes_every_rank_that_jnp_takes(lhs, rhs):
    x, w = operands((lhs, rhs))
    for recipe in (fp8.TensorScaling(), fp8.RowScaling(), fp8.BlockScaling()):
        out = fp8.matmul(x, w, recipe=recipe)
        expected = np.matmul(x.astype(np.float64), w)
        assert out.shape == expected.shape
        scale = np.matmul(np.abs(x).astype(np.float64), np.abs(w))
        assert (np.abs(out - expected) <= 0.14 * scale).all()
        grads = jax.grad(lambda *a: fp8.matmul(*a, recipe=recipe).sum(), (0, 1))(x, w)  # noqa: B023
        exact = jax.grad(lambda *a: jnp.matmul(*a).sum(), (0, 1))(x, w)
        for got, reference in zip(grads, exact, strict=True):
            assert got.shape == reference.shape
            error = np.linalg.norm(np.asarray(got) - reference)
            assert error <= 0.1 * np.linalg.norm(reference)


def test_bad_subscripts_name_call_and_shapes():
    x, w = operands(((3, 4), (4, 5)))
    for subscripts, words in (
        ("ij,jk->iz", "'ij,jk->iz' does not fit shapes (3, 4), (4, 5)"),
        ("ij,kj->ik", "'ij,kj->ik' does not fit shapes (3, 4), (4, 5)"),
        ("ij", "does not fit"),
    ):
        with pytest.raises(ValueError, match="einsum") as error:
            fp8.einsum(subscripts, x, w)
        assert words in str(error.value)
    with pytest.raises(ValueError, match=r"einsum: roles is \('input',\) for 2 operands"):
        fp8.einsum("ij,jk->ik", x, w, roles=("input",))
    with pytest.raises(TypeError, match="einsum: operand 1 has dtype int32"):
        fp8.einsum("ij,jk->ik", x, np.ones((4, 5), np.int32))
    with pytest.raises(ValueError, match="nothing to multiply"):
        fp8.einsum("ij->ji", x)
