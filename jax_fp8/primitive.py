"""What the primitives share: evaluation outside jit, refused gradients, moving batch dims."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_fp8._compat import explicit_axes, zero_tangent

Array = jax.Array


def make(name: str, abstract_eval: Callable[..., Any], *, multiple_results: bool) -> Primitive:
    """Creates a primitive that outside jit runs as a jitted call of itself."""
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_abstract_eval(abstract_eval)

    @functools.lru_cache(maxsize=1024)
    def jitted(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    primitive.def_impl(lambda *args, **params: jitted(tuple(sorted(params.items())))(*args))
    return primitive


def refuse_tangents(primitive: Primitive, operands: Sequence[str], remedy: str) -> None:
    """Makes differentiation through `primitive` an error that names the operand and the remedy.

    Args:
      primitive: a primitive whose operands are not differentiable.
      operands: a name per operand; an operand beyond them takes the last name.
      remedy: what the user should do.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        for i, tangent in enumerate(tangents):
            if not isinstance(tangent, ad.Zero):
                refuse(operands[min(i, len(operands) - 1)], str(primitive), remedy)
        out = primitive.bind(*primals, **params)
        if not primitive.multiple_results:
            return out, zero_tangent(out)
        return out, [zero_tangent(x) for x in out]

    ad.primitive_jvps[primitive] = jvp


def refuse(operand: str, name: str, remedy: str) -> NoReturn:
    raise TypeError(f"{name}: a gradient was asked of {operand}, which has none; {remedy}")


def refuse_explicit(x: Array, call: str, side: str) -> None:
    """Raises if an operand is sharded over an Explicit mesh axis.

    XLA would gather it for a custom call, without a word.
    """
    sharded = explicit_axes(x)
    if sharded:
        dim, axis = sharded[0]
        raise NotImplementedError(
            f"{call}: dim {dim} of {side} (shape {x.shape}) is sharded over the Explicit mesh axis "
            f"{axis!r}, and the partitioning rules do not exist yet: XLA would gather it silently. "
            "Call inside jax.shard_map, make the axis Auto, or replicate the operand with "
            "jax.sharding.reshard"
        )


def to_front(operands: Sequence[Array], dims: Sequence[int | None]) -> list[Array]:
    """Moves each batched operand's batch dim to the front; others get a leading dim of size 1.

    A dim of size 1 stands for "the same for every example" and costs no copy.
    """
    return [
        x[None] if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
