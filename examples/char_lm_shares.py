"""Which share of the values of a Flax model FP8 flushes to zero or saturates, by role.

`Probe` is the library's `DotGeneral` that also shows its operands (with Flax's `sow`) and its
cotangent (with `perturb`), so one gradient of the loss has all that enters the quantizers.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax
import jax
import numpy as np

import jax_fp8 as fp8
from jax_fp8.flax.linen import DotGeneral

ROLES = ("input", "weight", "gradient")


class Probe(DotGeneral):
    """DotGeneral that records what it multiplies."""

    @flax.linen.compact
    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **options: Any) -> jax.Array:
        self.sow("operands", "input", lhs.reshape(-1, lhs.shape[-1]))
        self.sow("operands", "weight", rhs.T)  # rows are output columns
        out = super().__call__(lhs, rhs, *args, **options)
        return self.perturb("gradient", out)


def shares(
    build: Callable[[Any], Any], recipe: fp8.Recipe, params: Any, pieces: Any, loss: Any, rngs: Any
) -> dict[str, tuple[float, float]]:
    """Per cent of values that become zero, and that saturate, for each role over all layers.

    Args:
      build: the model, from a `dot_general_cls`.
      recipe: how the linears quantize.
      params: the model's trained parameters.
      pieces: (batch, CONTEXT + 1) characters.
      loss: mean loss of logits and targets.
      rngs: random streams for a recipe that rounds stochastically.
    """
    model = build(functools.partial(Probe, recipe=recipe))
    inputs, targets = pieces[:, :-1], pieces[:, 1:]
    zeros = model.init({"params": jax.random.key(0), **rngs}, inputs)["perturbations"]

    def probed(perturbations: Any) -> Any:
        variables = {**params, "perturbations": perturbations}
        logits, state = model.apply(variables, inputs, mutable="operands", rngs=rngs)
        return loss(logits, targets), state["operands"]

    cotangents, operands = jax.jit(jax.grad(probed, has_aux=True))(zeros)
    found: dict[str, list[jax.Array]] = {role: [] for role in ROLES}
    for tree in (operands, cotangents):
        for path, leaf in jax.tree.leaves_with_path(tree):
            role = next(k.key for k in reversed(path) if getattr(k, "key", None) in ROLES)
            found[role].append(leaf.reshape(-1, leaf.shape[-1]))
    return {role: share(recipe, role, found[role]) for role in ROLES}


def share(recipe: fp8.Recipe, role: Any, operands: list[jax.Array]) -> tuple[float, float]:
    """(flushed, saturated) per cent of matrices (rows, k) of one role."""
    flushed = saturated = nonzero = 0
    tile, fmt, static = recipe.tile(role), recipe.format(role), recipe.static_scale(role)
    power_of_two = recipe.power_of_two and static is None
    for x in operands:
        q = fp8.quantize(x, fmt, tile, scale=static, power_of_two=power_of_two)
        codes, real = np.asarray(q.values, np.float32), np.asarray(x)
        nonzero += int(np.count_nonzero(real))
        flushed += int(np.count_nonzero((codes == 0) & (real != 0)))
        if static is not None:  # a computed scale never saturates
            limit = fmt.saturation_threshold * static
            saturated += int(np.count_nonzero(np.abs(real) >= limit))
    return 100 * flushed / max(nonzero, 1), 100 * saturated / max(nonzero, 1)
