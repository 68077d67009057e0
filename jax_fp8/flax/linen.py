"""FP8 for Flax Linen: a class for the `dot_general_cls` argument of its modules."""

from __future__ import annotations

import flax.linen as nn
import jax

from jax_fp8.dot import ROLES
from jax_fp8.flax import common
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

    __call__ = common.dot_general

    def rounding_key(self) -> jax.Array:
        """A new key of the stream, for a recipe that rounds stochastically."""
        return self.make_rng("stochastic_rounding")
