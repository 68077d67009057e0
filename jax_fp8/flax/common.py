"""What Linen and NNX share: the call that takes the place of Flax's `dot_general`."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from jax_fp8 import dot
from jax_fp8.recipes import Recipe

__all__ = ["Substitute", "dot_general", "rounds_stochastically"]


class Substitute(Protocol):
    """What `dot_general` reads from the object whose `__call__` it is."""

    @property
    def recipe(self) -> Recipe | None: ...

    @property
    def roles(self) -> tuple[str, str]: ...

    def rounding_key(self) -> jax.Array | None: ...


def dot_general(
    self: Substitute,
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax_fp8.dot_general` with this object's recipe and roles."""
    return dot.dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision,
        preferred_element_type,
        recipe=self.recipe,
        roles=self.roles,
        key=self.rounding_key() if rounds_stochastically(self.recipe) else None,
        out_sharding=out_sharding,
    )


def rounds_stochastically(recipe: Recipe | None) -> bool:
    return recipe is not None and recipe.rounding == "stochastic"
