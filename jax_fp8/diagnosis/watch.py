"""`watch`: cheap statistics of what is quantised, on every n-th step of a training run.

The watched function is compiled twice into one program, with and without statistics, and a
condition on the step chooses. All statistics are one array: as a result of a jitted function, each
scalar of its own would cost some microseconds on every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jax_fp8 import formats, reference
from jax_fp8.diagnosis.capture import LETTERS, name_layers, roles_of
from jax_fp8.diagnosis.interpreter import Interpreter, Key, Tapped, Tracked
from jax_fp8.diagnosis.names import layer_of_path
from jax_fp8.diagnosis.program import named_leaves

__all__ = ["STATISTICS", "Stats", "watch"]

Array = jax.Array

#: What is kept of each quantised tensor. In loops, the largest over iterations (non_finite: sum).
STATISTICS: Final = ("amax", "flushed_percent", "saturated_percent", "non_finite")


def watch(fn: Callable[..., Any], *, every: int = 100) -> Callable[..., Any]:
    """Makes `fn` return statistics of its FP8 tensors, too, computed on every n-th step.

    Wrap what holds all the GEMMs of a step: `jax.value_and_grad(loss)`, or the whole step. A bare
    loss shows the forward pass only. Works inside jit and scan.

    Args:
      fn: a function of arrays that jax can trace.
      every: steps from one measurement to the next.

    Returns:
      Function of (step, *args) that returns (fn(*args), stats). `stats` is a mapping: `dict(stats)`
      is a plain dict of scalars for any logger. "sampled" is 1 on steps that measured, and there
      "layer/direction/tensor/statistic" holds amax, flushed_percent (nonzero values that became 0),
      saturated_percent (values that round above the largest code) and non_finite (a count).
      On other steps all of these are NaN.

    Raises:
      ValueError: `every` is no positive integer.

    >>> import jax_fp8 as fp8
    >>> loss = lambda w, x: fp8.matmul(x, w["up"]).sum()
    >>> step = jax.jit(watch(jax.value_and_grad(loss), every=10))
    >>> (value, gradients), stats = step(20, {"up": jnp.ones((8, 4))}, jnp.ones((2, 8)))
    >>> sorted(stats)[:2], float(stats["up/forward/x/amax"])
    (['sampled', 'up/forward/w/amax'], 1.0)
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"watch: every is {every!r}; it must be an integer >= 1")

    def watched(step: jax.typing.ArrayLike, *args: Any) -> tuple[Any, Stats]:
        leaves, names, tree = named_leaves(fn, args)

        def flat(*leaves: Any) -> Any:
            return fn(*jax.tree.unflatten(tree, leaves))

        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        interpreter = Interpreter(_keep, shadows=False)

        def measured(leaves: list[Any]) -> tuple[list[Any], Stats]:
            operands = [Tracked(x, path=name) for x, name in zip(leaves, names, strict=True)]
            out, taps = interpreter.evaluate(closed, operands)
            found = {"sampled": jnp.float32(1), **_statistics(taps, interpreter.roles)}
            return [x.value for x in out], Stats(jnp.stack(list(found.values())), tuple(found))

        _, kept = jax.eval_shape(measured, leaves)

        def unmeasured(leaves: list[Any]) -> tuple[list[Any], Stats]:
            values = np.full(kept.array.shape, np.nan, np.float32)
            values[0] = 0  # "sampled"
            return list(jaxpr_as_fun(closed)(*leaves)), dataclasses.replace(
                kept, array=jnp.asarray(values)
            )

        now = jnp.asarray(step) % every == 0
        out, stats = jax.lax.cond(now, measured, unmeasured, leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), out), stats

    return watched


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Stats(Mapping[str, Any]):
    """Statistics by name, in one array; a pytree. Under scan each has the loop's dim in front.

    Attributes:
      array: float32 (..., number of statistics).
      names: of the last dim.
    """

    array: Any
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        is_traced = isinstance(self.array, jax.core.Tracer)
        values = self.array if is_traced else np.asarray(self.array)
        return values[..., self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _keep(
    name: str, operands: list[Tracked], results: list[Any], params: dict[str, Any]
) -> dict[str, Any]:
    """Statistics of each copy that a quantiser makes."""
    if name == "gemm":
        return {}
    x = operands[0].value.astype(jnp.float32)
    fmt = formats.lookup(params["format"])
    finite = jnp.isfinite(x)
    size = jnp.where(finite, jnp.abs(x), 0)
    nonzero = size > 0
    total = jnp.maximum(jnp.sum(nonzero, dtype=jnp.float32), 1)
    kept = {
        "amax": jnp.max(size, initial=0),
        "non_finite": jnp.sum(~finite, dtype=jnp.float32),
    }
    for copy, codes in enumerate(results if len(results) == 1 else results[::2]):
        magnitude = jax.lax.bitcast_convert_type(codes, jnp.uint8) & 0x7F
        flushed = jnp.sum(nonzero & (magnitude == 0), dtype=jnp.float32)
        kept[f"flushed_percent{copy}"] = 100 * flushed / total
    if len(results) == 1:  # only a scale that was given can be too small
        scale = reference.expand_scale(operands[1].value, x.shape, params["tiles"][0])
        above = jnp.sum(size >= fmt.saturation_threshold * scale, dtype=jnp.float32)
        kept["saturated_percent"] = 100 * above / total
    else:
        kept["saturated_percent"] = jnp.zeros((), jnp.float32)
    return kept


def _statistics(taps: dict[Key, Tapped], roles: dict[Key, str]) -> dict[str, Array]:
    gemms = {key: tap for key, tap in sorted(taps.items()) if tap.primitive == "gemm"}
    layers = name_layers(gemms)
    found: dict[str, Array] = {}
    used: set[Key] = set()
    for key, tap in gemms.items():
        if tap.recomputed:
            continue
        for origin, role in zip(tap.origins[:2], roles_of(tap, roles), strict=True):
            if origin is not None and origin[0] in taps:
                used.add(origin[0])
                name = f"{layers[key]}/{tap.direction}/{LETTERS[role]}"
                found |= _named(name, taps[origin[0]], origin[1])
    for number, (key, tap) in enumerate(sorted(taps.items())):
        if tap.primitive == "quantize" and key not in used and not tap.recomputed:
            layer = tap.scope or layer_of_path(tap.paths[0]) or f"tensor{number}"
            if not any(origin and origin[0] == key for g in gemms.values() for origin in g.origins):
                found |= _named(f"{layer}/quantize/x", tap, 0)
    return found


def _named(name: str, tap: Tapped, copy: int) -> dict[str, Array]:
    dims = tuple(range(len(tap.lengths)))
    kept = {}
    for statistic in STATISTICS:
        value = tap.arrays.get(f"{statistic}{copy}", tap.arrays.get(statistic))
        reduce = jnp.sum if statistic == "non_finite" else jnp.max
        kept[f"{name}/{statistic}"] = reduce(jnp.asarray(value, np.float32), axis=dims)
    return kept
