"""FP8 for Flax NNX: objects for the `dot_general` and `einsum_op` arguments of its modules.

`DotGeneral` and `EinsumOp` are frozen, compare by value and hold no arrays: a module keeps one as a
static attribute, so it passes through `nnx.jit`, `nnx.split` and `copy.deepcopy`, and variables
stay as they are. Random keys are state: who needs them takes `StochasticDotGeneral`, a module.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import numpy.typing as npt
from flax import nnx

from jax_fp8 import einsum, recipes
from jax_fp8.dot import ROLES
from jax_fp8.flax import common
from jax_fp8.recipes import Recipe

__all__ = ["DotGeneral", "EinsumOp", "StochasticDotGeneral"]


class _Frozen:
    """Checks that `DotGeneral` and `EinsumOp` share."""

    def __new__(cls, *arrays: Any, **_: Any) -> Self:
        if arrays:  # a module got the class, as Linen takes it, and calls it
            name = f"flax.nnx.{cls.__name__}"
            raise TypeError(
                f"{name}: it got {len(arrays)} positional arguments; give the module an instance, "
                f"{name}(), not the class"
            )
        return super().__new__(cls)

    def check_recipe(self, recipe: Recipe | None, remedy: str) -> None:
        name = f"flax.nnx.{type(self).__name__}"
        if common.rounds_stochastically(recipes.check(recipe, name)):
            raise ValueError(
                f"{name}: the recipe rounds stochastically and this has no keys: {remedy}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotGeneral(_Frozen):
    """`jax_fp8.dot_general` as Flax NNX wants it: inputs × kernel, the kernel as weight.

    For `dot_general=` of `nnx.Linear` and `nnx.LinearGeneral`, for `qkv_dot_general=` and
    `out_dot_general=` of `nnx.MultiHeadAttention`.

    Attributes:
      recipe: formats and scale tiles; None is `BlockScaling()`.
      roles: roles of lhs and rhs.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> layer = nnx.Linear(3, 4, dot_general=DotGeneral(), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    recipe: Recipe | None = None
    roles: tuple[str, str] = ROLES

    def __post_init__(self) -> None:
        self.check_recipe(self.recipe, "use StochasticDotGeneral")
        roles = recipes.check_roles(self.roles, "flax.nnx.DotGeneral")
        object.__setattr__(self, "roles", roles)

    def rounding_key(self) -> None:
        return None

    __call__ = common.dot_general


class StochasticDotGeneral(nnx.Module):
    """`DotGeneral` for a recipe that rounds gradients stochastically: each call draws a key.

    Give every layer its own. Its stream is state of the layer, as that of `nnx.Dropout` is:
    `nnx.jit` and `nnx.grad` carry it on.

    Attributes:
      recipe: formats and scale tiles.
      roles: roles of lhs and rhs.
      rngs: keys, forked from the stream "stochastic_rounding" of the `nnx.Rngs` given.

    >>> from flax import nnx
    >>> import jax_fp8 as fp8
    >>> rngs = nnx.Rngs(params=0, stochastic_rounding=1)
    >>> rounding = StochasticDotGeneral(recipe=fp8.RowScaling(rounding="stochastic"), rngs=rngs)
    >>> layer = nnx.Linear(3, 4, dot_general=rounding, rngs=rngs)
    """

    def __init__(self, *, recipe: Recipe, roles: tuple[str, str] = ROLES, rngs: nnx.Rngs) -> None:
        name = "flax.nnx.StochasticDotGeneral"
        self.recipe = recipes.check(recipe, name)
        self.roles = recipes.check_roles(roles, name)
        self.rngs = rngs.stochastic_rounding.fork()

    def rounding_key(self) -> jax.Array:
        return self.rngs()

    __call__ = common.dot_general


@dataclasses.dataclass(frozen=True, kw_only=True)
class EinsumOp(_Frozen):
    """`jax_fp8.einsum` for `einsum_op=` of `nnx.Einsum`: inputs × kernel, the kernel as weight.

    Roles stay with their operands, in whichever order the contraction takes them.

    Attributes:
      recipe: formats and scale tiles; None is `BlockScaling()`.
      roles: a role for each operand; None is "input" for the first, "weight" for others.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> layer = nnx.Einsum("bd,df->bf", (3, 4), einsum_op=EinsumOp(), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    recipe: Recipe | None = None
    roles: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self.check_recipe(self.recipe, "call jax_fp8.einsum with key= in a module of your own")
        if self.roles is not None:
            object.__setattr__(self, "roles", tuple(self.roles))

    def __call__(
        self,
        subscripts: str,
        *operands: jax.Array,
        precision: Any = None,
        preferred_element_type: npt.DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """`jax_fp8.einsum` with this object's recipe and roles."""
        return einsum(
            subscripts,
            *operands,
            recipe=self.recipe,
            roles=self.roles,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
