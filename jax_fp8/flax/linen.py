"""FP8 for Flax Linen: a class for the `dot_general_cls` argument of its modules."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from jax_fp8.dot import ROLES, dot_general
from jax_fp8.recipes import Recipe

__all__ = ["DotGeneral"]


class DotGeneral(nn.Module):
    """`jax_fp8.dot_general` as Flax Linen wants it: inputs × kernel, the kernel as weight.

    It holds neither parameters nor state: variables and checkpoints stay as they are.

    Attributes:
      recipe: formats and scale tiles; None is `BlockScaling()`.
      roles: roles of lhs and rhs.

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> layer = nn.Dense(4, dot_general_cls=DotGeneral)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> layer.apply(variables, jnp.ones((2, 3))).shape
    (2, 4)

    With another recipe: `dot_general_cls=functools.partial(DotGeneral, recipe=RowScaling())`. A
    recipe that rounds stochastically takes its keys from the stream "stochastic_rounding":
    `module.apply(variables, x, rngs={"stochastic_rounding": key})`.
    """

    recipe: Recipe | None = None
    roles: tuple[str, str] = ROLES

    @nn.compact
    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """See `jax_fp8.dot_general`."""
        stochastic = self.recipe is not None and self.recipe.rounding == "stochastic"
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe=self.recipe,
            roles=self.roles,
            key=self.make_rng("stochastic_rounding") if stochastic else None,
            out_sharding=out_sharding,
        )
