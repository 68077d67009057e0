"""einsum over FP8 GEMMs. It plans its own contractions: jnp.einsum may swap operands, and with them
the roles that decide how each is quantised."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy.typing as npt
import opt_einsum

from jax_fp8 import config, recipes
from jax_fp8.accumulation import UNSET, PerGemm, Sums, Unset
from jax_fp8.dot import check_out_sharding, dot_general, real_dtypes
from jax_fp8.gemm import promote
from jax_fp8.operands import as_float_array, check_prepared
from jax_fp8.prepared import PreparedArray
from jax_fp8.primitive import refuse_explicit
from jax_fp8.recipes import OPERAND_ROLES, Recipe

__all__ = ["einsum"]

Array = jax.Array


def einsum(
    subscripts: str,
    *operands: jax.typing.ArrayLike | PreparedArray,
    recipe: Recipe | None = None,
    roles: tuple[str, ...] | None = None,
    precision: Any = None,
    preferred_element_type: npt.DTypeLike | None = None,
    key: Array | None = None,
    accumulation: str | PerGemm[str] | Unset = UNSET,
    promotion_interval: int | PerGemm[int | None] | Unset | None = UNSET,
    split_k: int | PerGemm[int] | Unset = UNSET,
    out_sharding: Any = None,
) -> Array:
    """`jnp.einsum` whose contractions are FP8 GEMMs.

    Indices that occur in one operand only are summed, and repeated ones reduced to the diagonal,
    before anything is quantised. More than two operands are contracted pair by pair along
    opt_einsum's path; an intermediate result has the role "input".

    Args:
      subscripts: as for jnp.einsum, such as "bld,df->blf"; "..." is allowed.
      *operands: float32, bfloat16 or float16 arrays. The second of two may be prepared weights,
        with indices in the order of their dims: batch, contracted, free.
      recipe: formats and scale tiles; None is `BlockScaling()`.
      roles: "input" or "weight" for each operand. None: "input" for the first, "weight" for others.
      precision: as for `dot_general`.
      preferred_element_type: dtype of the result; None promotes the operands.
      key: as for `dot_general`; each contraction gets a key of its own from it.
      accumulation: as for `dot_general`.
      promotion_interval: as for `dot_general`.
      split_k: as for `dot_general`.
      out_sharding: must be None.

    Returns:
      Array of the shape that the subscripts name.

    Raises:
      TypeError: a dtype that is not offered.
      ValueError: subscripts, shapes or roles that do not fit.
      NotImplementedError: as for `dot_general`.

    >>> einsum("bld,df->blf", jnp.ones((2, 3, 4)), jnp.ones((4, 5))).shape
    (2, 3, 5)
    """
    check_out_sharding(out_sharding, "einsum")
    arrays = [_operand(x, i, len(operands)) for i, x in enumerate(operands)]
    if roles is None:
        roles = ("input",) + ("weight",) * (len(arrays) - 1)
    if len(roles) != len(arrays) or any(role not in OPERAND_ROLES for role in roles):
        raise ValueError(
            f"einsum: roles is {roles!r} for {len(arrays)} operands; give one of "
            f"{', '.join(OPERAND_ROLES)} for each"
        )
    if len(arrays) < 2:
        raise ValueError(
            f"einsum: {subscripts!r} has {len(arrays)} operand; there is nothing to multiply: use "
            "jnp.einsum"
        )
    try:
        inputs, out, _ = opt_einsum.parser.parse_einsum_input((subscripts, *arrays))
        _, path = opt_einsum.contract_path(subscripts, *arrays)
    except ValueError as error:
        shapes = ", ".join(str(x.shape) for x in arrays)
        raise ValueError(f"einsum: {subscripts!r} does not fit shapes {shapes}: {error}") from error
    if preferred_element_type is None:
        preferred_element_type = promote(*(d for x in arrays for d in real_dtypes(x)))
    sums = Sums(accumulation, promotion_interval, split_k)
    config.executions(sums, recipes.check(recipe, "einsum").sums, call="einsum")
    terms = list(zip(inputs.split(","), arrays, roles, strict=True))
    for i, step in enumerate(path.contraction_list):
        step_key = key if key is None or i == 0 else jax.random.fold_in(key, i)
        picked = sorted(step[0])
        lhs, *others = [terms[i] for i in picked]
        terms = [term for i, term in enumerate(terms) if i not in picked]
        for rhs in others:
            kept = set(out).union(*(term[0] for term in terms))
            if rhs is not others[-1]:
                kept |= set().union(*(term[0] for term in others))
            lhs = _pair(lhs, rhs, kept, recipe, precision, preferred_element_type, step_key, sums)
        terms.append(lhs)
    ((names, result, _),) = terms
    return result.transpose([names.index(name) for name in out])


Term = tuple[str, Any, str]


def _operand(x: Any, index: int, count: int) -> Any:
    name = f"operand {index}"
    if isinstance(x, PreparedArray) and (index, count) == (1, 2):
        check_prepared(x, "einsum", name)
        return x
    x = as_float_array(x, "einsum", name)
    refuse_explicit(x, "einsum", name)
    return x


def _pair(
    lhs: Term,
    rhs: Term,
    kept: set[str],
    recipe: Recipe | None,
    precision: Any,
    dtype: npt.DTypeLike,
    key: Array | None,
    sums: Sums,
) -> Term:
    """Contracts two terms (indices, array, role) to the indices in `kept`."""
    is_prepared = isinstance(rhs[1], PreparedArray)  # then its order of batch dims counts
    if is_prepared:
        _check_indices_of_prepared(lhs, rhs, kept)
    (lhs_names, x), (rhs_names, w) = (
        _own_indices(names, array, kept | set(other))
        for (names, array, _), other in ((lhs, rhs[0]), (rhs, lhs[0]))
    )
    names, others = (rhs_names, lhs_names) if is_prepared else (lhs_names, rhs_names)
    shared = [name for name in names if name in others]
    batch, contracting = ([n for n in shared if (n in kept) == keep] for keep in (True, False))
    x, w = _broadcast_shared(x, lhs_names, w, rhs_names, shared)
    numbers = tuple(
        tuple(tuple(names.index(n) for n in dims) for names in (lhs_names, rhs_names))
        for dims in (contracting, batch)
    )
    out = dot_general(
        x,
        w,
        numbers,
        precision,
        dtype,
        recipe=recipe,
        roles=(lhs[2], rhs[2]),
        key=key,
        accumulation=sums.accumulation,
        promotion_interval=sums.promotion_interval,
        split_k=sums.split_k,
    )
    free = [n for names in (lhs_names, rhs_names) for n in names if n not in shared]
    return "".join([*batch, *free]), out, "input"


def _check_indices_of_prepared(lhs: Term, rhs: Term, kept: set[str]) -> None:
    names, w, _ = rhs
    sizes = dict(zip(lhs[0], lhs[1].shape, strict=True))
    for name, size in zip(names, w.shape, strict=True):
        if (
            names.count(name) > 1
            or (name not in sizes and name not in kept)
            or (size == 1 < sizes.get(name, 1))
        ):
            raise ValueError(
                f"einsum: index {name!r} of operand 1, a PreparedArray of shape {w.shape}, is "
                "repeated, summed over or broadcast; prepared weights are multiplied only: do "
                "that before preparing them"
            )


def _own_indices(names: str, x: Array, needed: set[str]) -> tuple[str, Array]:
    """Takes the diagonal of repeated indices and sums over those that nobody else needs."""
    out = "".join(n for n in dict.fromkeys(names) if n in needed)
    return out, x if out == names else jnp.einsum(f"{names}->{out}", x)


def _broadcast_shared(
    x: Array, lhs_names: str, w: Array, rhs_names: str, shared: list[str]
) -> tuple[Array, Array]:
    """Repeats shared dims of size 1 where the other operand is longer, as jnp.einsum allows."""
    sizes = {n: max(x.shape[lhs_names.index(n)], w.shape[rhs_names.index(n)]) for n in shared}

    def grow(y: Array, names: str) -> Array:
        shape = [sizes.get(n, s) if s == 1 else s for n, s in zip(names, y.shape, strict=True)]
        return y if tuple(shape) == y.shape else jnp.broadcast_to(y, shape)

    return grow(x, lhs_names), grow(w, rhs_names)
